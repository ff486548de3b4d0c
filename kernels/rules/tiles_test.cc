#include "kernels/rules/tiles.h"

#include <algorithm>
#include <string>
#include <vector>

#include "gtest/gtest.h"

namespace stiefel {
namespace {

TEST(TileGridTest, CoversEveryElementOnceWithTilesOfAtMostTheSize) {
  int grids = 0;
  for (int64_t rows = 1; rows <= 14; ++rows) {
    for (int64_t cols = 1; cols <= 14; ++cols) {
      for (int64_t size : {1, 3, 4, 7, 20}) {
        const TileGrid grid{rows, cols, size};
        std::vector<int> covered(rows * cols, 0);
        for (int64_t i = 0; i < grid.count(); ++i) {
          const Tile tile = grid.At(i);
          ASSERT_EQ(tile.row % size + tile.col % size, 0);
          ASSERT_TRUE(tile.rows >= 1 && tile.rows <= size && tile.cols >= 1 && tile.cols <= size);
          for (int64_t row = tile.row; row < tile.row + tile.rows; ++row) {
            for (int64_t col = tile.col; col < tile.col + tile.cols; ++col)
              ++covered[row * cols + col];
          }
        }
        for (int times : covered) ASSERT_EQ(times, 1) << rows << " x " << cols << " by " << size;
        ++grids;
      }
    }
  }
  EXPECT_EQ(grids, 14 * 14 * 5);
}

TEST(TiledPolarTest, EveryShapeOfTileIsExplainedOnce) {
  DeviceInfo device;
  const Rule rule = *PresetRule("himuon");
  const auto lines = [&](int64_t rows, int64_t cols) {
    const std::string text = TiledPolar::Make(rule, rows, cols, 64, device)->Explain();
    return std::count(text.begin(), text.end(), '\n');
  };
  EXPECT_EQ(lines(128, 192), 2);  // a heading, and 64 x 64
  EXPECT_EQ(lines(128, 200), 3);
  EXPECT_EQ(lines(130, 200), 5);
  EXPECT_EQ(lines(30, 200), 3);
}

}  // namespace
}  // namespace stiefel
