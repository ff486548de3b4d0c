#include "kernels/rules/tiles.h"

#include <algorithm>
#include <functional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/status.h"
#include "kernels/rules/rule_base.h"

namespace stiefel {

Tile TileGrid::At(int64_t i) const {
  Tile tile;
  tile.row = i / across() * size;
  tile.col = i % across() * size;
  tile.rows = std::min(size, rows - tile.row);
  tile.cols = std::min(size, cols - tile.col);
  return tile;
}

absl::StatusOr<TiledPolar> TiledPolar::Make(const Rule& rule, int64_t rows, int64_t cols,
                                            int64_t size, const DeviceInfo& device) {
  TiledPolar tiled(TileGrid{rows, cols, size});
  const int64_t full_rows = std::min(size, rows), full_cols = std::min(size, cols);
  // Several lanes together take at most 7/4 of the matrix.
  const int64_t full_tiles = rows / full_rows * (cols / full_cols);
  tiled.lanes_ = std::clamp<int64_t>(full_tiles / 4, 1, std::min(device.threads, kMaxLanes));
  for (int64_t tile_rows : {full_rows, rows % full_rows}) {
    for (int64_t tile_cols : {full_cols, cols % full_cols}) {
      if (tile_rows == 0 || tile_cols == 0) continue;
      STIEFEL_ASSIGN_OR_RETURN(PolarUnit unit, PolarUnit::Make(rule, tile_rows, tile_cols, device));
      tiled.units_.push_back(std::move(unit));
    }
  }
  return tiled;
}

const PolarUnit& TiledPolar::UnitOf(const Tile& tile) const {
  return *std::find_if(units_.begin(), units_.end(), [&](const PolarUnit& unit) {
    return unit.rows() == tile.rows && unit.cols() == tile.cols;
  });
}

int64_t TiledPolar::PartBytes() const {
  return Aligned(grid_.count() * static_cast<int64_t>(sizeof(StepStats)));
}

int64_t TiledPolar::LaneBytes() const {
  int64_t bytes = 0;
  for (const PolarUnit& unit : units_)
    bytes = std::max(bytes, 2 * Aligned(unit.OperandBytes()) + Aligned(unit.WorkspaceBytes()));
  return Aligned(sizeof(DirectionStats)) + bytes;
}

int64_t TiledPolar::WorkspaceBytes() const { return PartBytes() + lanes_ * LaneBytes(); }

std::string TiledPolar::Method() const {
  return absl::StrCat(DescribePolar(units_[0].plan()), " in tiles of ", grid_.size);
}

std::string TiledPolar::Explain() const {
  std::string text = absl::StrCat(grid_.count(), " tiles of at most ", grid_.size, " x ",
                                  grid_.size, ", ", lanes_, " at once:\n");
  for (const PolarUnit& unit : units_)
    absl::StrAppend(&text, "  ", ExplainPolar(unit.plan()), "\n");
  return text;
}

void TiledPolar::Enqueue(Stream* stream, const float* u, const Delivery& delivery, StepStats* stats,
                         char* workspace) const {
  auto* parts = reinterpret_cast<StepStats*>(workspace);
  stream->Zero(parts, PartBytes());
  const int64_t tiles = grid_.count();
  const auto enqueue_lane = [&](int64_t lane, Stream* sub) {
    for (int64_t i = lane; i < tiles; i += lanes_) {
      EnqueueTile(sub, grid_.At(i), u, delivery, &parts[i],
                  workspace + PartBytes() + lane * LaneBytes());
    }
  };
  if (lanes_ == 1) {
    enqueue_lane(0, stream);
  } else {
    stream->ForEach(lanes_, std::ref(enqueue_lane));
  }
  stream->Combine(parts, tiles, stats);
}

void TiledPolar::EnqueueTile(Stream* stream, const Tile& tile, const float* u,
                             const Delivery& delivery, StepStats* stats, char* workspace) const {
  const PolarUnit& unit = UnitOf(tile);
  auto* figures = reinterpret_cast<DirectionStats*>(workspace);
  char* x = workspace + Aligned(sizeof(DirectionStats));
  char* spare = x + Aligned(unit.OperandBytes());
  const float* corner = u + tile.row * grid_.cols + tile.col;
  MeasurePass measure;
  measure.u = corner;
  measure.rows = tile.rows;
  measure.cols = tile.cols;
  measure.stride = grid_.cols;
  measure.figures = figures;
  stream->Run(measure);
  const UnitUpdate update = unit.Enqueue(stream, corner, grid_.cols, figures, x, spare,
                                         spare + Aligned(unit.OperandBytes()), stats);
  DeliverPass deliver;
  deliver.x = update.o;
  deliver.transposed = update.transposed;
  deliver.rows = tile.rows;
  deliver.cols = tile.cols;
  deliver.stride = grid_.cols;
  deliver.delivery = DeliveryAt(delivery, tile.row, tile.col, grid_.cols);
  deliver.stats = stats;
  stream->Run(deliver);
}

}  // namespace stiefel
