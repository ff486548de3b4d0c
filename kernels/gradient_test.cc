#include "kernels/gradient.h"

#include <cmath>
#include <limits>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace stiefel {
namespace {

using ::testing::HasSubstr;

const float kData[64] = {};

GradientPiece Piece(Rect rect, double weight = 1, int32_t group = 0) {
  GradientPiece piece;
  piece.rect = rect;
  piece.data = kData;
  piece.weight = weight;
  piece.group = group;
  piece.rank = group;
  return piece;
}

TEST(GradientPlanTest, CutsIntoBandsAndSpansThatTileTheMatrix) {
  GradientView view;
  view.pieces = {Piece({0, 4, 0, 3}, 1, 0), Piece({2, 6, 1, 5}, 3, 1), Piece({0, 6, 0, 5}, 0, 2)};
  const GradientPlan plan = *GradientPlan::Make(view, 7, 5);
  int64_t row = 0, area = 0;
  for (const GradientPlan::Band& band : plan.bands()) {
    EXPECT_EQ(band.row_begin, row);
    row = band.row_end;
    int64_t col = 0;
    for (const GradientPlan::Span& span : band.spans) {
      EXPECT_EQ(span.col_begin, col);
      col = span.col_end;
      area += (row - band.row_begin) * (span.col_end - span.col_begin);
    }
    EXPECT_EQ(col, 5);
  }
  EXPECT_EQ(row, 7);
  EXPECT_EQ(area, 35);
  // Rows 2..4, columns 1..3 have both; the piece of weight 0 is in none.
  const GradientPlan::Span& both = plan.bands()[1].spans[1];
  ASSERT_EQ(both.terms.size(), 2u);
  EXPECT_EQ(both.terms[0].coefficient, 0.25f);
  EXPECT_EQ(both.terms[1].coefficient, 0.75f);
  EXPECT_TRUE(plan.bands().back().spans[0].terms.empty());
}

TEST(GradientPlanTest, GroupsComeTogetherInOrderOfFirstAppearance) {
  GradientView view;
  view.pieces = {Piece({0, 1, 0, 2}, 2, 7), Piece({0, 1, 0, 2}, 1, 3), Piece({0, 1, 0, 2}, 2, 7)};
  const GradientPlan plan = *GradientPlan::Make(view, 1, 2);
  const auto& terms = plan.bands()[0].spans[0].terms;
  ASSERT_EQ(terms.size(), 3u);
  EXPECT_EQ(terms[0].piece, &view.pieces[0]);
  EXPECT_EQ(terms[1].piece, &view.pieces[2]);
  EXPECT_EQ(terms[2].piece, &view.pieces[1]);
  EXPECT_TRUE(terms[0].opens_group);
  EXPECT_FALSE(terms[1].opens_group);
  EXPECT_TRUE(terms[2].opens_group);
  EXPECT_FLOAT_EQ(terms[0].coefficient, 2.0f / 3);
}

TEST(GradientPlanTest, ASingleGroupHasCoefficientOne) {
  GradientView view;
  view.pieces = {Piece({0, 1, 0, 2}, 0.3, 7)};
  EXPECT_EQ(GradientPlan::Make(view, 1, 2)->bands()[0].spans[0].terms[0].coefficient, 1.0f);
}

TEST(GradientPlanTest, RefusesWhatIsNotAGradientOfTheMatrix) {
  const auto error = [](GradientPiece piece, double grad_scale = 1) {
    GradientView view;
    view.grad_scale = grad_scale;
    view.pieces = {Piece({0, 1, 0, 1}), piece};
    const absl::Status status = GradientPlan::Make(view, 3, 5).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    return std::string(status.message());
  };
  EXPECT_THAT(error(Piece({0, 4, 0, 5})), HasSubstr("[0:4, 0:5]"));
  EXPECT_THAT(error(Piece({1, 1, 0, 5})), HasSubstr("[1:1, 0:5]"));
  EXPECT_THAT(error(Piece({0, 1, 0, 1}, -1, 1)), HasSubstr("weight -1"));
  EXPECT_THAT(error(Piece({0, 1, 0, 1}, std::numeric_limits<double>::infinity(), 1)),
              HasSubstr("weight inf"));
  EXPECT_THAT(error(Piece({0, 1, 0, 1}, 2, 0)), HasSubstr("its group 0 has 1"));
  EXPECT_THAT(error(Piece({0, 1, 0, 1}), 0), HasSubstr("grad_scale 0"));
  EXPECT_THAT(error(Piece({0, 1, 0, 1}), std::nan("")), HasSubstr("grad_scale nan"));
  GradientPiece empty = Piece({0, 1, 0, 1}, 1, 1);
  empty.data = nullptr;
  EXPECT_THAT(error(empty), HasSubstr("no data"));
}

TEST(CountNonfiniteTest, CountsInfAndNanOfEveryDtype) {
  const float inf = std::numeric_limits<float>::infinity();
  const float f[4] = {1, inf, -inf, std::numeric_limits<float>::quiet_NaN()};
  const uint16_t b[4] = {0x3f80, 0x7f80, 0xff80, 0x7f7f};
  const uint16_t h[4] = {0x3c00, 0x7c00, 0x7e00, 0x7bff};
  GradientPiece piece;
  piece.rect = {0, 2, 3, 5};
  piece.data = f;
  EXPECT_EQ(CountNonfinite(piece), 3);
  piece.dtype = DType::kBf16;
  piece.data = b;
  EXPECT_EQ(CountNonfinite(piece), 2);
  piece.dtype = DType::kFp16;
  piece.data = h;
  EXPECT_EQ(CountNonfinite(piece), 2);
}

}  // namespace
}  // namespace stiefel
