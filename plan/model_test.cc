#include "plan/model.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <numeric>

namespace stiefel {
namespace {

using ::testing::HasSubstr;

TEST(ReadModel, RealModelsHaveTheirPublishedSizes) {
  const struct {
    const char* name;
    int64_t elements;
  } models[] = {{"gpt2_124m", 124439808}, {"llama3_8b", 8030261248}, {"mixtral_like", 46702792704}};
  for (const auto& expected : models) {
    const auto model = ReadModel(std::string("plan/models/") + expected.name + ".json");
    ASSERT_TRUE(model.ok()) << model.status();
    EXPECT_EQ(model->name, expected.name);
    int64_t elements = 0;
    for (const PlanMatrix& matrix : Matrices(*model)) elements += matrix.rows * matrix.cols;
    EXPECT_EQ(elements, expected.elements);
  }
}

TEST(ParseModel, DefaultsAndOwnSettings) {
  const auto model = ParseModel(R"({
    "default": {"preset": "muon", "set": {"lr": 0.5}, "push_dtype": "bf16", "group": 3},
    "parameters": [
      {"name": "a", "shape": [4, 6]},
      {"name": "b", "shape": [6], "preset": "adamw", "set": {"beta1": "0.8"}, "group": 1},
      {"name": "c", "shape": [4, 6], "set": {"nesterov": false}, "pull_dtype": "fp32"}]})");
  ASSERT_TRUE(model.ok()) << model.status();
  const auto& p = model->parameters;
  EXPECT_EQ(p[0].matrix.rule.lr, 0.5);
  EXPECT_EQ(p[0].matrix.push_dtype, DType::kBf16);
  EXPECT_EQ(p[0].matrix.pull_dtype, DType::kBf16);
  EXPECT_EQ(p[0].group, 3);
  EXPECT_EQ(p[1].matrix.rule.preset, "adamw");
  EXPECT_EQ(p[1].matrix.rule.lr, PresetRule("adamw")->lr);  // Not the default's option.
  EXPECT_EQ(p[1].matrix.rule.beta1, 0.8);
  EXPECT_EQ(p[1].matrix.rows, 1);
  EXPECT_EQ(p[1].matrix.cols, 6);
  EXPECT_EQ(p[1].dimensions, 1);
  EXPECT_EQ(p[1].group, 1);
  EXPECT_FALSE(p[2].matrix.rule.nesterov);
  EXPECT_EQ(p[2].matrix.rule.lr, 0.5);
  EXPECT_EQ(p[2].matrix.pull_dtype, DType::kFp32);
}

TEST(ParseModel, OverridesChangeTheDefaultAlone) {
  ModelOverrides overrides;
  overrides.preset = "periodic_rowwise_muon";
  overrides.options = {{"period", "5"}};
  const auto model = ParseModel(R"({"default": {"set": {"lr": 9}}, "parameters": [
      {"name": "a", "shape": [4, 6]}, {"name": "b", "shape": [6], "preset": "adamw"}]})",
                                overrides);
  ASSERT_TRUE(model.ok()) << model.status();
  EXPECT_EQ(model->parameters[0].matrix.rule.period, 5);
  EXPECT_EQ(model->parameters[0].matrix.rule.lr, PresetRule("muon")->lr);
  EXPECT_EQ(model->parameters[1].matrix.rule.preset, "adamw");
}

TEST(ParseModel, OverridesThatNoParameterTakesAreRefused) {
  const char* text = R"({"parameters": [{"name": "a", "shape": [4, 6], "preset": "lion"},
      {"repeat": 2, "parameters": [{"name": "b.{}", "shape": [6], "preset": "adamw"}]}]})";
  ASSERT_TRUE(ParseModel(text).ok());
  ModelOverrides overrides;
  overrides.preset = "adamw";
  EXPECT_THAT(std::string(ParseModel(text, overrides).status().message()),
              HasSubstr("preset adamw: it is for parameters that name no preset"));
  overrides.options = {{"perod", "3"}};
  EXPECT_THAT(std::string(ParseModel(text, overrides).status().message()),
              HasSubstr("option perod=3"));
  const char* repeated = R"({"parameters": [{"name": "a", "shape": [4, 6], "preset": "lion"},
      {"repeat": 2, "parameters": [{"name": "b.{}", "shape": [6]}]}]})";
  overrides.options.clear();
  EXPECT_TRUE(ParseModel(repeated, overrides).ok());
}

TEST(ParseModel, StacksAreExpanded) {
  const auto model = ParseModel(R"({"default": {"set": {"splits": "2,2"}}, "parameters": [
      {"name": "w1", "shape": [2, 4, 6], "stack_dims": 1, "group": 2, "push_dtype": "bf16"},
      {"name": "conv", "shape": [4, 3, 5, 5], "stack_dims": 0},
      {"name": "norm", "shape": [3, 7, 2], "preset": "adamw"}]})");
  ASSERT_TRUE(model.ok()) << model.status();
  std::vector<std::string> shapes;
  for (const PlanMatrix& matrix : Matrices(*model)) {
    shapes.push_back(matrix.name + " " + std::to_string(matrix.rows) + "x" +
                     std::to_string(matrix.cols));
  }
  EXPECT_THAT(shapes, ::testing::ElementsAre("w1[0] 4x6", "w1[1] 4x6", "conv 4x75", "norm 3x14"));
  EXPECT_EQ(model->parameters[1].group, 2);
  EXPECT_EQ(model->parameters[1].matrix.push_dtype, DType::kBf16);
  EXPECT_EQ(model->parameters[1].matrix.rule.splits, (std::vector<int64_t>{2, 2}));
  EXPECT_EQ(model->parameters[1].dimensions, 2);
}

TEST(ParseModel, PairsMeet) {
  const auto model = ParseModel(R"({"default": {"preset": "polora"}, "parameters": [
      {"name": "a", "shape": [3, 2, 8], "stack_dims": 1, "set": {"pair": "b"}},
      {"name": "b", "shape": [3, 5, 2], "stack_dims": 1, "set": {"pair": "a"}}]})");
  ASSERT_TRUE(model.ok()) << model.status();
  EXPECT_EQ(model->parameters[1].matrix.rule.pair, "b[1]");
  EXPECT_EQ(model->parameters[1].matrix.partner_elements, 10);
  EXPECT_EQ(model->parameters[5].matrix.partner_elements, 16);
}

struct BadModel {
  const char* text;
  const char* part;  // Of the message.
};

TEST(ParseModel, RefusesWithWhereAndWhat) {
  const BadModel models[] = {
      {"", "not JSON"},
      {"{\"parameters\": [", "not JSON"},
      {"\xff\xfe\x00", "not JSON"},
      {"[]", "expected an object"},
      {"{}", "'parameters' must be a list"},
      {R"({"parameters": []})", "'parameters' is empty"},
      {R"({"parameters": {}})", "'parameters' must be a list"},
      {R"({"parameters": [], "layers": 3})", "\"layers\""},
      {R"({"parameters": [], "parameters": []})", "'parameters' is given twice"},
      {R"({"name": "", "parameters": []})", "name"},
      {R"({"parameters": [3]})", "parameters[0]"},
      {R"({"parameters": [{"shape": [2, 2]}]})", "'name' is missing"},
      {R"({"parameters": [{"name": "a"}]})", "'shape' is missing"},
      {R"({"parameters": [{"name": "a", "shape": 5}]})", "a list of sizes, got 5"},
      {R"({"parameters": [{"name": "a", "shape": []}]})", "0 dimension"},
      {R"({"parameters": [{"name": "a", "shape": [2, 2, 2]}]})", "stack_dims=1 for a stack of 2"},
      {R"({"parameters": [{"name": "a", "shape": [2, 2, 2], "stack_dims": 3}]})", "from 0 to 2"},
      {R"({"parameters": [{"name": "a", "shape": [2, 2], "stack_dims": -1}]})", ".stack_dims"},
      {R"({"parameters": [{"name": "a", "shape": [9, 1, 3, 3], "stack_dims": 0}]})", "depthwise"},
      {R"({"parameters": [{"name": "a", "shape": [65537, 2, 2], "stack_dims": 1}]})",
       "65537 matrices"},
      {R"({"parameters": [{"name": "a", "shape": [2, 2, 2], "stack_dims": 1},
                          {"name": "a[1]", "shape": [2, 2]}]})",
       "'a[1]'"},
      {R"({"parameters": [{"name": "a", "shape": [2, 6], "preset": "polora"}]})",
       "is not among the parameters"},
      {R"({"parameters": [
        {"name": "a", "shape": [2, 6], "preset": "polora", "set": {"pair": "b"}},
        {"name": "b", "shape": [6, 3], "preset": "polora", "set": {"pair": "a"}}]})",
       "factor b has 3 columns"},
      {R"({"parameters": [{"name": "a", "shape": [0, 2]}]})", "got 0"},
      {R"({"parameters": [{"name": "a", "shape": [2, -2]}]})", "got -2"},
      {R"({"parameters": [{"name": "a", "shape": [2.5, 2]}]})", "got 2.5"},
      {R"({"parameters": [{"name": "a", "shape": ["2", 2]}]})", "got \"2\""},
      {R"({"parameters": [{"name": "a", "shape": [9223372036854775808, 2]}]})",
       "9223372036854775808"},
      {R"({"parameters": [{"name": "a", "shape": [1e30, 2]}]})", "got 1e+30"},
      {R"({"parameters": [{"name": "a", "shape": [4294967296, 4294967296]}]})", "4294967296"},
      {R"({"parameters": [{"name": "a", "shape": [2, 2]}, {"name": "a", "shape": [2, 2]}]})",
       "'a'"},
      {R"({"parameters": [{"name": "a", "shape": [2, 2], "preset": "moun"}]})", "muon"},
      {R"({"parameters": [{"name": "a", "shape": [2, 2], "set": {"period": 0}}]})",
       "parameter \"a\""},
      {R"({"parameters": [{"name": "a", "shape": [2, 2], "set": {"lr": [1]}}]})", "[1]"},
      {R"({"parameters": [{"name": "a", "shape": [2, 2], "set": 3}]})", ".set"},
      {R"({"parameters": [{"name": "a", "shape": [2, 2], "push_dtype": "int8"}]})", "int8"},
      {R"({"parameters": [{"name": "a", "shape": [2, 2], "group": -1}]})", ".group"},
      {R"({"parameters": [{"name": "a", "shape": [4]}]})", "parameter \"a\""},  // CASES A28
  };
  for (const BadModel& bad : models) {
    const absl::Status status = ParseModel(bad.text).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << bad.text;
    EXPECT_THAT(std::string(status.message()), HasSubstr(bad.part)) << bad.text;
  }
}

TEST(ParseModel, DeepNestingIsRefusedNotFollowed) {
  std::string deep = "{\"parameters\": ";
  for (int i = 0; i < 200000; ++i) deep += "[";
  for (int i = 0; i < 200000; ++i) deep += "]";
  EXPECT_EQ(ParseModel(deep + "}").status().code(), absl::StatusCode::kInvalidArgument);
}

TEST(ReadModel, NamesTheFile) {
  const absl::Status status = ReadModel("plan/models/none.json").status();
  EXPECT_EQ(status.code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(std::string(status.message()), HasSubstr("plan/models/none.json"));
}

TEST(ParseModel, RepeatsLayers) {
  const auto model = ParseModel(R"({"parameters": [
      {"name": "wte", "shape": [10, 4]},
      {"repeat": 2, "first": 3, "parameters": [
          {"name": "h.{}.a", "shape": [2, 8], "preset": "polora", "set": {"pair": "h.{}.b"}},
          {"name": "h.{}.b", "shape": [8, 2], "preset": "polora", "set": {"pair": "h.{}.a"}}]}
  ]})");
  ASSERT_TRUE(model.ok()) << model.status();
  std::vector<std::string> names;
  for (const ModelParameter& parameter : model->parameters) names.push_back(parameter.matrix.name);
  EXPECT_EQ(names, (std::vector<std::string>{"wte", "h.3.a", "h.3.b", "h.4.a", "h.4.b"}));
  EXPECT_EQ(model->parameters[3].matrix.rule.pair, "h.4.b");
  const struct {
    const char* json;
    const char* part;
  } cases[] = {
      {R"({"parameters": [{"repeat": 0, "parameters": []}]})", "from 1 to 1000000, got 0"},
      {R"({"parameters": [{"repeat": 2}]})", "'parameters' must be a list"},
      {R"({"parameters": [{"repeat": 2, "parameters": [{"name": "w", "shape": [2, 2]}]}]})", "w"},
      {R"({"parameters": [{"repeat": 1, "parameters": [{"repeat": 1, "parameters": []}]}]})",
       "unknown key"},
      {R"({"parameters": [{"repeat": 1, "names": [], "parameters": []}]})", "unknown key"},
      {R"({"parameters": [{"repeat": 1000000, "parameters": [
          {"name": "e{}", "shape": [2, 2, 2], "stack_dims": 1}]}]})",
       "more than the 1000000"},
  };
  for (const auto& bad : cases) {
    const absl::Status status = ParseModel(bad.json).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << bad.json;
    EXPECT_THAT(std::string(status.message()), HasSubstr(bad.part));
  }
}

}  // namespace
}  // namespace stiefel
