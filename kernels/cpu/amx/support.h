#ifndef STIEFEL_KERNELS_CPU_AMX_SUPPORT_H_
#define STIEFEL_KERNELS_CPU_AMX_SUPPORT_H_

namespace stiefel {

// Whether kAmxTileKernels runs here: the processor has AMX with bf16 and 8 tiles of 1 KB, and
// AVX-512 with bf16; the kernel saves tiles; and it granted their use to this process, which the
// first call asks for. Thread-safe; one answer for the life of the process.
bool CpuHasAmx();

// Whether the AVX-512 parts of the tile kernels run here.
bool CpuHasAvx512Bf16();

}  // namespace stiefel

#endif  // STIEFEL_KERNELS_CPU_AMX_SUPPORT_H_
