// Tiles: the T x T pieces of a matrix that are orthogonalised on their own (HiMuon, MuonBP).
#ifndef STIEFEL_KERNELS_RULES_TILES_H_
#define STIEFEL_KERNELS_RULES_TILES_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "kernels/rules/unit.h"

namespace stiefel {

struct Tile {
  int64_t row = 0, col = 0, rows = 0, cols = 0;
};

// A rows x cols matrix cut into tiles from the top left, row by row; those at the right and bottom
// edges are what is left. (Padding them with zeros to T x T would not change the map.)
struct TileGrid {
  int64_t rows = 0, cols = 0, size = 0;

  int64_t across() const { return (cols + size - 1) / size; }
  int64_t count() const { return (rows + size - 1) / size * across(); }
  Tile At(int64_t i) const;
};

// The polar map on every tile of a direction.
class TiledPolar {
 public:
  // Errors: those of MakePolarPlan. REQUIRES: positive sizes.
  static absl::StatusOr<TiledPolar> Make(const Rule& rule, int64_t rows, int64_t cols, int64_t size,
                                         const DeviceInfo& device);

  int64_t size() const { return grid_.size; }
  int64_t WorkspaceBytes() const;
  std::string Method() const;
  std::string Explain() const;  // a line per shape of tile

  // Enqueues the map on every tile of `u` (rows x cols). The delivery gets each tile's O at its
  // place, and may write it over u as fp32; `stats` gets their figures.
  void Enqueue(Stream* stream, const float* u, const Delivery& delivery, StepStats* stats,
               char* workspace) const;

 private:
  explicit TiledPolar(const TileGrid& grid) : grid_(grid) {}

  const PolarUnit& UnitOf(const Tile& tile) const;
  int64_t PartBytes() const;
  int64_t LaneBytes() const;
  void EnqueueTile(Stream* stream, const Tile& tile, const float* u, const Delivery& delivery,
                   StepStats* stats, char* workspace) const;

  TileGrid grid_;
  // Tiles that are under way at once, each on one thread with a workspace of its own; 1: one after
  // the other, each by all threads.
  int64_t lanes_ = 1;
  std::vector<PolarUnit> units_;  // one per shape of tile, at most four, the largest first
};

}  // namespace stiefel

#endif  // STIEFEL_KERNELS_RULES_TILES_H_
