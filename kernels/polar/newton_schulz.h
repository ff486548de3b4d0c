// The polar map: Newton-Schulz iterations on X (m x n, m <= n, |X|_F <= 1), in the standard or the
// Gram form (docs/RULES.md section 2). Each iteration maps every singular value x of X to a x + b
// x^3 + c x^5.
#ifndef STIEFEL_KERNELS_POLAR_NEWTON_SCHULZ_H_
#define STIEFEL_KERNELS_POLAR_NEWTON_SCHULZ_H_

#include <cstdint>
#include <string>
#include <vector>

#include "kernels/backend.h"
#include "plan/rule.h"

namespace stiefel {

struct PolarPlan {
  std::vector<Coefficients> coefficients;
  bool gram = false;
  std::vector<int64_t> restarts;  // Gram form only, ascending
  DType compute = DType::kFp32;   // of X and of all products' operands; sums are fp32
  int64_t m = 0, n = 0;           // of X
};

// What a spectral rule runs on a rows x cols matrix. INVALID_ARGUMENT where the backend cannot do
// the rule's compute type.
absl::StatusOr<PolarPlan> MakePolarPlan(const Rule& rule, int64_t rows, int64_t cols,
                                        const DeviceInfo& device);

// Bytes of workspace beside the two buffers for X.
int64_t PolarWorkspaceBytes(const PolarPlan& plan);

// Enqueues the iterations. `x` holds X; `spare` has its shape and dtype. Returns whichever of the
// two holds the result. REQUIRES: `workspace` has PolarWorkspaceBytes(plan), aligned to 64 bytes.
MatrixView EnqueuePolar(Stream* stream, const PolarPlan& plan, MatrixView x, MatrixView spare,
                        void* workspace);

// "newton-schulz gram fp32"
std::string DescribePolar(const PolarPlan& plan);

}  // namespace stiefel

#endif  // STIEFEL_KERNELS_POLAR_NEWTON_SCHULZ_H_
