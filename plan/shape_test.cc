#include "plan/shape.h"

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace stiefel {
namespace {

using ::testing::HasSubstr;

absl::StatusOr<ParameterShape> Shape(const char* preset, const std::vector<int64_t>& shape,
                                     std::optional<int64_t> stack_dims = std::nullopt) {
  return ShapeOfParameter("w", shape, stack_dims, *PresetRule(preset));
}

// "name rows x cols @ first row", and so on.
std::string Text(const absl::StatusOr<ParameterShape>& shape) {
  if (!shape.ok()) return std::string(shape.status().message());
  std::string text = std::to_string(shape->rows) + " x " + std::to_string(shape->cols) + ":";
  for (const StackedMatrix& matrix : shape->matrices) {
    text += " " + matrix.name + " " + std::to_string(matrix.rows) + "x" +
            std::to_string(matrix.cols) + "@" + std::to_string(matrix.first_row);
  }
  return text;
}

// CASES A12, A13, A15
TEST(ShapeOfParameter, MatricesStacksAndConvolutions) {
  EXPECT_EQ(Text(Shape("muon", {4, 6})), "4 x 6: w 4x6@0");
  EXPECT_EQ(Text(Shape("muon", {4, 6}, 0)), "4 x 6: w 4x6@0");
  EXPECT_EQ(Text(Shape("muon", {3, 4, 6}, 1)), "12 x 6: w[0] 4x6@0 w[1] 4x6@4 w[2] 4x6@8");
  EXPECT_EQ(Text(Shape("muon", {1, 4, 6}, 1)), "4 x 6: w[0] 4x6@0");
  EXPECT_EQ(Text(Shape("muon", {2, 2, 4, 6}, 2)),
            "16 x 6: w[0,0] 4x6@0 w[0,1] 4x6@4 w[1,0] 4x6@8 w[1,1] 4x6@12");
  EXPECT_EQ(Text(Shape("muon", {8, 5, 3, 3}, 0)), "8 x 45: w 8x45@0");
  EXPECT_EQ(Text(Shape("muon", {2, 8, 5, 3, 3}, 1)), "16 x 45: w[0] 8x45@0 w[1] 8x45@8");
  EXPECT_EQ(Text(Shape("muon", {64, 32, 3, 3}, 0)), "64 x 288: w 64x288@0");
  EXPECT_EQ(Text(Shape("muon", {8, 1}, 0)), "8 x 1: w 8x1@0");  // one input is not depthwise
}

TEST(ShapeOfParameter, ElementwiseRulesTakeAnyShape) {
  EXPECT_EQ(Text(Shape("adamw", {})), "1 x 1: w 1x1@0");
  EXPECT_EQ(Text(Shape("adamw", {7})), "1 x 7: w 1x7@0");
  EXPECT_EQ(Text(Shape("adamw", {4, 6})), "4 x 6: w 4x6@0");
  EXPECT_EQ(Text(Shape("adamw", {8, 1, 3, 3})), "8 x 9: w 8x9@0");
  EXPECT_EQ(Text(Shape("adamw", {3, 7}, 1)), "3 x 7: w[0] 1x7@0 w[1] 1x7@1 w[2] 1x7@2");
  EXPECT_EQ(Shape("adamw", {7})->dimensions, 1);
  EXPECT_EQ(Shape("adamw", {4, 6})->dimensions, 2);
}

TEST(ShapeOfParameter, SplitsAndPairsCountTheRowsOfOneMatrix) {
  Rule rule = *PresetRule("cmuon");
  ASSERT_TRUE(SetOption(rule, "splits", "3,1").ok());
  EXPECT_TRUE(ShapeOfParameter("w", {5, 4, 6}, 1, rule).ok());
  EXPECT_THAT(Text(ShapeOfParameter("w", {5, 4, 6}, 0, rule)),
              HasSubstr("add up to 4, but the matrix has 5 rows"));
  // The factors of a stack of pairs meet one by one.
  Rule polora = *PresetRule("polora");
  polora.pair = "b";
  EXPECT_EQ(ShapeOfParameter("a", {5, 4, 6}, 1, polora)->matrices[3].rule.pair, "b[3]");
  EXPECT_EQ(ShapeOfParameter("a", {4, 6}, {}, polora)->matrices[0].rule.pair, "b");
}

// CASES A16, A21, A28
TEST(ShapeOfParameter, RefusesWithTheShapeAndTheWayOut) {
  const struct {
    const char* preset;
    std::vector<int64_t> shape;
    std::optional<int64_t> stack_dims;
    const char* reason;
  } cases[] = {
      {"muon", {7}, {}, "w of shape [7]: preset muon"},
      {"muon", {7}, {}, "use adamw, lion or sgd"},
      {"muon", {}, {}, "0 dimension"},
      {"muon", {3, 7}, 1, "stack_dims=1 leaves 1 dimension"},
      {"muon", {8, 5, 3, 3}, {}, "stack_dims=0 for one matrix of 8 rows"},
      {"polora", {8, 4, 6}, {}, "stack_dims=1 for a stack of 8 matrices of 4 rows"},
      {"muon", {8, 1, 3, 3}, 0, "depthwise"},
      {"muon", {2, 8, 1, 9}, 1, "each of its 8 rows"},
      {"muon", {4, 1, 8192}, {}, "say which axes"},
      {"muon", {4, 1, 8192}, 0, "depthwise"},
      {"muon", {4, 6}, 2, "stack_dims=2 is not from 0 to 1"},
      {"muon", {4, 6}, -1, "stack_dims=-1"},
      {"adamw", {4}, 1, "from 0 to 0"},
      {"adamw", {4, 0}, {}, "a size of 0"},
      {"adamw", {4, -6}, {}, "a size of -6"},
      {"adamw", {int64_t{1} << 40, int64_t{1} << 40}, {}, "overflows"},
      {"adamw", {int64_t{1} << 30, int64_t{1} << 29}, {}, "overflows"},
      {"muon", {int64_t{1} << 30, 2, 2}, 1, "1073741824 matrices"},
      {"adamw", std::vector<int64_t>(17, 1), {}, "17 dimensions"},
  };
  for (const auto& bad : cases) {
    const auto shape = Shape(bad.preset, bad.shape, bad.stack_dims);
    EXPECT_EQ(shape.status().code(), absl::StatusCode::kInvalidArgument) << bad.reason;
    EXPECT_THAT(Text(shape), HasSubstr(bad.reason));
  }
}

}  // namespace
}  // namespace stiefel
