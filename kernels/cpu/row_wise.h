#ifndef STIEFEL_KERNELS_CPU_ROW_WISE_H_
#define STIEFEL_KERNELS_CPU_ROW_WISE_H_

#include "kernels/backend.h"
#include "kernels/cpu/thread_pool.h"

namespace stiefel {

// RowWisePass on the CPU. Rows without a spectral norm: one pass, each block of rows staying in the
// second-level cache between its norms and its delivery. Otherwise the direction is formed in the
// workspace first; the bits are the same.
void RunRowWise(ThreadPool* pool, const RowWisePass& pass);

}  // namespace stiefel

#endif  // STIEFEL_KERNELS_CPU_ROW_WISE_H_
