// bf16 matrices in the layout that AMX multiplies, and the innermost loops on it.
//
// A tile is 16 rows of 64 bytes. Matrices are cut into 32 x 32 blocks, and a block is kept as two
// tiles (2 KB) of one of two kinds:
//   row tiles    its upper and its lower 16 rows, 32 bf16 each: a left operand
//   pair tiles   its left and its right 16 columns; row p of a tile holds the elements (2p, c) and
//                (2p + 1, c) of its columns c, side by side: a right operand
// The row tiles of a block, each transposed as a 16 x 16 matrix of dwords, are the pair tiles of
// the transposed block, and the other way round.
//
// Products are fp32 blocks (4 KB): four 16 x 16 quarters, upper left, upper right, lower left,
// lower right, each row by row.
#ifndef STIEFEL_KERNELS_CPU_AMX_TILE_KERNELS_H_
#define STIEFEL_KERNELS_CPU_AMX_TILE_KERNELS_H_

#include <stdint.h>

namespace stiefel {

constexpr int64_t kTileSide = 16;
constexpr int64_t kBlockSide = 32;
constexpr int64_t kTileValues = 512;    // bf16 of a tile
constexpr int64_t kBlockValues = 1024;  // of a block: bf16 of two tiles, or fp32

// c_i = a_i b, or c_i + a_i b, for a strip of blocks one below the other; inner dimension 32 steps.
struct TileStrip {
  const uint16_t* a;  // row tiles of the first block row, `steps` blocks
  int64_t a_stride;   // values from one block row to the next
  const uint16_t* b;  // pair tiles of the block column, `steps` blocks
  int64_t blocks, steps;
  bool first;            // c is written, not added to
  float* c;              // one fp32 block after the other
  const uint16_t* next;  // what the next strip reads as b, or null
};

// All pointers are aligned to 64 bytes. Operands do not overlap results.
struct TileKernels {
  const char* name;
  // Sets the calling thread's tile unit up, and lets it go: around everything that multiplies, on
  // every thread, since any library on that thread may do the same.
  void (*open)();
  void (*close)();
  // REQUIRES: open. Each element sums even and odd terms of 32 apart and then both into c, step
  // after step, whatever the strip: the same bits however a product is cut.
  void (*multiply)(const TileStrip& strip);
  // Rounded to nearest, ties to even; subnormal numbers become zeros.
  void (*to_row_tiles)(const float* block, uint16_t* row_tiles);
  void (*to_pair_tiles)(const uint16_t* row_tiles, uint16_t* pair_tiles);
  // Each of the two tiles transposed as 16 x 16 dwords.
  void (*transpose)(const uint16_t* tiles, uint16_t* out);
  // block = alpha block + beta (what the row tiles hold), rounded after each operation.
  void (*combine)(float alpha, float beta, const uint16_t* row_tiles, float* block);
};

// The AMX tile unit with AVX-512. Only where CpuHasAmx().
extern const TileKernels kAmxTileKernels;
// The same instructions in software, with AVX-512 around them (only where CpuHasAvx512Bf16()), and
// with nothing special: what the others are tested against.
extern const TileKernels kEmulatedAvx512TileKernels;
extern const TileKernels kEmulatedTileKernels;

}  // namespace stiefel

#endif  // STIEFEL_KERNELS_CPU_AMX_TILE_KERNELS_H_
