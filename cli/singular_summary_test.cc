#include "cli/singular_summary.h"

#include <gtest/gtest.h>

#include <cmath>

namespace stiefel {
namespace {

// Random singular vectors, these singular values.
Dense WithValues(const std::vector<double>& values, int64_t rows, int64_t cols) {
  const int64_t m = static_cast<int64_t>(values.size());
  Dense s(m, m);
  for (int64_t i = 0; i < m; ++i) s(i, i) = values[i];
  return Multiply(Multiply(Transpose(RandomOrthonormalRows(m, rows, 3)), s),
                  RandomOrthonormalRows(m, cols, 4));
}

StepArgs Args(double lr) {
  StepArgs args;
  args.lr = lr;
  return args;
}

Rule Muon(const std::vector<std::pair<std::string, std::string>>& options) {
  Rule rule = *PresetRule("muon");
  for (const auto& [key, value] : options) {
    const absl::Status status = SetOption(rule, key, value);
    EXPECT_TRUE(status.ok()) << status;
  }
  return rule;
}

TEST(SingularSummary, UndoesLrAndScale) {
  const Dense o = WithValues({0.5, 0.75, 1, 1.25}, 16, 4);
  // scale original of 16 x 4 is 2.
  const auto summary = SummariseUpdates(Muon({}), Args(0.1), {Scaled(-0.2, o)});
  ASSERT_TRUE(summary.has_value());
  EXPECT_TRUE(summary->exact);
  EXPECT_NEAR(summary->min, 0.5, 1e-12);
  EXPECT_NEAR(*summary->median, 0.875, 1e-12);
  EXPECT_NEAR(summary->max, 1.25, 1e-12);
}

TEST(SingularSummary, OfSplitsAndTilesAndStacksTogether) {
  Rule rule = *PresetRule("cmuon");
  ASSERT_TRUE(SetOption(rule, "scale", "none").ok());
  ASSERT_TRUE(SetOption(rule, "splits", "2,3").ok());
  Dense fused(5, 8);
  SetBlock(WithValues({2, 3}, 2, 8), 0, 0, &fused);
  SetBlock(WithValues({1, 4, 5}, 3, 8), 2, 0, &fused);
  const auto splits = SummariseUpdates(rule, Args(1), {fused});
  ASSERT_TRUE(splits.has_value());
  EXPECT_NEAR(splits->min, 1, 1e-12);
  EXPECT_NEAR(*splits->median, 3, 1e-12);
  EXPECT_NEAR(splits->max, 5, 1e-12);

  Rule himuon = *PresetRule("himuon");
  ASSERT_TRUE(SetOption(himuon, "scale", "none").ok());
  ASSERT_TRUE(SetOption(himuon, "scale_of", "split").ok());
  ASSERT_TRUE(SetOption(himuon, "tile", "4").ok());
  Dense tiles(4, 6);
  SetBlock(WithValues({1, 2, 3, 4}, 4, 4), 0, 0, &tiles);
  SetBlock(WithValues({5, 6}, 4, 2), 0, 4, &tiles);
  const auto tiled = SummariseUpdates(himuon, Args(1), {tiles, Scaled(2, tiles)});
  ASSERT_TRUE(tiled.has_value());
  EXPECT_NEAR(tiled->min, 1, 1e-12);
  EXPECT_NEAR(tiled->max, 12, 1e-12);
}

TEST(SingularSummary, LeavesOutRowsThatWereNotSelected) {
  Dense delta(8, 6);
  SetBlock(WithValues({2, 3}, 2, 6), 3, 0, &delta);
  Rule rule = Muon({{"scale", "none"}});
  EXPECT_EQ(SummariseUpdates(rule, Args(1), {delta})->min < 1e-12, true);
  rule.select_fraction = 0.25;
  EXPECT_NEAR(SummariseUpdates(rule, Args(1), {delta})->min, 2, 1e-12);
}

TEST(SingularSummary, NothingWhereTheUpdateCannotBeSeen) {
  EXPECT_FALSE(SummariseUpdates(Muon({}), Args(0), {Dense(3, 4)}).has_value());
  EXPECT_FALSE(SummariseUpdates(*PresetRule("adamw"), Args(1), {Dense(3, 4)}).has_value());
  EXPECT_EQ(SummariseUpdates(Muon({}), Args(1), {Dense(3, 4)})->max, 0);
}

TEST(SingularSummary, EstimatesTheExtremes) {
  std::vector<double> values(150);
  for (size_t i = 0; i < values.size(); ++i) values[i] = 0.7 + 0.4 * i / 149.0;
  values[0] = 0.01;
  for (const auto& [rows, cols] : {std::pair<int64_t, int64_t>{150, 200}, {200, 150}}) {
    const SingularSummary estimate = EstimateExtremes(WithValues(values, rows, cols));
    EXPECT_FALSE(estimate.exact);
    EXPECT_NEAR(estimate.max, 1.1, 0.005);
    EXPECT_NEAR(estimate.min, 0.01, 0.005);
  }
  const SingularSummary few = EstimateExtremes(WithValues({1, 2, 3}, 40, 60));
  EXPECT_NEAR(few.min, 1, 1e-9);
  EXPECT_NEAR(few.max, 3, 1e-9);
}

TEST(SingularSummary, SaysWhereItOnlyEstimates) {
  Dense large(400, 300);  // above kExactSingularWork
  SetBlock(WithValues({1, 2, 3}, 40, 60), 100, 100, &large);
  const auto summary = SummariseUpdates(Muon({{"scale", "none"}}), Args(1), {large});
  ASSERT_TRUE(summary.has_value());
  EXPECT_FALSE(summary->exact);
  EXPECT_FALSE(summary->median.has_value());
  EXPECT_NEAR(summary->max, 3, 1e-9);
}

}  // namespace
}  // namespace stiefel
