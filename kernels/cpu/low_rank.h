#ifndef STIEFEL_KERNELS_CPU_LOW_RANK_H_
#define STIEFEL_KERNELS_CPU_LOW_RANK_H_

#include "kernels/cpu/thread_pool.h"
#include "kernels/spectral_passes.h"

namespace stiefel {

// The primitives of PoLoRA (kernels/spectral_passes.h) on the CPU.
void CpuRun(ThreadPool* pool, const MetricPass& pass);
void CpuRun(ThreadPool* pool, const GramPass& pass);
void CpuRun(ThreadPool* pool, const PoloraPass& pass);

}  // namespace stiefel

#endif  // STIEFEL_KERNELS_CPU_LOW_RANK_H_
