#include "tests/faults/scripted_model.h"

#include <cstdio>
#include <cstdlib>
#include <string>

#include "gtest/gtest.h"

namespace stiefel {
namespace {

std::vector<ParameterSpec> Specs() { return ParseShapes("4x6*2,5", "muon", DType::kBf16).value(); }

TEST(ScriptedModelTest, ShapesBecomeParameters) {
  const std::vector<ParameterSpec> specs = Specs();
  ASSERT_EQ(specs.size(), 3u);
  EXPECT_EQ(specs[1].name, "p1");
  EXPECT_EQ(specs[1].shape, (std::vector<int64_t>{4, 6}));
  EXPECT_EQ(specs[1].rule.preset, "muon");
  EXPECT_EQ(specs[2].shape, (std::vector<int64_t>{5}));
  EXPECT_EQ(specs[2].rule.preset, "adamw");
  EXPECT_FALSE(ParseShapes("4xx", "muon", DType::kFp32).ok());
}

TEST(ScriptedModelTest, GradientsDependOnEverythingNamedAndOnNothingElse) {
  const ParameterSpec spec = Specs()[0];
  const Tensor gradient = MakeGradient(spec, 1, 2, 3, 4);
  EXPECT_EQ(gradient.words.size(), 24u);
  EXPECT_EQ(gradient.words, MakeGradient(spec, 1, 2, 3, 4).words);
  EXPECT_NE(gradient.words, MakeGradient(spec, 2, 2, 3, 4).words);
  EXPECT_NE(gradient.words, MakeGradient(spec, 1, 3, 3, 4).words);
  EXPECT_NE(gradient.words, MakeGradient(spec, 1, 2, 4, 4).words);
  EXPECT_NE(gradient.words, MakeGradient(spec, 1, 2, 3, 5).words);
}

TEST(ScriptedModelTest, ViewStartsAtTheBlock) {
  const Tensor gradient = MakeGradient(Specs()[0], 1, 1, 0, 0);
  const TensorView view = gradient.View(Rect{1, 3, 0, 6});
  EXPECT_EQ(view.data, gradient.words.data() + 6);
  EXPECT_EQ(view.shape, (std::vector<int64_t>{2, 6}));
}

TEST(ScriptedModelTest, SnapshotHoldsStepAndWeights) {
  const std::string path = std::string(std::getenv("TEST_TMPDIR")) + "/snapshot";
  const Weights saved(Specs(), 7);
  ASSERT_TRUE(saved.Save(path, 12).ok());
  Weights loaded(Specs(), 8);
  EXPECT_NE(loaded.Hash(), saved.Hash());
  EXPECT_EQ(loaded.Load(path).value(), 12);
  EXPECT_EQ(loaded.Hash(), saved.Hash());

  Weights other(ParseShapes("4x6", "muon", DType::kFp32).value(), 1);
  EXPECT_EQ(other.Load(path).status().code(), absl::StatusCode::kDataLoss);
  EXPECT_EQ(other.Load(path + ".none").status().code(), absl::StatusCode::kNotFound);
  std::remove(path.c_str());
}

}  // namespace
}  // namespace stiefel
