// Every rule on a problem under the same tuning budget: a grid of learning rates around a stated
// centre, each point on the same tuning seeds; then the best point on seeds that tuning never saw.
#ifndef STIEFEL_TESTS_BENCH_QUALITY_STUDY_STUDY_H_
#define STIEFEL_TESTS_BENCH_QUALITY_STUDY_STUDY_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "plan/rule.h"
#include "tests/bench/quality_study/problem.h"

namespace stiefel::quality {

struct Contender {
  std::string name;  // in tables
  Rule rule;         // its lr is the centre of the grid
};

struct Budget {
  int grid_points = 9;  // learning rates, half a decade apart, the rule's own in the middle
  int tuning_seeds = 2;
  int final_seeds = 5;
  int threads = 2;  // runs at once, each on one thread
};

struct Score {
  std::string contender;
  std::vector<double> grid_lr,
      grid_value;  // the mean over the tuning seeds; infinite where a run diverged
  double best_lr = 0;
  bool at_edge = false;                 // the best point is the grid's first or last
  double median = 0, min = 0, max = 0;  // over the final seeds
};

using MakeProblem = std::function<absl::StatusOr<std::unique_ptr<Problem>>(uint64_t seed)>;

// The first error of any run. Deterministic: a run is one thread's.
absl::StatusOr<std::vector<Score>> Compare(const ProblemInfo& info, const MakeProblem& make,
                                           const std::vector<Contender>& contenders,
                                           const Budget& budget);

}  // namespace stiefel::quality

#endif  // STIEFEL_TESTS_BENCH_QUALITY_STUDY_STUDY_H_
