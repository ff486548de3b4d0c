// Matrix products on the CPU, through oneDNN.
//
// oneDNN runs on one thread per call (its OpenMP team size is set to 1 on each calling thread, and
// stays so) and computes one block of C at a time. The blocks are fixed by the shape, so that
// neither the number of threads nor who computes which block can change a bit.
#ifndef STIEFEL_KERNELS_CPU_GEMM_H_
#define STIEFEL_KERNELS_CPU_GEMM_H_

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "kernels/backend.h"
#include "kernels/cpu/thread_pool.h"

namespace stiefel {

// Stream::Gemm. INTERNAL where oneDNN fails.
absl::Status CpuGemm(ThreadPool* pool, const GemmArgs& args);

// Stream::Residual: returns |X X^T - I|_F / sqrt(rows) in *residual.
absl::Status CpuResidual(ThreadPool* pool, const MatrixView& x, double* residual);
// Likewise |P R P - I|_F / sqrt(rows).
absl::Status CpuResidual(ThreadPool* pool, const MatrixView& r, const MatrixView& p,
                         double* residual);

// Whether oneDNN multiplies bf16 on this processor.
bool CpuHasBf16();

// "oneDNN 2.6.0 avx512_core_bf16"
std::string OneDnnDescription();

// bf16 products keep a oneDNN primitive per shape; at most this many, the least recently used go
// first.
constexpr int64_t kMaxPrimitives = 64;
int64_t CachedPrimitives();

}  // namespace stiefel

#endif  // STIEFEL_KERNELS_CPU_GEMM_H_
