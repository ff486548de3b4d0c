// Matrices and products in tile layout (tile_kernels.h).
#ifndef STIEFEL_KERNELS_CPU_AMX_TILE_MATRIX_H_
#define STIEFEL_KERNELS_CPU_AMX_TILE_MATRIX_H_

#include <cstdint>

#include "absl/functional/function_ref.h"
#include "kernels/cpu/amx/tile_kernels.h"
#include "kernels/cpu/thread_pool.h"

namespace stiefel {

inline int64_t BlocksOf(int64_t length) { return (length + kBlockSide - 1) / kBlockSide; }

// An operand: blocks in panels that lie along the inner dimension of the product, one panel after
// the other. As row tiles a panel is a block row, as pair tiles a block column; the matrix is
// padded with zeros to whole blocks. Borrows its memory, panels * steps * 2 KB.
struct TileOperand {
  uint16_t* data = nullptr;
  int64_t panels = 0, steps = 0;

  uint16_t* At(int64_t panel, int64_t step) const {
    return data + (panel * steps + step) * kBlockValues;
  }
};

// A symmetric matrix, as a left and as a right operand. Either may be absent.
struct SymmetricTiles {
  TileOperand rows, pairs;
};

class TileProducts {
 public:
  // Called with each fp32 block (i, j) of a product, once; it may change the block. On any thread.
  using Epilogue = absl::FunctionRef<void(float* block, int64_t i, int64_t j)>;

  // Shares the blocks out over the pool. Both are borrowed.
  TileProducts(const TileKernels& kernels, ThreadPool* pool) : kernels_(kernels), pool_(pool) {}

  // Computes a b; of a symmetric product only the blocks with i >= j.
  void Multiply(const TileOperand& a, const TileOperand& b, bool symmetric,
                Epilogue epilogue) const;

  // body(i) for i in [0, count), on any thread.
  void ForEach(int64_t count, absl::FunctionRef<void(int64_t)> body) const;

 private:
  const TileKernels& kernels_;
  ThreadPool* const pool_;
};

// Stores block (i, j), i >= j, of a symmetric matrix, and with it the mirrored one; of a block on
// the diagonal the lower triangle counts.
void StoreSymmetric(const TileKernels& kernels, float* block, int64_t i, int64_t j,
                    const SymmetricTiles& matrix);

}  // namespace stiefel

#endif  // STIEFEL_KERNELS_CPU_AMX_TILE_MATRIX_H_
