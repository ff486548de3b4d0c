#include <limits>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "plan/option_samples.h"
#include "plan/rule.h"

namespace stiefel {
namespace {

using ::testing::HasSubstr;
using Settings = std::vector<std::pair<std::string, std::string>>;

Rule Preset(std::string_view name, const Settings& settings = {}) {
  absl::StatusOr<Rule> rule = PresetRule(name);
  EXPECT_TRUE(rule.ok()) << rule.status();
  for (const auto& [key, value] : settings) {
    const absl::Status status = SetOption(*rule, key, value);
    EXPECT_TRUE(status.ok()) << status;
  }
  return *rule;
}

std::string Error(const absl::Status& status) {
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
  return std::string(status.message());
}

TEST(ValidateRule, EveryPresetIsValid) {
  for (const PresetInfo& info : Presets()) {
    EXPECT_TRUE(ValidateRule(Preset(info.name), 3, 5).ok()) << info.name;
    EXPECT_FALSE(info.source.empty());
    EXPECT_FALSE(info.summary.empty());
  }
}

TEST(ValidateRule, Shapes) {
  const Rule rule = Preset("muon");
  EXPECT_THAT(Error(ValidateRule(rule, 0, 5)), HasSubstr("0 x 5"));
  EXPECT_THAT(Error(ValidateRule(rule, -1, 5)), HasSubstr("-1 x 5"));
  EXPECT_THAT(Error(ValidateRule(rule, int64_t{1} << 40, int64_t{1} << 40)),
              HasSubstr("overflows"));
  // CASES A28: a flat parameter never reaches the orthogonaliser; a 1 x n matrix is one.
  EXPECT_THAT(Error(ValidateRule(rule, 1, 5, 1)), HasSubstr("use adamw, lion or sgd"));
  EXPECT_THAT(Error(ValidateRule(Preset("polora"), 1, 5, 1)), HasSubstr("use adamw"));
  EXPECT_TRUE(ValidateRule(rule, 1, 5, 2).ok());
  EXPECT_TRUE(ValidateRule(Preset("adamw"), 1, 5, 1).ok());
}

TEST(ValidateRule, HandFilledFieldsGoThroughTheSameChecks) {
  Rule rule = Preset("muon");
  rule.period = 0;
  EXPECT_THAT(Error(ValidateRule(rule, 3, 5)), HasSubstr("period"));
  rule = Preset("muon");
  rule.beta = std::numeric_limits<double>::quiet_NaN();
  EXPECT_THAT(Error(ValidateRule(rule, 3, 5)), HasSubstr("beta"));
  rule = Preset("muon");
  rule.coefficients = CoefficientTable::kList;
  rule.steps = 3;
  EXPECT_THAT(Error(ValidateRule(rule, 3, 5)), HasSubstr("coefficients"));
  rule = Preset("muon");
  rule.num_heads = 0;
  EXPECT_THAT(Error(ValidateRule(rule, 3, 5)), HasSubstr("num_heads"));
  rule = Preset("muon");
  rule.splits = {8, -5};
  EXPECT_THAT(Error(ValidateRule(rule, 3, 5)), HasSubstr("splits"));
  rule = Preset("muon");
  rule.tiles = {{5, 4}, {2, 4}};
  EXPECT_THAT(Error(ValidateRule(rule, 3, 5)), HasSubstr("tile"));
  rule = Preset("muon");
  rule.family = RuleFamily::kAdamw;
  EXPECT_THAT(Error(ValidateRule(rule, 3, 5)), HasSubstr("family"));
}

struct Contradiction {
  const char* preset;
  Settings settings;
  const char* reason;  // part of the message
};

// On a matrix of 12 x 20.
const std::vector<Contradiction>& Contradictions() {
  static const auto& cases = *new std::vector<Contradiction>{
      {"muon", {{"phase", "1"}}, "phase=1 is not below period=1"},
      {"muon", {{"row_scale", "rms"}}, "needs row_rms"},
      {"muon", {{"row_scale", "rms"}, {"row_rms", "0.2"}}, "row_scale has no effect with period=1"},
      {"muon", {{"phase", "synchronised"}}, "phase=synchronised has no effect with period=1"},
      {"muon", {{"off_refresh_lr_ratio", "0.5"}}, "off_refresh_lr_ratio has no effect"},
      {"normuon", {{"row_axis", "cols"}}, "row_axis has no effect with period=1"},
      {"cmuon", {{"row_spectral_max", "2"}}, "row_spectral_max has no effect with period=1"},
      {"muon", {{"eps_mode", "add"}}, "eps_mode=add has no effect while eps=0"},
      {"muon", {{"row_rms", "0.2"}}, "row_rms=0.2 has no effect"},
      {"muon", {{"eps", "1e-7"}}, "eps_mode=none"},
      {"muon", {{"coefficients", "you"}, {"steps", "6"}}, "5 entries"},
      {"muon", {{"restarts", "5"}}, "last iteration is 4"},
      {"muon", {{"form", "standard"}, {"restarts", "2"}}, "form=standard"},
      {"muon", {{"off_refresh", "tiled"}, {"period", "2"}}, "needs a tile"},
      {"muon", {{"off_refresh", "tiled"}, {"tile", "4"}}, "no effect with period=1"},
      {"muonbp", {{"tile", "none"}}, "needs a tile"},
      {"muonbp", {{"row_axis", "cols"}}, "no effect with off_refresh=tiled"},
      {"muonbp", {{"row_spectral_max", "2"}}, "no effect with off_refresh=tiled"},
      {"muon", {{"momentum", "accumulate"}}, "set nesterov=false"},
      {"dion2", {{"nesterov", "true"}}, "set nesterov=false"},
      {"dion2", {{"beta", "0.9"}}, "beta=0.9 has no effect"},
      {"turbo_muon", {{"eps_mode", "add"}, {"eps", "1e-7"}}, "eps_mode=add"},
      {"muon_torch", {{"normalise", "aol"}}, "eps_mode=clamp"},
      {"cmuon", {{"splits", "6,6"}, {"num_heads", "2"}}, "splits=6,6 and num_heads=2"},
      {"cmuon", {{"splits", "6,7"}}, "add up to 13, but the matrix has 12 rows"},
      {"cmuon", {{"splits", "9223372036854775807,9"}}, "overflows"},
      {"cmuon", {{"num_heads", "5"}}, "num_heads=5 does not divide the 12 rows"},
      {"dion2", {{"splits", "6,6"}}, "with splits or num_heads"},
      {"dion2", {{"num_heads", "2"}}, "with splits or num_heads"},
      {"dion2", {{"select_fraction", "1"}, {"num_heads", "2"}}, "damping=0.95 with splits"},
      {"dion3", {{"tile", "4"}}, "with tile"},
      {"dion3", {{"gain", "5"}}, "with gain=5"},
      {"muon", {{"select_axis", "short"}}, "no effect with select_fraction=1"},
      {"samuon", {{"tile", "4"}}, "gain=5 with tile"},
      {"samuon", {{"normalise", "aol"}}, "gain=5 with normalise=aol"},
      {"samuon", {{"deflation", "paper"}, {"gain", "7"}}, "can reverse the leading direction"},
      {"samuon",
       {{"deflation", "paper"}, {"coefficients", "keller_jordan"}},
       "singular values of 0.68"},
      {"muon", {{"warmup", "5"}}, "no effect with gain=1"},
      {"muon", {{"shaped_directions", "5"}}, "no effect with gain=1"},
      {"muon", {{"deflation", "paper"}}, "no effect with gain=1"},
      {"muon", {{"row_variance_eps", "1e-10"}}, "no effect while row_variance_beta2=none"},
      {"muon", {{"scale_of", "tile"}}, "scale_of=tile needs a tile"},
      {"himuon", {{"tile", "none"}}, "scale_of=tile needs a tile"},
      {"polora", {{"coefficients", "you"}, {"steps", "6"}}, "5 entries"},
  };
  return cases;
}

TEST(ValidateRule, ContradictionsAreRefusedWithTheReason) {
  for (const Contradiction& bad : Contradictions()) {
    const Rule rule = Preset(bad.preset, bad.settings);
    EXPECT_THAT(Error(ValidateRule(rule, 12, 20)), HasSubstr(bad.reason)) << DescribeRule(rule);
  }
}

TEST(ValidateRule, CombinationsThatMakeSenseAreAllowed) {
  const std::vector<std::pair<const char*, Settings>> good = {
      {"periodic_rowwise_muon", {{"splits", "6,6"}}},
      {"periodic_rowwise_muon", {{"num_heads", "3"}, {"tile", "4"}, {"scale_of", "tile"}}},
      {"dion3", {{"period", "3"}}},
      {"dion3", {{"select_axis", "short"}}},
      {"dion2", {{"momentum", "heavy_ball"}, {"beta", "0.9"}, {"nesterov", "true"}}},
      {"dion2", {{"select_fraction", "1"}}},
      {"muonbp", {{"period", "1"}}},
      {"periodic_rowwise_muon", {{"period", "1"}, {"row_axis", "cols"}}},
      {"muon_torch", {{"eps", "0"}}},
      {"muonbp", {{"gain", "5"}}},  // tiles only between refreshes
      {"muonbp", {{"scale_of", "tile"}, {"num_heads", "4"}}},
      {"samuon", {{"gain", "1"}, {"warmup", "5"}}},
      {"samuon_lite", {{"gain", "1"}}},
      {"samuon", {{"deflation", "paper"}, {"gain", "6"}}},
      {"samuon", {{"deflation", "paper"}, {"gain", "14"}, {"coefficients", "convergent"}}},
      {"samuon", {{"gain", "14"}, {"splits", "5,7"}, {"row_variance_beta2", "0.9"}}},
      {"turbo_muon", {{"coefficients", "polar_express"}, {"tile", "4"}, {"num_heads", "2"}}},
      {"normuon", {{"row_variance_eps", "1e-10"}, {"period", "3"}}},
      {"himuon", {{"tile", "4,100:none"}, {"scale_of", "full"}}},
      {"polora", {{"product_scale", "2"}, {"safety", "1"}}},
  };
  for (const auto& [preset, settings] : good) {
    const Rule rule = Preset(preset, settings);
    const absl::Status status = ValidateRule(rule, 12, 20);
    EXPECT_TRUE(status.ok()) << DescribeRule(rule) << ": " << status;
  }
}

// Of the rules that differ from a preset in one option, each is either valid or refused with a
// reason that names an option.
TEST(ValidateRule, EveryRefusalNamesAnOption) {
  int valid = 0, refused = 0;
  for (const SampledRule& sampled : RulesWithOneOptionChanged()) {
    const absl::Status status = ValidateRule(sampled.rule, 24, 30);
    if (status.ok()) {
      ++valid;
      continue;
    }
    ++refused;
    const std::string message(status.message());
    const std::string& key = sampled.changes[0].first;
    const bool named = message.find(key) != std::string::npos ||
                       (key == "steps" && message.find("iteration") != std::string::npos) ||
                       (key == "momentum" && message.find("nesterov") != std::string::npos) ||
                       (key == "coefficients" && message.find("steps") != std::string::npos);
    EXPECT_TRUE(named) << DescribeRule(sampled.rule) << ": " << message;
  }
  printf("%d rules valid, %d refused\n", valid, refused);
  EXPECT_GT(valid, 3 * refused);
}

TEST(FactorOf, TheShapeSaysItWhereItCan) {
  Rule rule = Preset("polora");
  EXPECT_EQ(*FactorOf(rule, 4, 20), PoloraFactor::kA);
  EXPECT_EQ(*FactorOf(rule, 20, 4), PoloraFactor::kB);
  EXPECT_EQ(RankOf(rule, 4, 20), 4);
  EXPECT_EQ(RankOf(rule, 20, 4), 4);
  EXPECT_THAT(Error(FactorOf(rule, 4, 4).status()), HasSubstr("4 x 4"));
  EXPECT_THAT(Error(ValidateRule(rule, 4, 4)), HasSubstr("set factor to a"));
  rule.factor = PoloraFactor::kB;
  EXPECT_EQ(*FactorOf(rule, 4, 4), PoloraFactor::kB);
  EXPECT_EQ(RankOf(rule, 4, 9), 9);  // the user's word, whatever the shape looks like
  EXPECT_TRUE(ValidateRule(rule, 4, 4).ok());
}

TEST(ValidatePair, AcceptsTheTwoFactorsOfAProductInEitherOrder) {
  const Rule a = Preset("polora", {{"pair", "b"}}), b = Preset("polora", {{"pair", "a"}});
  EXPECT_TRUE(ValidatePair("a", a, 4, 20, "b", b, 30, 4).ok());
  EXPECT_TRUE(ValidatePair("b", b, 30, 4, "a", a, 4, 20).ok());
  Rule square_a = a, square_b = b;
  square_a.factor = PoloraFactor::kA;
  square_b.factor = PoloraFactor::kB;
  EXPECT_TRUE(ValidatePair("a", square_a, 4, 4, "b", square_b, 4, 4).ok());
}

TEST(ValidatePair, RefusesWithTheNamesAndNumbers) {
  const Rule a = Preset("polora", {{"pair", "b"}}), b = Preset("polora", {{"pair", "a"}});
  EXPECT_THAT(Error(ValidatePair("a", a, 4, 20, "b", b, 30, 5)),
              HasSubstr("a has 4 rows, but factor b has 5 columns"));
  EXPECT_THAT(Error(ValidatePair("a", a, 4, 20, "b", b, 4, 30)), HasSubstr("both are factor a"));
  EXPECT_THAT(Error(ValidatePair("a", a, 4, 20, "c", b, 30, 4)), HasSubstr("name each other"));
  EXPECT_THAT(Error(ValidatePair("a", a, 4, 20, "b", Preset("polora"), 30, 4)),
              HasSubstr("name each other"));
  EXPECT_THAT(Error(ValidatePair("a", a, 4, 20, "b", Preset("muon"), 30, 4)),
              HasSubstr("polora and muon"));
  EXPECT_THAT(Error(ValidatePair("a", a, 4, 20, "a", a, 4, 20)), HasSubstr("its own partner"));
  const Rule other_lr = Preset("polora", {{"pair", "a"}, {"lr", "0.5"}});
  EXPECT_THAT(Error(ValidatePair("a", a, 4, 20, "b", other_lr, 30, 4)),
              HasSubstr("lr is 0.02 and 0.5"));
  EXPECT_THAT(Error(ValidatePair("a", a, 4, 4, "b", b, 30, 4)), HasSubstr("4 x 4"));
}

}  // namespace
}  // namespace stiefel
