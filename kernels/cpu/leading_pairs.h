#ifndef STIEFEL_KERNELS_CPU_LEADING_PAIRS_H_
#define STIEFEL_KERNELS_CPU_LEADING_PAIRS_H_

#include "absl/status/status.h"
#include "kernels/cpu/thread_pool.h"
#include "kernels/spectral_passes.h"

namespace stiefel {

// The primitives of kernels/spectral_passes.h on the CPU. Errors: those of CpuGemm.
absl::Status CpuRun(ThreadPool* pool, const LeadingPairsPass& pass);
absl::Status CpuRun(ThreadPool* pool, const ShapePass& pass);

}  // namespace stiefel

#endif  // STIEFEL_KERNELS_CPU_LEADING_PAIRS_H_
