#ifndef STIEFEL_KERNELS_CPU_CPU_BACKEND_H_
#define STIEFEL_KERNELS_CPU_CPU_BACKEND_H_

#include <memory>

#include "kernels/backend.h"
#include "kernels/cpu/amx/tile_kernels.h"

namespace stiefel {

// Computes on `threads` processors (INVALID_ARGUMENT unless 1 <= threads <= 1024). A stream's work
// runs in the thread that enqueues it, helped through large matrices by the backend's own threads;
// for many small ones use several streams, as many as there are threads. Device memory is host
// memory.
absl::StatusOr<std::unique_ptr<Backend>> CreateCpuBackend(int threads);

// The same with the tile kernels for bf16 named: those of AMX where the processor has it, else null
// for none, are what the backend takes by itself. With those in software what a machine with AMX
// computes can be tested anywhere.
absl::StatusOr<std::unique_ptr<Backend>> CreateCpuBackend(int threads, const TileKernels* tiles);

}  // namespace stiefel

#endif  // STIEFEL_KERNELS_CPU_CPU_BACKEND_H_
