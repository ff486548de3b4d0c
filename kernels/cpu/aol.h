#ifndef STIEFEL_KERNELS_CPU_AOL_H_
#define STIEFEL_KERNELS_CPU_AOL_H_

#include "kernels/backend.h"
#include "kernels/cpu/thread_pool.h"

namespace stiefel {

// The AolPass of kernels/backend.h. Scale factors and products are fp64, rounded once to the
// operands' dtype; the preconditioned Gram matrix is symmetric to the bit.
void CpuRun(ThreadPool* pool, const AolPass& pass);

// scales[i] = 1 / sqrt(max(sums[i], 1e-7 max sums)), 0 where sums[i] is 0; in place.
void AolScales(int64_t m, double* sums);

}  // namespace stiefel

#endif  // STIEFEL_KERNELS_CPU_AOL_H_
