#ifndef STIEFEL_KERNELS_CPU_SCRATCH_H_
#define STIEFEL_KERNELS_CPU_SCRATCH_H_

#include <cstdint>

namespace stiefel {

// Working memory of the calling thread, one piece per use, kept and grown for the life of the
// thread: what a block of rows, a tile of a product or oneDNN needs for the moment. Aligned to 64
// bytes; contents undefined.
enum class ScratchUse { kRows, kTile, kPrimitive, kFigures };
void* ThreadScratch(ScratchUse use, int64_t bytes);

}  // namespace stiefel

#endif  // STIEFEL_KERNELS_CPU_SCRATCH_H_
