#include "kernels/cpu/amx/emulated_tiles.inc"
#include "kernels/cpu/amx/tile_kernels.h"
#include "kernels/cpu/amx/tile_kernels.inc"

namespace stiefel {
namespace {

// What avx512_blocks.inc does, as plain loops.
struct PlainBlocks {
  static void ToRowTiles(const float* block, uint16_t* row_tiles) {
    for (int row = 0; row < kBlockSide; ++row) {
      for (int col = 0; col < kBlockSide; ++col) {
        row_tiles[row * kBlockSide + col] = Rounded(block[Place(row, col)]);
      }
    }
  }

  static void ToPairTiles(const uint16_t* row_tiles, uint16_t* pair_tiles) {
    for (int row = 0; row < kBlockSide; ++row) {
      for (int col = 0; col < kBlockSide; ++col) {
        uint16_t* tile = pair_tiles + col / kTileSide * kTileValues;
        tile[row / 2 * kBlockSide + col % kTileSide * 2 + row % 2] =
            row_tiles[row * kBlockSide + col];
      }
    }
  }

  static void Transpose(const uint16_t* tiles, uint16_t* out) {
    for (int tile = 0; tile < 2; ++tile) {
      for (int row = 0; row < kTileSide; ++row) {
        for (int col = 0; col < kTileSide; ++col) {
          __builtin_memcpy(out + tile * kTileValues + col * kBlockSide + 2 * row,
                           tiles + tile * kTileValues + row * kBlockSide + 2 * col,
                           sizeof(uint32_t));
        }
      }
    }
  }

  static void Combine(float alpha, float beta, const uint16_t* row_tiles, float* block) {
    for (int row = 0; row < kBlockSide; ++row) {
      for (int col = 0; col < kBlockSide; ++col) {
        const uint32_t bits = static_cast<uint32_t>(row_tiles[row * kBlockSide + col]) << 16;
        float wide;
        __builtin_memcpy(&wide, &bits, sizeof(wide));
        float& value = block[Place(row, col)];
        value = alpha * value + beta * wide;
      }
    }
  }

 private:
  // In an fp32 block. Row tiles of a block are simply its rows.
  static int Place(int row, int col) {
    return row / kTileSide * 512 + col / kTileSide * 256 + row % kTileSide * kTileSide +
           col % kTileSide;
  }

  static uint16_t Rounded(float value) {
    uint32_t bits;
    __builtin_memcpy(&bits, &value, sizeof(bits));
    const uint32_t magnitude = bits & 0x7FFFFFFFu;
    if (magnitude > 0x7F800000u) return static_cast<uint16_t>(bits >> 16 | 0x40u);  // NaN
    if (magnitude < 0x00800000u) return static_cast<uint16_t>(bits >> 16 & 0x8000u);
    return static_cast<uint16_t>((bits + 0x7FFFu + (bits >> 16 & 1u)) >> 16);
  }
};

}  // namespace

const TileKernels kEmulatedTileKernels = {
    "emulated",
    EmulatedTiles::Open,
    EmulatedTiles::Close,
    MultiplyStrip<EmulatedTiles>,
    PlainBlocks::ToRowTiles,
    PlainBlocks::ToPairTiles,
    PlainBlocks::Transpose,
    PlainBlocks::Combine,
};

}  // namespace stiefel
