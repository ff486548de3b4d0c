#include "plan/shards.h"

#include <random>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace stiefel {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

TEST(ShardsTest, CutsTheLongSide) {
  EXPECT_THAT(ShardRects(10, 4, {3, 7}),
              ElementsAre(Rect{0, 3, 0, 4}, Rect{3, 7, 0, 4}, Rect{7, 10, 0, 4}));
  EXPECT_THAT(ShardRects(4, 10, {3}), ElementsAre(Rect{0, 4, 0, 3}, Rect{0, 4, 3, 10}));
  EXPECT_THAT(ShardRects(4, 10, {}), ElementsAre(Rect{0, 4, 0, 10}));
}

TEST(ShardsTest, EvenCutsDifferByAtMostOneAndCoverTheMatrix) {
  std::mt19937 random(1);
  for (int round = 0; round < 500; ++round) {
    const int64_t rows = 1 + random() % 40, cols = 1 + random() % 40, shards = 1 + random() % 50;
    const std::vector<int64_t> at = EvenCuts(rows, cols, shards);
    ASSERT_TRUE(ValidateCuts(rows, cols, at).ok());
    const std::vector<Rect> rects = ShardRects(rows, cols, at);
    ASSERT_EQ(static_cast<int64_t>(rects.size()), std::min(shards, LongSide(rows, cols)));
    int64_t area = 0;
    for (const Rect& rect : rects) {
      area += rect.Area();
      EXPECT_LE(rects[0].Area() - rect.Area(), std::min(rows, cols));
      EXPECT_GE(rects[0].Area(), rect.Area());
    }
    EXPECT_EQ(area, rows * cols);
  }
}

TEST(ShardsTest, TheCutsOfABlockMakeItUp) {
  for (const auto& [rows, cols] : std::vector<std::pair<int64_t, int64_t>>{{10, 4}, {4, 10}}) {
    const std::vector<Rect> shards = ShardRects(rows, cols, {1, 5, 6});
    for (const Rect& block : {Rect{0, rows, 0, cols}, Rect{0, 2, 0, 2}, Rect{1, 3, 1, 4},
                              Rect{3, 4, 3, 4}, Rect{rows - 1, rows, cols - 1, cols}}) {
      std::vector<Rect> cover;
      int32_t last = -1;
      for (const ShardPart& part : CutAtShards(block, shards)) {
        EXPECT_GT(part.shard, last);
        last = part.shard;
        EXPECT_TRUE(ValidateRect(part.rect, shards[last].rows(), shards[last].cols()).ok());
        cover.push_back(InMatrix(shards[last], part.rect));
        EXPECT_EQ(Intersect(cover.back(), block), cover.back());
      }
      EXPECT_TRUE(Gaps(block, cover).empty()) << block.DebugString();
      EXPECT_TRUE(Overlaps(cover).empty());
    }
  }
}

TEST(ShardsTest, RefusesCutsOutsideTheLongSide) {
  for (const std::vector<int64_t>& at :
       std::vector<std::vector<int64_t>>{{0}, {10}, {11}, {-1}, {3, 3}, {7, 3}}) {
    const absl::Status status = ValidateCuts(10, 4, at);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(status.message()), HasSubstr("10 x 4"));
  }
}

TEST(ShardsTest, SaysWhichOptionForbidsSharding) {
  const auto why = [](const std::string& preset, const std::string& key, const std::string& value) {
    Rule rule = *PresetRule(preset);
    if (!key.empty()) {
      EXPECT_TRUE(SetOption(rule, key, value).ok());
    }
    return std::string(ValidateSharding(rule, 64, 32).message());
  };
  EXPECT_EQ(why("muon", "", ""), "");
  EXPECT_EQ(why("periodic_rowwise_muon", "", ""), "");
  EXPECT_EQ(why("adamw", "", ""), "");
  EXPECT_THAT(why("muon", "num_heads", "4"), HasSubstr("splits"));
  EXPECT_THAT(why("dion3", "", ""), HasSubstr("selected"));
  EXPECT_THAT(why("himuon", "", ""), HasSubstr("tiles"));
  EXPECT_THAT(why("samuon", "", ""), HasSubstr("shaping"));
  EXPECT_THAT(why("normuon", "", ""), HasSubstr("row variance"));
  EXPECT_THAT(why("polora", "", ""), HasSubstr("polora"));
  EXPECT_EQ(why("muon", "compute", "fp32"), "");
  EXPECT_THAT(why("muon", "compute", "bf16"), HasSubstr("fp32"));
  EXPECT_THAT(why("muonbp", "", ""), HasSubstr("tiles"));
  EXPECT_THAT(why("periodic_rowwise_muon", "row_spectral_max", "2"), HasSubstr("row_spectral_max"));
  // The sum over ranges of rows is the Gram matrix of columns; AOL scales the short side, and of a
  // square matrix rows.
  EXPECT_EQ(why("turbo_muon", "", ""), "");
  EXPECT_THAT(std::string(ValidateSharding(*PresetRule("turbo_muon"), 32, 32).message()),
              HasSubstr("square"));
}

}  // namespace
}  // namespace stiefel
