// The polar map in bf16 on AMX tiles: operands are brought into tile layout once, stay in it
// through all iterations, and come out rounded to bf16. Sums and the terms a X and b A are fp32; a
// symmetric product is computed for one triangle.
#ifndef STIEFEL_KERNELS_CPU_AMX_POLAR_H_
#define STIEFEL_KERNELS_CPU_AMX_POLAR_H_

#include <cstdint>

#include "kernels/backend.h"
#include "kernels/cpu/amx/tile_kernels.h"
#include "kernels/cpu/thread_pool.h"

namespace stiefel {

// DeviceInfo::fused_polar_bytes. With M and N the sides of X rounded up to 32: 8 M N + 6 M M bytes
// in the standard form, 8 M N + 16 M M in the Gram form, and 8 M.
int64_t TilePolarBytes(int64_t m, int64_t n, bool gram);

// Stream::Run(PolarPass); `factor` is NormaliseFactor of its normalisation. The same bits with any
// number of threads.
void TilePolar(const TileKernels& kernels, ThreadPool* pool, const PolarPass& pass, double factor);

}  // namespace stiefel

#endif  // STIEFEL_KERNELS_CPU_AMX_POLAR_H_
