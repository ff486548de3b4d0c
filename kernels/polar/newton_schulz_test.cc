#include "kernels/polar/newton_schulz.h"

#include "gtest/gtest.h"

namespace stiefel {
namespace {

Rule Muon(const std::vector<std::pair<std::string, std::string>>& options = {}) {
  Rule rule = *PresetRule("muon");
  for (const auto& [key, value] : options) EXPECT_TRUE(SetOption(rule, key, value).ok());
  return rule;
}

std::string Method(const Rule& rule, int64_t rows, int64_t cols, bool has_bf16, bool fast_bf16) {
  DeviceInfo device;
  device.has_bf16 = has_bf16;
  device.fast_bf16 = fast_bf16;
  const absl::StatusOr<PolarPlan> plan = MakePolarPlan(rule, rows, cols, device);
  return plan.ok() ? DescribePolar(*plan) : std::string(plan.status().message());
}

TEST(PolarPlanTest, AutoChoosesTheCheaperFormAndTheFasterPrecision) {
  EXPECT_EQ(Method(Muon(), 768, 768, true, false), "newton-schulz standard fp32");
  EXPECT_EQ(Method(Muon(), 768, 3072, true, false), "newton-schulz gram fp32");
  EXPECT_EQ(Method(Muon(), 3072, 768, true, false), "newton-schulz gram fp32");
  EXPECT_EQ(Method(Muon(), 3072, 768, true, true), "newton-schulz gram bf16");
  // Small matrices gain nothing, and their accuracy in bf16 has no bound.
  EXPECT_EQ(Method(Muon(), 63, 3072, true, true), "newton-schulz standard fp32");
  EXPECT_EQ(Method(Muon({{"coefficients", "convergent"}}), 768, 3072, true, false),
            "newton-schulz standard fp32");
}

TEST(PolarPlanTest, OptionsDecideOverAuto) {
  EXPECT_EQ(Method(Muon({{"form", "gram"}}), 5, 5, true, false), "newton-schulz gram fp32");
  EXPECT_EQ(Method(Muon({{"form", "standard"}}), 64, 640, true, false),
            "newton-schulz standard fp32");
  EXPECT_EQ(Method(Muon({{"compute", "fp32"}}), 768, 768, true, true),
            "newton-schulz standard fp32");
  EXPECT_EQ(Method(Muon({{"compute", "bf16"}}), 768, 768, true, false),
            "newton-schulz standard bf16");
  EXPECT_NE(Method(Muon({{"compute", "bf16"}}), 768, 768, false, false).find("no bf16"),
            std::string::npos);
}

TEST(PolarPlanTest, WorkspaceHoldsTheSquares) {
  const absl::StatusOr<PolarPlan> standard =
      MakePolarPlan(Muon({{"form", "standard"}}), 100, 300, DeviceInfo());
  const absl::StatusOr<PolarPlan> gram =
      MakePolarPlan(Muon({{"form", "gram"}}), 300, 100, DeviceInfo());
  EXPECT_EQ(PolarWorkspaceBytes(*standard), 2 * 40000);
  EXPECT_EQ(PolarWorkspaceBytes(*gram), 5 * 40000);
}

}  // namespace
}  // namespace stiefel
