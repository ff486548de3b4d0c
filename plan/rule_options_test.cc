#include <algorithm>
#include <array>
#include <random>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "plan/option_samples.h"
#include "plan/rule.h"

namespace stiefel {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

Rule Preset(std::string_view name) {
  absl::StatusOr<Rule> rule = PresetRule(name);
  EXPECT_TRUE(rule.ok()) << rule.status();
  return *rule;
}

std::string Error(const absl::Status& status) {
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
  return std::string(status.message());
}

// Sets every option of `rule` on its preset, in the order of a shuffle: order must not matter.
Rule Rebuilt(const Rule& rule, std::mt19937* random) {
  Rule copy = Preset(rule.preset);
  auto options = Options(rule);
  std::shuffle(options.begin(), options.end(), *random);
  for (const auto& [key, value] : options) {
    EXPECT_TRUE(SetOption(copy, key, value).ok()) << DescribeRule(rule) << ": " << key;
  }
  return copy;
}

Rule RebuiltFromChanges(const Rule& rule) {
  Rule copy = Preset(rule.preset);
  for (const auto& [key, value] : ChangedOptions(rule)) {
    EXPECT_TRUE(SetOption(copy, key, value).ok()) << DescribeRule(rule) << ": " << key;
  }
  return copy;
}

TEST(Options, EverySampleIsAcceptedAndReadsBack) {
  size_t samples = 0;
  for (const PresetInfo& preset : Presets()) {
    const Rule base = Preset(preset.name);
    for (const auto& [key, unused] : Options(base)) {
      ASSERT_FALSE(SampleValues(key).empty()) << "no samples of option " << key;
      for (const std::string& value : SampleValues(key)) {
        Rule rule = base;
        ASSERT_TRUE(SetOption(rule, key, value).ok()) << preset.name << " " << key << "=" << value;
        for (const auto& [name, text] : Options(rule)) {
          // Another table has other default steps and safety; nothing else depends on anything.
          if (name == key) {
            EXPECT_EQ(text, value) << preset.name << " " << key;
          }
        }
        ++samples;
      }
    }
  }
  EXPECT_EQ(RulesWithOneOptionChanged().size(), samples);
}

TEST(Options, EveryPresetAndOptionRoundTrips) {
  std::mt19937 random(1);
  for (const SampledRule& sampled : RulesWithOneOptionChanged()) {
    const auto options = Options(sampled.rule);
    EXPECT_EQ(Options(Rebuilt(sampled.rule, &random)), options) << DescribeRule(sampled.rule);
    EXPECT_EQ(Options(RebuiltFromChanges(sampled.rule)), options) << DescribeRule(sampled.rule);
  }
}

TEST(Options, ManyAtOnceRoundTrip) {
  std::mt19937 random(2);
  for (int round = 0; round < 500; ++round) {
    Rule rule = Preset(Presets()[random() % Presets().size()].name);
    for (const auto& [key, unused] : Options(rule)) {
      const auto& values = SampleValues(key);
      if (random() % 2 == 0) continue;
      ASSERT_TRUE(SetOption(rule, key, values[random() % values.size()]).ok());
    }
    const auto options = Options(rule);
    ASSERT_EQ(Options(Rebuilt(rule, &random)), options);
    ASSERT_EQ(Options(RebuiltFromChanges(rule)), options);
  }
}

TEST(Options, PresetsSayOnlyTheirName) {
  for (const PresetInfo& preset : Presets()) {
    EXPECT_EQ(DescribeRule(Preset(preset.name)), preset.name);
  }
}

// The default number of steps belongs to the table: five steps of a table of twelve is a change.
TEST(Options, DefaultsOfATableGoWithIt) {
  Rule rule = Preset("muon");
  ASSERT_TRUE(SetOption(rule, "steps", "5").ok());
  EXPECT_TRUE(ChangedOptions(rule).empty());
  ASSERT_TRUE(SetOption(rule, "coefficients", "convergent").ok());
  EXPECT_EQ(DescribeRule(rule), "muon coefficients=convergent steps=5");
  rule.steps.reset();
  EXPECT_EQ(DescribeRule(rule), "muon coefficients=convergent");
}

TEST(Options, ValuesHaveOneWriting) {
  const std::vector<std::array<const char*, 3>> writings = {
      {"tile", "1:512", "512"},
      {"tile", "256,1000:512", "256,1000:512"},
      {"splits", "08,4", "8,4"},
      {"lr", "1E-2", "0.01"},
      {"weight_decay", "-0", "0"},
      {"nesterov", "1", "true"},
      {"row_variance_beta2", "0.950", "0.95"}};
  for (const auto& [key, given, canonical] : writings) {
    Rule rule = Preset("muon");
    ASSERT_TRUE(SetOption(rule, key, given).ok()) << key;
    for (const auto& [name, text] : Options(rule)) {
      if (name == key) {
        EXPECT_EQ(text, canonical);
      }
    }
  }
}

TEST(Options, UnknownNamesSuggestTheNearest) {
  EXPECT_THAT(Error(PresetRule("muom").status()), HasSubstr("did you mean \"muon\""));
  EXPECT_THAT(Error(PresetRule("adam").status()), HasSubstr("did you mean \"adamw\""));
  EXPECT_THAT(Error(PresetRule("dion4").status()), HasSubstr("did you mean \"dion"));
  Rule rule = Preset("muon");
  EXPECT_THAT(Error(SetOption(rule, "weight_dacay", "0")),
              HasSubstr("did you mean \"weight_decay\""));
  EXPECT_THAT(Error(SetOption(rule, "tiles", "5")), HasSubstr("did you mean \"tile\""));
  EXPECT_THAT(Error(SetOption(rule, std::string("a\0\n", 3), "0")), HasSubstr("\"a??\""));
  EXPECT_THAT(Error(SetOption(rule, "wd", "0")), HasSubstr("here it is weight_decay"));
  EXPECT_THAT(Error(SetOption(rule, "stack_dims", "1")), HasSubstr("--stack-dims"));
  const std::string far = Error(SetOption(rule, "colour", "0"));
  EXPECT_THAT(far, Not(HasSubstr("did you mean")));
  EXPECT_THAT(far, HasSubstr("preset muon has lr, weight_decay, momentum"));
  EXPECT_THAT(Error(PresetRule("quasi_newton").status()), Not(HasSubstr("did you mean")));
}

TEST(Options, KeysThatThePresetCannotUseAreRefusedWithTheReason) {
  Rule adamw = Preset("adamw");
  EXPECT_THAT(Error(SetOption(adamw, "steps", "5")), HasSubstr("orthogonalises nothing"));
  EXPECT_THAT(Error(SetOption(adamw, "splits", "5")), HasSubstr("orthogonalises nothing"));
  EXPECT_THAT(Error(SetOption(adamw, "period", "3")), HasSubstr("alike in every step"));
  EXPECT_THAT(Error(SetOption(adamw, "beta", "0.9")), HasSubstr("beta1 and beta2"));
  Rule lion = Preset("lion");
  EXPECT_THAT(Error(SetOption(lion, "eps", "1e-8")), HasSubstr("divides by nothing"));
  Rule muon = Preset("muon");
  EXPECT_THAT(Error(SetOption(muon, "beta1", "0.9")), HasSubstr("its coefficient is beta"));
  EXPECT_THAT(Error(SetOption(muon, "pair", "b")), HasSubstr("polora a pair"));
  Rule polora = Preset("polora");
  EXPECT_THAT(Error(SetOption(polora, "period", "3")), HasSubstr("coefficients, steps, safety"));
}

TEST(Options, BadValuesAreRefusedAndChangeNothing) {
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
                                                                {"off_refresh", "none"},
                                                                {"steps", "0"},
                                                                {"steps", "65"},
                                                                {"safety", "0.9"},
                                                                {"normalise", "spectral"},
                                                                {"eps", "-1e-8"},
                                                                {"restarts", "0"},
                                                                {"restarts", "2,2"},
                                                                {"scale", "0"},
                                                                {"scale", "big"},
                                                                {"nesterov", "yes"},
                                                                {"momentum", "adam"},
                                                                {"compute", "fp8"},
                                                                {"coefficients", "1,2"},
                                                                {"coefficients", "1,2,nan"},
                                                                {"weight_decay", "1e400"},
                                                                {"splits", ""},
                                                                {"splits", "0,5"},
                                                                {"splits", "5,-5"},
                                                                {"splits", "5,"},
                                                                {"num_heads", "0"},
                                                                {"num_heads", "65537"},
                                                                {"tile", "0"},
                                                                {"tile", "-4"},
                                                                {"tile", "1048577"},
                                                                {"tile", "5:"},
                                                                {"tile", "0:5"},
                                                                {"tile", "5,5"},
                                                                {"tile", "9:5,3:6"},
                                                                {"select_fraction", "0"},
                                                                {"select_fraction", "1.01"},
                                                                {"damping", "0"},
                                                                {"select_axis", "cols"},
                                                                {"gain", "0"},
                                                                {"gain", "-1"},
                                                                {"shaped_directions", "0"},
                                                                {"warmup", "-1"},
                                                                {"deflation", "exact"},
                                                                {"row_variance_beta2", "1"},
                                                                {"row_variance_eps", "0"},
                                                                {"scale_of", "half"}};
  Rule rule = Preset("muon");
  const auto before = Options(rule);
  for (const auto& [key, value] : bad) {
    EXPECT_THAT(Error(SetOption(rule, key, value)), HasSubstr("\"" + value + "\"")) << key;
  }
  EXPECT_EQ(Options(rule), before);
  Rule polora = Preset("polora");
  for (const auto& [key, value] :
       std::vector<std::pair<std::string, std::string>>{{"pair", "a\nb"},
                                                        {"product_scale", "0"},
                                                        {"delta", "0"},
                                                        {"delta", "2"},
                                                        {"factor", "c"}}) {
    Error(SetOption(polora, key, value));
  }
  EXPECT_EQ(Options(polora), Options(Preset("polora")));
}

}  // namespace
}  // namespace stiefel
