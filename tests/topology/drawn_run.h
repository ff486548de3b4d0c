// A training run drawn at random: mesh, model, how it is spread, what is absent, weights.
#ifndef STIEFEL_TESTS_TOPOLOGY_DRAWN_RUN_H_
#define STIEFEL_TESTS_TOPOLOGY_DRAWN_RUN_H_

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "absl/time/time.h"
#include "client/topology.h"

namespace stiefel::testing {

inline constexpr int64_t kSteps = 3;

struct DrawnRun {
  uint64_t seed = 0;
  int servers = 1;
  UpdateMode mode = UpdateMode::kDelta;
  Mesh mesh;
  std::vector<ParameterSpec> parameters;
  std::vector<ParameterSpread> spreads;
  std::vector<bool> may_be_absent;  // by parameter
  // The dimension along which the weights of ranks differ; empty: all weigh 1.
  std::string weighted_dim;
  std::vector<double> dim_weights;  // by coordinate of it

  int32_t ranks() const;
  // The rank's coordinate of a dimension, and the dimension's size.
  int64_t Coordinate(int32_t rank, const std::string& dim) const;
  int64_t SizeOf(const std::string& dim) const;
  double WeightOf(int32_t rank) const;
  // "seed 7: 2 servers, {pp 2, dp 3}; w0 [12, 8] muon ...", to tell a failure by.
  std::string Describe() const;
};

// Deadlines for dozens of threads on a loaded machine, under a sanitizer: nothing here tests them.
inline void BePatient(TrainerOptions* options) {
  options->connect_timeout = options->join_timeout = absl::Seconds(120);
  options->step_timeout = options->lease = absl::Seconds(120);
}

// At most 12 ranks. `large`: more and larger parameters.
DrawnRun Draw(uint64_t seed, bool large);

// How many runs have a parameter that is spread in each of the ways that users name. The keys are
// there from the start.
class StrategyCounts {
 public:
  StrategyCounts();
  void Add(const DrawnRun& run);
  const std::map<std::string, int64_t>& counts() const { return counts_; }

 private:
  std::map<std::string, int64_t> counts_;
};

}  // namespace stiefel::testing

#endif  // STIEFEL_TESTS_TOPOLOGY_DRAWN_RUN_H_
