#include "plan/rule.h"

#include <cmath>
#include <limits>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace stiefel {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

Rule Preset(const std::string& name) {
  absl::StatusOr<Rule> rule = PresetRule(name);
  EXPECT_TRUE(rule.ok()) << rule.status();
  return *rule;
}

std::string Error(const absl::Status& status) {
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
  return std::string(status.message());
}

TEST(RuleTest, EveryPresetIsValidAndRoundTripsThroughItsOptions) {
  for (const PresetInfo& info : Presets()) {
    const Rule rule = Preset(std::string(info.name));
    EXPECT_TRUE(ValidateRule(rule, 3, 5).ok()) << info.name;
    EXPECT_FALSE(info.source.empty());
    EXPECT_EQ(DescribeRule(rule), info.name);
    Rule copy = Preset(std::string(info.name));
    for (const auto& [key, value] : Options(rule)) {
      EXPECT_TRUE(SetOption(copy, key, value).ok()) << info.name << " " << key << "=" << value;
    }
    EXPECT_EQ(Options(copy), Options(rule));
  }
}

TEST(RuleTest, PresetDefaultsAreThoseOfTheTable) {
  EXPECT_EQ(Preset("muon").lr, 0.02);
  EXPECT_EQ(Preset("muon_torch").eps_mode, EpsMode::kClamp);
  EXPECT_EQ(Preset("muon_moonlight").momentum, MomentumKind::kHeavyBall);
  EXPECT_EQ(Preset("muon_moonlight").scale, ScaleKind::kMatchRmsAdamw);
  EXPECT_EQ(Preset("periodic_rowwise_muon").period, 3);
  EXPECT_EQ(Preset("adamw").beta2, 0.95);
  EXPECT_EQ(Preset("lion").beta2, 0.99);
  EXPECT_EQ(Preset("sgd").lr, 0.1);
}

TEST(RuleTest, ChangedOptionsRoundTrip) {
  Rule rule = Preset("muon");
  const std::vector<std::pair<std::string, std::string>> settings = {
      {"lr", "0.1"},
      {"period", "4"},
      {"phase", "3"},
      {"row_scale", "rms"},
      {"row_rms", "0.2"},
      {"restarts", "1,3"},
      {"scale", "2.5"},
      {"coefficients", "1.5,-0.5,0;1.875,-1.25,0.375"},
      {"steps", "2"},
      {"restarts", "none"},
      {"eps_mode", "add"},
      {"eps", "1e-07"},
      {"form", "gram"},
      {"compute", "bf16"},
      {"row_axis", "long"},
      {"nesterov", "false"},
      {"momentum", "ema_bias_corrected"}};
  for (const auto& [key, value] : settings) ASSERT_TRUE(SetOption(rule, key, value).ok()) << key;
  ASSERT_TRUE(ValidateRule(rule, 8, 4).ok()) << ValidateRule(rule, 8, 4);
  Rule copy = Preset("muon");
  // In reverse, since order must not matter.
  const auto options = Options(rule);
  for (auto it = options.rbegin(); it != options.rend(); ++it) {
    ASSERT_TRUE(SetOption(copy, it->first, it->second).ok()) << it->first << "=" << it->second;
  }
  EXPECT_EQ(Options(copy), options);
  EXPECT_EQ(copy.lr, 0.1);
  EXPECT_EQ(copy.phase, 3);
  EXPECT_THAT(DescribeRule(copy), HasSubstr("muon lr=0.1 momentum=ema_bias_corrected"));
}

// The default number of steps belongs to the table: five steps of a table of twelve is a change.
TEST(RuleTest, ChangedOptionsRestoreTheRule) {
  Rule rule = Preset("muon");
  EXPECT_TRUE(ChangedOptions(rule).empty());
  ASSERT_TRUE(SetOption(rule, "steps", "5").ok());
  EXPECT_TRUE(ChangedOptions(rule).empty());
  ASSERT_TRUE(SetOption(rule, "coefficients", "convergent").ok());
  EXPECT_EQ(DescribeRule(rule), "muon coefficients=convergent steps=5");
  Rule restored = Preset("muon");
  for (const auto& [key, value] : ChangedOptions(rule))
    ASSERT_TRUE(SetOption(restored, key, value).ok());
  EXPECT_EQ(Options(restored), Options(rule));
  rule.steps.reset();
  EXPECT_EQ(DescribeRule(rule), "muon coefficients=convergent");
}

TEST(RuleTest, UnknownNamesSuggestTheNearest) {
  EXPECT_THAT(Error(PresetRule("muom").status()), HasSubstr("did you mean \"muon\""));
  EXPECT_THAT(Error(PresetRule("adam").status()), HasSubstr("did you mean \"adamw\""));
  Rule rule = Preset("muon");
  EXPECT_THAT(Error(SetOption(rule, "weight_dacay", "0")),
              HasSubstr("did you mean \"weight_decay\""));
  EXPECT_THAT(Error(SetOption(rule, std::string("a\0\n", 3), "0")), HasSubstr("\"a??\""));
}

TEST(RuleTest, KeysThatThePresetCannotUseAreRefusedWithTheReason) {
  Rule adamw = Preset("adamw");
  EXPECT_THAT(Error(SetOption(adamw, "steps", "5")), HasSubstr("orthogonalises nothing"));
  EXPECT_THAT(Error(SetOption(adamw, "period", "3")), HasSubstr("alike in every step"));
  EXPECT_THAT(Error(SetOption(adamw, "beta", "0.9")), HasSubstr("beta1 and beta2"));
  Rule lion = Preset("lion");
  EXPECT_THAT(Error(SetOption(lion, "eps", "1e-8")), HasSubstr("divides by nothing"));
  Rule muon = Preset("muon");
  EXPECT_THAT(Error(SetOption(muon, "beta1", "0.9")), HasSubstr("its coefficient is beta"));
  EXPECT_THAT(Error(SetOption(muon, "splits", "1")), HasSubstr("belongs to cmuon"));
  EXPECT_THAT(Error(SetOption(muon, "off_refresh", "tiled")), HasSubstr("muonbp"));
  EXPECT_THAT(Error(SetOption(muon, "normalise", "aol")), HasSubstr("turbo_muon"));
}

TEST(RuleTest, BadValuesAreRefusedAndChangeNothing) {
  const std::vector<std::pair<std::string, std::string>> bad = {{"lr", "-1"},
                                                                {"lr", "nan"},
                                                                {"lr", "inf"},
                                                                {"lr", "x"},
                                                                {"lr", ""},
                                                                {"beta", "1"},
                                                                {"beta", "-0.1"},
                                                                {"period", "0"},
                                                                {"period", "-3"},
                                                                {"period", "1.5"},
                                                                {"phase", "-1"},
                                                                {"steps", "0"},
                                                                {"steps", "65"},
                                                                {"safety", "0.9"},
                                                                {"eps", "-1e-8"},
                                                                {"restarts", "0"},
                                                                {"restarts", "2,2"},
                                                                {"scale", "0"},
                                                                {"scale", "big"},
                                                                {"nesterov", "yes"},
                                                                {"momentum", "accumulate"},
                                                                {"compute", "fp8"},
                                                                {"coefficients", "1,2"},
                                                                {"coefficients", "1,2,nan"},
                                                                {"weight_decay", "1e400"}};
  Rule rule = Preset("muon");
  const auto before = Options(rule);
  for (const auto& [key, value] : bad) {
    EXPECT_THAT(Error(SetOption(rule, key, value)), HasSubstr("\"" + value + "\"")) << key;
  }
  EXPECT_EQ(Options(rule), before);
}

TEST(RuleTest, ValidateRuleChecksShapesContradictionsAndHandFilledFields) {
  Rule rule = Preset("muon");
  EXPECT_THAT(Error(ValidateRule(rule, 0, 5)), HasSubstr("0 x 5"));
  EXPECT_THAT(Error(ValidateRule(rule, -1, 5)), HasSubstr("-1 x 5"));
  EXPECT_THAT(Error(ValidateRule(rule, int64_t{1} << 40, int64_t{1} << 40)),
              HasSubstr("overflows"));
  // CASES A28: a flat parameter never reaches the orthogonaliser; a 1 x n matrix is one.
  EXPECT_THAT(Error(ValidateRule(rule, 1, 5, 1)), HasSubstr("use adamw, lion or sgd"));
  EXPECT_TRUE(ValidateRule(rule, 1, 5, 2).ok());
  EXPECT_TRUE(ValidateRule(Preset("adamw"), 1, 5, 1).ok());

  rule.phase_mode = PhaseMode::kNumber;
  rule.phase = 1;
  EXPECT_THAT(Error(ValidateRule(rule, 3, 5)), HasSubstr("phase=1 is not below period=1"));
  rule = Preset("muon");
  rule.period = 0;
  EXPECT_THAT(Error(ValidateRule(rule, 3, 5)), HasSubstr("period"));
  rule = Preset("muon");
  rule.beta = std::numeric_limits<double>::quiet_NaN();
  EXPECT_THAT(Error(ValidateRule(rule, 3, 5)), HasSubstr("beta"));
  rule = Preset("muon");
  rule.eps = 1e-7;
  EXPECT_THAT(Error(ValidateRule(rule, 3, 5)), HasSubstr("eps_mode"));
  rule = Preset("muon");
  rule.row_scale = RowScale::kRms;
  EXPECT_THAT(Error(ValidateRule(rule, 3, 5)), HasSubstr("row_rms"));
  rule = Preset("muon");
  rule.coefficients = CoefficientTable::kYou;
  rule.steps = 6;
  EXPECT_THAT(Error(ValidateRule(rule, 3, 5)), HasSubstr("5 entries"));
  rule = Preset("muon");
  rule.restarts = {5};
  EXPECT_THAT(Error(ValidateRule(rule, 3, 5)), HasSubstr("last iteration is 4"));
}

TEST(RuleTest, KindFollowsThePhase) {
  const Rule rule = Preset("periodic_rowwise_muon");
  for (int64_t step = 1; step <= 9; ++step) {
    for (int64_t phase = 0; phase < 3; ++phase) {
      EXPECT_EQ(KindAtStep(rule, phase, step) == StepKind::kRefresh, (step - 1) % 3 == phase);
    }
  }
  EXPECT_EQ(KindAtStep(Preset("muon"), 0, int64_t{1} << 60), StepKind::kRefresh);
}

TEST(RuleTest, StateAndScaleFollowTheRule) {
  EXPECT_DOUBLE_EQ(ScaleFactor(Preset("muon"), 8, 4), std::sqrt(2.0));
  EXPECT_DOUBLE_EQ(ScaleFactor(Preset("muon"), 4, 8), 1);
  EXPECT_DOUBLE_EQ(ScaleFactor(Preset("muon_moonlight"), 4, 9), 0.6);
}

TEST(RuleTest, CoefficientSchedules) {
  Rule rule = Preset("muon");
  EXPECT_EQ(PolarCoefficients(rule).size(), 5u);
  rule.coefficients = CoefficientTable::kPolarExpress;
  rule.steps = 8;
  const std::vector<Coefficients> schedule = PolarCoefficients(rule);
  ASSERT_EQ(schedule.size(), 8u);
  EXPECT_DOUBLE_EQ(schedule[0].a, 8.28721201814563 / 1.05);
  EXPECT_DOUBLE_EQ(schedule[7].b, -1.25 / (1.05 * 1.05 * 1.05));
  EXPECT_THAT(GramRestarts(rule, false), ElementsAre(2));
  EXPECT_THAT(GramRestarts(rule, true), ElementsAre(2, 4));
  rule.steps = 3;
  EXPECT_THAT(GramRestarts(rule, true), ElementsAre(2));
}

}  // namespace
}  // namespace stiefel
