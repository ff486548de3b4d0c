// The row and element passes of kernels/backend.h on the CPU. Work is cut into blocks fixed by the
// shape; each block is taken through in segments that stay in the first-level cache, and sums are
// added in block order.
#ifndef STIEFEL_KERNELS_CPU_PASSES_H_
#define STIEFEL_KERNELS_CPU_PASSES_H_

#include "kernels/backend.h"
#include "kernels/cpu/thread_pool.h"

namespace stiefel {

void CpuRun(ThreadPool* pool, const ElementPass& pass);
void CpuRun(ThreadPool* pool, const SelectPass& pass);
void CpuRun(ThreadPool* pool, const DampPass& pass);
void CpuRun(ThreadPool* pool, const GatherPass& pass);
void CpuRun(ThreadPool* pool, const MeasurePass& pass);
void CpuRun(ThreadPool* pool, const NormalisePass& pass);
// What that pass multiplies u with; 0 where x is all zeros whatever u holds.
double NormaliseFactor(const NormalisePass& pass);
void CpuRun(ThreadPool* pool, const RowVariancePass& pass);
void CpuRun(ThreadPool* pool, const DeliverPass& pass);
void CpuRun(ThreadPool* pool, const ScatterPass& pass);
void CpuRun(ThreadPool* pool, const VectorSumsPass& pass);
void CpuRun(ThreadPool* pool, const VectorPass& pass);
void CpuRun(ThreadPool* pool, const RowWisePass& pass);
void CpuAddDiagonal(ThreadPool* pool, const MatrixView& x, float diagonal, const MatrixView& out);
void CpuConvert(ThreadPool* pool, const MatrixView& from, const MatrixView& to);

}  // namespace stiefel

#endif  // STIEFEL_KERNELS_CPU_PASSES_H_
