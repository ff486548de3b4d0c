#include "plan/rule.h"

#include <cmath>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace stiefel {
namespace {

using ::testing::ElementsAre;

Rule Preset(std::string_view name) {
  absl::StatusOr<Rule> rule = PresetRule(name);
  EXPECT_TRUE(rule.ok()) << rule.status();
  return *rule;
}

// Section 6, row by row: what a preset is, as changes to muon.
TEST(Presets, AreThoseOfTheTable) {
  const auto difference = [](const char* preset) {
    Rule muon = Preset("muon");
    std::vector<std::string> changes;
    for (const auto& [key, value] : Options(Preset(preset))) {
      Rule next = muon;
      EXPECT_TRUE(SetOption(next, key, value).ok());
      if (Options(next) != Options(muon)) changes.push_back(key + "=" + value);
      muon = next;
    }
    return changes;
  };
  EXPECT_EQ(DescribeRule(Preset("muon")), "muon");
  const Rule muon = Preset("muon");
  EXPECT_EQ(muon.lr, 0.02);
  EXPECT_EQ(muon.beta, 0.95);
  EXPECT_TRUE(muon.nesterov);
  EXPECT_THAT(difference("muon_torch"),
              ElementsAre("lr=0.001", "weight_decay=0.1", "eps_mode=clamp", "eps=1e-07"));
  EXPECT_THAT(difference("muon_moonlight"),
              ElementsAre("lr=0.001", "weight_decay=0.1", "momentum=heavy_ball", "eps_mode=add",
                          "eps=1e-07", "scale=match_rms_adamw"));
  EXPECT_THAT(difference("periodic_rowwise_muon"), ElementsAre("period=3"));
  EXPECT_THAT(difference("muonbp"), ElementsAre("period=5", "off_refresh=tiled", "tile=512"));
  EXPECT_THAT(difference("samuon"), ElementsAre("nesterov=false", "coefficients=polar_express",
                                                "gain=5", "scale=spectral"));
  EXPECT_THAT(difference("samuon_lite"),
              ElementsAre("nesterov=false", "coefficients=polar_express", "gain=5",
                          "shaped_directions=1", "scale=spectral"));
  EXPECT_THAT(difference("cmuon"), ElementsAre());
  EXPECT_THAT(
      difference("dion2"),
      ElementsAre("lr=0.01", "momentum=accumulate", "nesterov=false", "coefficients=polar_express",
                  "form=gram", "select_fraction=0.25", "damping=0.95", "scale=spectral"));
  EXPECT_THAT(difference("dion3"),
              ElementsAre("lr=0.01", "momentum=accumulate", "nesterov=false",
                          "coefficients=polar_express", "form=gram", "select_fraction=0.25",
                          "damping=0.95", "row_variance_beta2=0.95", "scale=spectral"));
  EXPECT_THAT(difference("normuon"), ElementsAre("row_variance_beta2=0.95"));
  EXPECT_THAT(difference("turbo_muon"), ElementsAre("coefficients=turbo", "normalise=aol"));
  EXPECT_THAT(difference("himuon"),
              ElementsAre("weight_decay=0.1", "momentum=heavy_ball", "tile=512",
                          "scale=match_rms_adamw", "scale_of=tile"));
  const Rule polora = Preset("polora");
  EXPECT_EQ(polora.beta1, 0.9);
  EXPECT_EQ(polora.beta2, 0.99);
  EXPECT_EQ(polora.delta, 1e-4);
  EXPECT_EQ(PolarCoefficients(polora).size(), 5u);
  EXPECT_EQ(Preset("adamw").beta2, 0.95);
  EXPECT_EQ(Preset("lion").beta2, 0.99);
  EXPECT_EQ(Preset("sgd").lr, 0.1);
}

TEST(KindAtStep, FollowsThePhase) {
  const Rule rule = Preset("periodic_rowwise_muon");
  for (int64_t step = 1; step <= 9; ++step) {
    for (int64_t phase = 0; phase < 3; ++phase) {
      EXPECT_EQ(KindAtStep(rule, phase, step) == StepKind::kRefresh, (step - 1) % 3 == phase);
    }
  }
  EXPECT_EQ(KindAtStep(Preset("muon"), 0, int64_t{1} << 60), StepKind::kRefresh);
}

std::vector<std::string> StateOf(const Rule& rule, int64_t rows, int64_t cols) {
  std::vector<std::string> text;
  for (const StateBuffer& buffer : RuleState(rule, rows, cols)) {
    text.push_back(buffer.name + " " + std::to_string(buffer.rows) + "x" +
                   std::to_string(buffer.cols) + (buffer.elementwise ? " elementwise" : ""));
  }
  return text;
}

TEST(RuleState, FollowsTheRuleAndTheShape) {
  EXPECT_THAT(StateOf(Preset("muon"), 8, 6), ElementsAre("momentum 8x6 elementwise"));
  EXPECT_THAT(StateOf(Preset("adamw"), 8, 6),
              ElementsAre("momentum 8x6 elementwise", "variance 8x6 elementwise"));
  EXPECT_THAT(StateOf(Preset("sgd"), 8, 6), ElementsAre());
  Rule sgd = Preset("sgd");
  sgd.beta = 0.9;
  EXPECT_THAT(StateOf(sgd, 8, 6), ElementsAre("momentum 8x6 elementwise"));
  Rule dion3 = Preset("dion3");
  EXPECT_THAT(StateOf(dion3, 8, 6),
              ElementsAre("momentum 8x6 elementwise", "selected 8x1", "row_variance 8x1"));
  dion3.select_fraction = 1;  // still damped
  EXPECT_THAT(StateOf(dion3, 8, 6),
              ElementsAre("momentum 8x6 elementwise", "selected 8x1", "row_variance 8x1"));
  dion3.select_axis = SelectAxis::kShort;
  EXPECT_THAT(StateOf(dion3, 8, 6),
              ElementsAre("momentum 8x6 elementwise", "selected 1x6", "row_variance 8x1"));
  EXPECT_THAT(StateOf(dion3, 6, 8),
              ElementsAre("momentum 6x8 elementwise", "selected 6x1", "row_variance 6x1"));
  Rule samuon = Preset("samuon");
  samuon.shaped_directions = 3;
  samuon.splits = {2, 10};
  EXPECT_THAT(StateOf(samuon, 12, 6),
              ElementsAre("momentum 12x6 elementwise", "leading_directions 1x22"));  // 2 2 + 3 6
  EXPECT_THAT(StateOf(Preset("polora"), 4, 20),
              ElementsAre("momentum 4x20 elementwise", "factor_variance 1x20"));
  EXPECT_THAT(StateOf(Preset("polora"), 20, 4),
              ElementsAre("momentum 20x4 elementwise", "factor_variance 20x1"));
}

TEST(ScaleFactor, FollowsTheShape) {
  EXPECT_DOUBLE_EQ(ScaleFactor(Preset("muon"), 8, 4), std::sqrt(2.0));
  EXPECT_DOUBLE_EQ(ScaleFactor(Preset("muon"), 4, 8), 1);
  EXPECT_DOUBLE_EQ(ScaleFactor(Preset("muon_moonlight"), 4, 9), 0.6);
  EXPECT_DOUBLE_EQ(ScaleFactor(Preset("samuon"), 4, 9), 2.0 / 3);
  EXPECT_DOUBLE_EQ(ScaleFactor(Preset("polora"), 4, 9), 1);
}

TEST(SplitRows, AreTheUsersOrEqual) {
  Rule rule = Preset("cmuon");
  EXPECT_THAT(SplitRows(rule, 12), ElementsAre(12));
  rule.num_heads = 3;
  EXPECT_THAT(SplitRows(rule, 12), ElementsAre(4, 4, 4));
  rule.num_heads = 1;
  rule.splits = {8, 4};
  EXPECT_THAT(SplitRows(rule, 12), ElementsAre(8, 4));
  EXPECT_THAT(SplitRows(Preset("adamw"), 12), ElementsAre(12));
}

TEST(RuleOfSplit, ActsOnASplitAsTheFusedRuleDoes) {
  Rule rule = Preset("cmuon");
  rule.splits = {8, 4};
  const Rule alone = RuleOfSplit(rule, 12, 4);
  EXPECT_TRUE(ValidateRule(alone, 8, 4).ok());
  EXPECT_EQ(Options(alone), Options(Preset("cmuon")));
  EXPECT_DOUBLE_EQ(StepScale(alone, 8, 4, 1, StepKind::kRefresh), std::sqrt(2.0));
  rule.scale_of = ScaleOf::kFull;
  const Rule full = RuleOfSplit(rule, 12, 4);
  EXPECT_TRUE(ValidateRule(full, 8, 4).ok());
  EXPECT_DOUBLE_EQ(StepScale(full, 8, 4, 1, StepKind::kRefresh), std::sqrt(3.0));
}

TEST(TileAtStep, FollowsTheScheduleAndTheKind) {
  Rule rule = Preset("himuon");
  ASSERT_TRUE(SetOption(rule, "tile", "10:4,20:8,30:none").ok());
  const auto tile = [&rule](int64_t step, StepKind kind = StepKind::kRefresh) {
    return TileAtStep(rule, 9, 9, step, kind);
  };
  EXPECT_EQ(tile(9), 0);
  EXPECT_EQ(tile(10), 4);
  EXPECT_EQ(tile(20), 8);
  EXPECT_EQ(tile(30), 0);
  EXPECT_EQ(tile(10, StepKind::kOffRefresh), 0);  // a row-wise step
  EXPECT_EQ(TileAtStep(rule, 8, 8, 20, StepKind::kRefresh), 0);
  EXPECT_EQ(TileAtStep(rule, 1, 64, 20, StepKind::kRefresh), 0);
  EXPECT_EQ(TileAtStep(rule, 1, 65, 20, StepKind::kRefresh), 8);

  const Rule muonbp = Preset("muonbp");
  EXPECT_EQ(TileAtStep(muonbp, 1000, 1000, 1, StepKind::kRefresh), 0);
  EXPECT_EQ(TileAtStep(muonbp, 1000, 1000, 1, StepKind::kOffRefresh), 512);
}

TEST(StepScale, IsTheTilesWhereTilesAreInForce) {
  Rule rule = Preset("himuon");
  const double tile = 0.2 * std::sqrt(512.0), whole = 0.2 * std::sqrt(1000.0);
  EXPECT_DOUBLE_EQ(StepScale(rule, 600, 1000, 1, StepKind::kRefresh), tile);
  EXPECT_DOUBLE_EQ(StepScale(rule, 100, 1000, 1, StepKind::kRefresh), whole);
  rule.off_refresh_lr_ratio = 0.5;
  EXPECT_DOUBLE_EQ(StepScale(rule, 600, 1000, 1, StepKind::kOffRefresh), whole / 2);
  rule.scale_of = ScaleOf::kSplit;
  EXPECT_DOUBLE_EQ(StepScale(rule, 600, 1000, 1, StepKind::kRefresh), whole);
}

TEST(SelectedVectors, IsTheCeilingAndAtLeastOne) {
  Rule rule = Preset("dion2");
  EXPECT_EQ(SelectedVectors(rule, 1), 1);
  EXPECT_EQ(SelectedVectors(rule, 8), 2);
  EXPECT_EQ(SelectedVectors(rule, 9), 3);
  rule.select_fraction = 1e-9;
  EXPECT_EQ(SelectedVectors(rule, 100), 1);
  rule.select_fraction = 1;
  EXPECT_EQ(SelectedVectors(rule, 100), 100);
  EXPECT_FALSE(SelectsColumns(rule, 9, 4));
  rule.select_axis = SelectAxis::kShort;
  EXPECT_TRUE(SelectsColumns(rule, 9, 4));
  EXPECT_FALSE(SelectsColumns(rule, 4, 4));
  EXPECT_FALSE(SelectsColumns(rule, 4, 9));
}

TEST(Shaping, DirectionsAndWeight) {
  Rule rule = Preset("samuon");
  EXPECT_EQ(ShapedDirections(rule, 512), 32);
  EXPECT_EQ(ShapedDirections(rule, 2048), 64);
  EXPECT_EQ(ShapedDirections(rule, 1), 1);
  EXPECT_EQ(ShapedDirections(Preset("samuon_lite"), 2048), 1);
  rule.shaped_directions = 100;
  EXPECT_EQ(ShapedDirections(rule, 7), 7);
  EXPECT_EQ(ShapingWeight(rule, 1), 1);
  rule.warmup = 4;
  EXPECT_NEAR(ShapingWeight(rule, 1), (1 - std::sqrt(0.5)) / 2, 1e-15);
  EXPECT_NEAR(ShapingWeight(rule, 2), 0.5, 1e-15);
  EXPECT_EQ(ShapingWeight(rule, 4), 1);
  EXPECT_EQ(ShapingWeight(rule, 5), 1);
}

TEST(NeedsWeights, PoloraAlone) {
  for (const PresetInfo& info : Presets()) {
    EXPECT_EQ(NeedsWeights(Preset(info.name)), info.name == "polora");
  }
}

TEST(PolarCoefficients, Schedules) {
  Rule rule = Preset("muon");
  EXPECT_EQ(PolarCoefficients(rule).size(), 5u);
  rule.coefficients = CoefficientTable::kPolarExpress;
  rule.steps = 8;
  const std::vector<Coefficients> schedule = PolarCoefficients(rule);
  ASSERT_EQ(schedule.size(), 8u);
  EXPECT_DOUBLE_EQ(schedule[0].a, 8.28721201814563 / 1.05);
  EXPECT_DOUBLE_EQ(schedule[7].b, -1.25 / (1.05 * 1.05 * 1.05));
  EXPECT_THAT(GramRestarts(rule, 64, false), ElementsAre(3));
  EXPECT_THAT(GramRestarts(rule, 63, false), ElementsAre(1, 2, 3));
  EXPECT_THAT(GramRestarts(Preset("muon"), 8, false), ElementsAre(2));
  EXPECT_THAT(GramRestarts(rule, 8, true), ElementsAre(2, 4));
  rule.steps = 3;
  EXPECT_TRUE(GramRestarts(rule, 64, false).empty());
  EXPECT_THAT(GramRestarts(rule, 8, true), ElementsAre(2));
}

}  // namespace
}  // namespace stiefel
