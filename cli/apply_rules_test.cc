#include "cli/apply_rules.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace stiefel {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

GradientSeries Series(const std::string& name, const std::vector<int64_t>& shape) {
  GradientSeries series;
  series.name = name;
  series.shape = shape;
  return series;
}

TEST(AssignRules, EachParameterHasItsOwn) {
  RuleArguments arguments;
  arguments.preset = "muon";
  arguments.set = {"lr=0.5", "*.bias:lr=0.25", "h.qkv:nesterov=false"};
  arguments.rules = {"*.bias:adamw,beta1=0.8", "h.qkv:cmuon,splits=2,2,2,lr=3", "nobody?:sgd",
                     "nobody*:lion"};
  const auto parameters = AssignRules({Series("h.bias", {8}), Series("h.qkv", {6, 4}),
                                       Series("h.w", {3, 4}), Series("nobody1", {2, 2})},
                                      arguments);
  ASSERT_TRUE(parameters.ok()) << parameters.status();
  const auto& p = *parameters;
  EXPECT_EQ(p[0].rule.preset, "adamw");
  EXPECT_EQ(p[0].rule.beta1, 0.8);
  EXPECT_EQ(p[0].rule.lr, 0.25);
  EXPECT_EQ(p[0].rows, 1);
  EXPECT_EQ(p[0].cols, 8);
  EXPECT_EQ(p[1].rule.preset, "cmuon");
  EXPECT_THAT(p[1].rule.splits, ElementsAre(2, 2, 2));
  EXPECT_EQ(p[1].rule.lr, 3);
  EXPECT_FALSE(p[1].rule.nesterov);
  EXPECT_EQ(p[2].rule.lr, 0.5);
  EXPECT_TRUE(p[2].rule.nesterov);
  EXPECT_EQ(p[3].rule.preset, "lion");
}

TEST(AssignRules, ValuesMayHoldColonsAndCommas) {
  RuleArguments arguments;
  arguments.preset = "himuon";
  arguments.set = {"tile=64,100:128", "b:tile=32,50:64"};
  arguments.rules = {"c:himuon,tile=256,1000:512,lr=2"};
  const auto parameters =
      AssignRules({Series("a", {6, 4}), Series("b", {6, 4}), Series("c", {6, 4})}, arguments);
  ASSERT_TRUE(parameters.ok()) << parameters.status();
  const int64_t steps[] = {100, 50, 1000}, tiles[] = {128, 64, 512};
  for (int i = 0; i < 3; ++i) {
    const Rule& rule = (*parameters)[i].rule;
    ASSERT_EQ(rule.tiles.size(), 2u);
    EXPECT_EQ(rule.tiles[1].step, steps[i]);
    EXPECT_EQ(rule.tiles[1].tile, tiles[i]);
  }
  EXPECT_EQ((*parameters)[2].rule.lr, 2);
}

TEST(AssignRules, ShapesBecomeMatricesByStatedAxes) {
  RuleArguments arguments;
  arguments.preset = "muon";
  arguments.stack_dims = {"0", "experts:1", "deep:2"};
  const auto parameters = AssignRules({Series("conv", {6, 4, 3, 3}), Series("deep", {2, 3, 5, 7}),
                                       Series("experts", {4, 6, 5}), Series("w", {6, 5})},
                                      arguments);
  ASSERT_TRUE(parameters.ok()) << parameters.status();
  const int64_t expected[][3] = {{1, 6, 36}, {6, 5, 7}, {4, 6, 5}, {1, 6, 5}};
  for (int i = 0; i < 4; ++i) {
    EXPECT_EQ((*parameters)[i].matrices, expected[i][0]);
    EXPECT_EQ((*parameters)[i].rows, expected[i][1]);
    EXPECT_EQ((*parameters)[i].cols, expected[i][2]);
  }
}

TEST(AssignRules, PhaseIsZeroUnlessSet) {
  RuleArguments arguments;
  arguments.preset = "periodic_rowwise_muon";
  arguments.set = {"b:phase=2"};
  const auto parameters = AssignRules({Series("a", {3, 4}), Series("b", {3, 4})}, arguments);
  ASSERT_TRUE(parameters.ok()) << parameters.status();
  EXPECT_EQ((*parameters)[0].phase, 0);
  EXPECT_EQ((*parameters)[1].phase, 2);
}

TEST(AssignRules, PairsFindEachOther) {
  RuleArguments arguments;
  arguments.preset = "polora";
  arguments.set = {"q.A:pair=q.B", "q.B:pair=q.A"};
  const auto parameters = AssignRules({Series("q.A", {2, 8}), Series("q.B", {6, 2})}, arguments);
  ASSERT_TRUE(parameters.ok()) << parameters.status();
  EXPECT_EQ((*parameters)[0].partner, 1);
  EXPECT_EQ((*parameters)[1].partner, 0);
}

TEST(AssignRules, RefusesWithTheReason) {
  const std::vector<GradientSeries> one = {Series("h.w", {6, 4})};
  const struct {
    RuleArguments arguments;
    std::vector<GradientSeries> series;
    const char* part;
  } cases[] = {
      {{"moun", {}, {}, {}}, one, "muon"},
      {{"", {}, {}, {}}, one, "h.w has no rule"},
      {{"", {"h.x:muon"}, {}, {}}, one, "--rule: no parameter is called h.x; the nearest is h.w"},
      {{"", {"h.w:moun"}, {}, {}}, one, "--rule h.w:moun"},
      {{"", {"muon"}, {}, {}}, one, "PATTERN:preset"},
      {{"", {"h.w:muon,lr"}, {}, {}}, one, "not of the form key=value"},
      {{"", {"h.w:muon,lrr=1"}, {}, {}}, one, "lr"},
      {{"muon", {}, {"lr"}, {}}, one, "--set lr: \"lr\" is not of the form key=value"},
      {{"muon", {}, {"learning_rate=1"}, {}}, one, "h.w: --set learning_rate=1"},
      {{"muon", {}, {"x*:lr=1"}, {}}, one, "--set: no parameter is called x*"},
      {{"muon", {"*:adamw"}, {"perod=4"}, {}}, one, "--set perod=4 is for the parameters that"},
      {{"", {"*:adamw"}, {"lr=0.5"}, {}}, one, "--set 'PATTERN:lr=0.5'"},
      {{"muon", {}, {}, {"1"}}, one, "--stack-dims 1 is for parameters of 3 and more dimensions"},
      {{"muon", {}, {"stack_dims=1"}, {}}, one, "--stack-dims"},
      {{"adamw", {}, {"period=3"}, {}}, one, "period"},
      {{"muon", {}, {}, {"one"}}, one, "--stack-dims one"},
      {{"muon", {}, {}, {"-1"}}, one, "--stack-dims -1"},
      {{"muon", {}, {}, {"h.w:2"}}, one, "stack_dims=2 is not from 0 to 1"},
      {{"muon", {}, {}, {}}, {Series("c", {6, 4, 3, 3})}, "(stiefelctl apply: --stack-dims)"},
      {{"muon", {}, {}, {}}, {Series("b", {6})}, "b of shape [6]"},
      {{"muon", {}, {}, {}}, {Series("z", {0, 6})}, "z of shape [0, 6]"},
      {{"cmuon", {}, {"splits=2,3"}, {}}, one, "add up to 5"},
      {{"polora", {}, {"pair=h.v"}, {}}, one, "pair=\"h.v\", is not among the gradients"},
  };
  for (const auto& c : cases) {
    const auto parameters = AssignRules(c.series, c.arguments);
    EXPECT_EQ(parameters.status().code(), absl::StatusCode::kInvalidArgument) << c.part;
    EXPECT_THAT(std::string(parameters.status().message()), HasSubstr(c.part));
  }
}

}  // namespace
}  // namespace stiefel
