// The controlled problems of the quality study: small enough to tune every rule on, each with one
// property that separates optimizers.
#ifndef STIEFEL_TESTS_BENCH_QUALITY_STUDY_PROBLEM_H_
#define STIEFEL_TESTS_BENCH_QUALITY_STUDY_PROBLEM_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"

namespace stiefel::quality {

// A trainable array, rows x cols, row-major. `spectral` ones get the rule under study, the others
// adamw at the learning rate that the problem fixes for them.
struct Array {
  std::string name;
  int64_t rows = 0, cols = 0;
  bool spectral = true;
  std::vector<float>* weights = nullptr;
  std::vector<float>* gradient = nullptr;
};

// One instance: a start and data that follow from the seed. Thread-compatible.
class Problem {
 public:
  virtual ~Problem() = default;
  virtual const std::vector<Array>& arrays() const = 0;
  // Fills every gradient at the current weights with the batch of `step` (1, 2, ...).
  virtual void Gradients(int64_t step) = 0;
  // What is compared: smaller is better. Not a number, or infinite, where training diverged.
  virtual double Evaluate() = 0;
};

struct ProblemInfo {
  std::string name;
  std::string what;     // it is, in a line
  std::string metric;   // what Evaluate returns
  int64_t steps = 0;    // of a run
  double other_lr = 0;  // of the arrays that are not spectral
};

// min |U V^T - T|_F^2 / (2 |T|_F^2), T of 128 x 96 with 8 singular values from 1 down to 0.01, U
// and V of 16 columns; whole gradients. Metric: |U V^T - T|_F / |T|_F.
ProblemInfo FactorisationInfo();
std::unique_ptr<Problem> MakeFactorisation(uint64_t seed);

// Four 64 x 64 layers without nonlinearity that learn a given linear map from inputs with a
// covariance of condition number 100, in batches of 8, so that every gradient has rank 8. Metric:
// expected squared error relative to that of the zero map, computed exactly.
ProblemInfo LinearNetworkInfo();
std::unique_ptr<Problem> MakeLinearNetwork(uint64_t seed);

// The byte-level language model of client/examples/byte_lm with hidden layers of 128. Metric: bits
// per byte on held-out text.
ProblemInfo ByteLmInfo();
// `text`: path of the text, printed by bible-kjv where it does not exist. Errors: those of
// byte_lm::Text::Load.
absl::StatusOr<std::unique_ptr<Problem>> MakeByteLm(const std::string& text, uint64_t seed);

}  // namespace stiefel::quality

#endif  // STIEFEL_TESTS_BENCH_QUALITY_STUDY_PROBLEM_H_
