#include "kernels/cpu/amx/avx512_blocks.inc"
#include "kernels/cpu/amx/hardware_tiles.inc"
#include "kernels/cpu/amx/tile_kernels.h"
#include "kernels/cpu/amx/tile_kernels.inc"

namespace stiefel {

const TileKernels kAmxTileKernels = {
    "amx",
    HardwareTiles::Open,
    HardwareTiles::Close,
    MultiplyStrip<HardwareTiles>,
    Avx512Blocks::ToRowTiles,
    Avx512Blocks::ToPairTiles,
    Avx512Blocks::Transpose,
    Avx512Blocks::Combine,
};

}  // namespace stiefel
