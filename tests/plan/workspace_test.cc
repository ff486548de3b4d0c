// The planner states how much workspace a matrix needs without knowing the kernels; this holds it
// to what they take.
#include <gtest/gtest.h>

#include "kernels/cpu/cpu_backend.h"
#include "kernels/rules/matrix_rule.h"
#include "kernels/rules/sharded_rule.h"
#include "plan/memory.h"
#include "plan/option_samples.h"
#include "plan/rule.h"
#include "plan/shards.h"

namespace stiefel {
namespace {

using Shape = std::pair<int64_t, int64_t>;

// The other factor, with a long side of its own.
std::optional<Shape> PartnerOf(const Rule& rule, int64_t rows, int64_t cols) {
  if (rule.family != RuleFamily::kPolora) return std::nullopt;
  if (*FactorOf(rule, rows, cols) == PoloraFactor::kA) return Shape{777, rows};
  return Shape{cols, 777};
}

// What the kernels take, or -1 where the device cannot do the rule.
int64_t Taken(Backend* backend, const Rule& rule, int64_t rows, int64_t cols) {
  const auto kernel = MatrixRule::Create(rule, rows, cols, backend, PartnerOf(rule, rows, cols));
  const bool device_cannot = rule.compute == ComputeType::kFp16 ||
                             rule.compute == ComputeType::kTf32 ||
                             (rule.compute == ComputeType::kBf16 && !backend->Info().has_bf16);
  EXPECT_EQ(kernel.ok(), !device_cannot) << DescribeRule(rule) << ": " << kernel.status();
  return kernel.ok() ? (*kernel)->WorkspaceBytes() : -1;
}

int64_t Stated(const Rule& rule, int64_t rows, int64_t cols) {
  const std::optional<Shape> partner = PartnerOf(rule, rows, cols);
  return WorkspaceBytes(rule, rows, cols, partner ? partner->first * partner->second : 0);
}

TEST(WorkspaceBytes, CoverWhatTheKernelsTake) {
  const Shape shapes[] = {{24, 1},    {24, 1000}, {24, 13},   {24, 24},  {240, 24},
                          {48, 1024}, {2400, 40}, {312, 200}, {120, 120}};
  int rules = 0;
  for (const int threads : {1, 6}) {
    const std::unique_ptr<Backend> backend = *CreateCpuBackend(threads);
    for (const SampledRule& sampled : RulesWithOneOptionChanged()) {
      for (auto [rows, cols] : shapes) {
        if (!ValidateRule(sampled.rule, rows, cols).ok()) continue;
        ++rules;
        EXPECT_GE(Stated(sampled.rule, rows, cols), Taken(backend.get(), sampled.rule, rows, cols))
            << DescribeRule(sampled.rule) << " " << rows << " x " << cols << ", " << threads
            << " threads";
      }
    }
  }
  printf("%d rules and shapes\n", rules);
  EXPECT_GT(rules, 1000);
}

// One m x m matrix of what is stated is for what arrives from other servers.
TEST(ShardWorkspaceBytes, CoverWhatTheKernelsTake) {
  const std::unique_ptr<Backend> backend = *CreateCpuBackend(/*threads=*/2);
  const Shape shapes[] = {{24, 13}, {24, 1000}, {2400, 40}, {320, 200}, {120, 120}, {7, 9}};
  int shards_seen = 0;
  for (const SampledRule& sampled : RulesWithOneOptionChanged()) {
    for (auto [rows, cols] : shapes) {
      const Rule& rule = sampled.rule;
      if (rule.family != RuleFamily::kSpectral || !ValidateRule(rule, rows, cols).ok() ||
          !ValidateSharding(rule, rows, cols).ok()) {
        continue;
      }
      for (const int64_t shards : {2, 5}) {
        const std::vector<int64_t> cuts = EvenCuts(rows, cols, shards);
        const std::vector<Rect> rects = ShardRects(rows, cols, cuts);
        for (int32_t i = 0; i < shards; ++i) {
          const auto kernel = ShardedRule::Create(rule, {rows, cols, i, cuts}, backend.get());
          if (!kernel.ok()) continue;  // the device cannot do the precision
          ++shards_seen;
          const int64_t m = std::min(rows, cols);
          EXPECT_GE(ShardWorkspaceBytes(rects[i].rows(), rects[i].cols(), rows, cols, shards),
                    (*kernel)->WorkspaceBytes() + 4 * m * m)
              << DescribeRule(rule) << " " << rows << " x " << cols << " shard " << i;
        }
      }
    }
  }
  printf("%d shards\n", shards_seen);
  EXPECT_GT(shards_seen, 500);
}

TEST(WorkspaceBytes, CoverSmallTilesAndManySplits) {
  const std::unique_ptr<Backend> backend = *CreateCpuBackend(/*threads=*/16);
  const std::vector<std::pair<const char*, const char*>> settings = {
      {"tile", "1"},        {"tile", "2"},         {"tile", "31"},         {"tile", "63"},
      {"tile", "17,9:255"}, {"tile", "254"},       {"num_heads", "255"},   {"num_heads", "5"},
      {"splits", "1,254"},  {"splits", "100,155"}, {"splits", "1,1,1,252"}};
  for (const char* preset : {"muon", "himuon", "normuon", "turbo_muon"}) {
    for (const auto& [key, value] : settings) {
      Rule rule = *PresetRule(preset);
      ASSERT_TRUE(SetOption(rule, key, value).ok());
      for (const int64_t cols : {1, 64, 255, 3000}) {
        if (!ValidateRule(rule, 255, cols).ok()) continue;
        EXPECT_GE(Stated(rule, 255, cols), Taken(backend.get(), rule, 255, cols))
            << DescribeRule(rule) << " 255 x " << cols;
      }
    }
  }
}

TEST(WorkspaceBytes, ARefreshTakesAFewMatrices) {
  const std::unique_ptr<Backend> backend = *CreateCpuBackend(/*threads=*/2);
  for (auto [rows, cols] : {Shape{512, 512}, {513, 545}, {4096, 1024}, {768, 3072}}) {
    for (const PresetInfo& preset : Presets()) {
      for (const PolarForm form : {PolarForm::kAuto, PolarForm::kStandard, PolarForm::kGram}) {
        Rule rule = *PresetRule(preset.name);
        if (rule.family != RuleFamily::kSpectral || rule.gain != 1) continue;
        rule.form = form;
        EXPECT_LE(Taken(backend.get(), rule, rows, cols), kMaxRefreshMatrices * 4 * rows * cols)
            << preset.name << " " << rows << " x " << cols;
      }
    }
  }
}

}  // namespace
}  // namespace stiefel
