#include "kernels/cpu/amx/avx512_blocks.inc"
#include "kernels/cpu/amx/emulated_tiles.inc"
#include "kernels/cpu/amx/tile_kernels.h"
#include "kernels/cpu/amx/tile_kernels.inc"

namespace stiefel {

const TileKernels kEmulatedAvx512TileKernels = {
    "emulated, avx512",           EmulatedTiles::Open,      EmulatedTiles::Close,
    MultiplyStrip<EmulatedTiles>, Avx512Blocks::ToRowTiles, Avx512Blocks::ToPairTiles,
    Avx512Blocks::Transpose,      Avx512Blocks::Combine,
};

}  // namespace stiefel
