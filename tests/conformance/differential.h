// One rule on a backend and on the reference, side by side.
#ifndef STIEFEL_TESTS_CONFORMANCE_DIFFERENTIAL_H_
#define STIEFEL_TESTS_CONFORMANCE_DIFFERENTIAL_H_

#include <cstdint>
#include <functional>
#include <string>

#include "tests/conformance/backend_fixture.h"

namespace stiefel {

// docs/mathematics.md, section 7: fp32 against fp64, of the largest entry, where sigma_min / |X|_F
// >= .01, and for worse conditions.
constexpr double kFp32Error = 2e-5;
constexpr double kIllConditionedError = 3e-4;

// The tolerance for this step, of the largest entry. The worst that a unit of the polar map asks
// for: one of the two above, or what rounding comes to where the iterations are steep (raw
// POLAR_EXPRESS at 1: f' = 68000). To it come, for
//   spectral shaping: the turn of singular pairs that are found to a residual of 1e-6, over the
//     gaps between them (Davis and Kahan), times gain and 4 (two vectors, and entries against the
//     largest entry);
//   polora: the factors C^-1/2 and Q^-1/2, each of condition delta^-1/2;
//   row_spectral_max: the error of the norm that it caps.
double Fp32Tolerance(const Rule& rule, const ReferenceStep& step, const StepArgs& args);

// What a comparison found: the largest error over its tolerance.
struct Agreement {
  double worst = 0;
  double worst_error = 0;  // of the largest entry, whatever the tolerance
  std::string where;
  void Take(double error_over_tolerance, const std::string& at);
};

// One step of whatever is compared.
using StepUnderTest =
    std::function<Outcome(const HostView& view, const StepArgs& args, const StepOptions& options)>;

// `steps` steps of a rows x cols matrix: random normal gradients, the second step clipped and
// committed lazily, the third in WEIGHTS mode with another beta. EXPECTs that deltas (or weights),
// state and figures agree.
void CompareWithReference(Backend* backend, const Rule& rule, int64_t rows, int64_t cols,
                          int64_t phase, int64_t steps, uint64_t seed, Agreement* agreement);
void CompareWithReference(const StepUnderTest& under_test, const Rule& rule, int64_t rows,
                          int64_t cols, int64_t phase, int64_t steps, uint64_t seed,
                          Agreement* agreement);

}  // namespace stiefel

#endif  // STIEFEL_TESTS_CONFORMANCE_DIFFERENTIAL_H_
