// Every rule through running servers: the golden sequences, matrices that must equal each other bit
// for bit, pairs. Also run under ThreadSanitizer.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <limits>

#include "kernels/reference/reference_rule.h"
#include "tests/inmemory/cluster.h"
#include "tests/vectors/golden.h"

namespace stiefel::testing {
namespace {

using ::testing::HasSubstr;
using Values = std::vector<float>;

ServerOptions StagedServer(Staging staging) {
  ServerOptions options = SmallServer();
  options.staging = staging;
  return options;
}

ParameterSpec WithRule(const std::string& name, std::vector<int64_t> shape, const Rule& rule,
                       std::optional<int> stack_dims = std::nullopt) {
  ParameterSpec parameter;
  parameter.name = name;
  parameter.shape = std::move(shape);
  parameter.rule = rule;
  parameter.stack_dims = stack_dims;
  return parameter;
}

// The presets that orthogonalise a matrix on its own, made small enough that every part of them
// acts on a few dozen rows, and refreshing at the same steps whoever else is in the run.
std::vector<Rule> SpectralRules() {
  std::vector<Rule> rules;
  for (const PresetInfo& info : Presets()) {
    Rule rule = *PresetRule(info.name);
    if (rule.family != RuleFamily::kSpectral) continue;
    if (rule.period > 1) {
      EXPECT_TRUE(SetOption(rule, "phase", "1").ok());
    }
    if (!rule.tiles.empty()) {
      EXPECT_TRUE(SetOption(rule, "tile", "16").ok());
    }
    rules.push_back(std::move(rule));
  }
  return rules;
}

// Deltas by step and parameter of one rank that pushes `gradient(step, parameter)`.
template <typename Gradients>
std::vector<std::vector<Values>> DeltasOf(MemoryCluster& cluster,
                                          const std::vector<ParameterSpec>& parameters,
                                          int64_t steps, Gradients gradient) {
  std::vector<std::vector<Values>> deltas(steps);
  auto trainer = MustConnect(cluster, cluster.Options(0, 1), parameters);
  if (trainer == nullptr) return deltas;
  const auto count = static_cast<int32_t>(parameters.size());
  for (int64_t step = 1; step <= steps; ++step) {
    EXPECT_TRUE(trainer->Begin(step).ok());
    std::vector<Values> gradients;
    for (int32_t p = 0; p < count; ++p) gradients.push_back(gradient(step, p));
    for (int32_t p = 0; p < count; ++p) EXPECT_TRUE(trainer->Push(p, View(gradients[p])).ok());
    EXPECT_TRUE(trainer->EndPush().ok());
    const auto outcome = trainer->Wait();
    EXPECT_TRUE(outcome.ok()) << outcome.status();
    if (!outcome.ok() || outcome->outcome != Outcome::kCommit) {
      ADD_FAILURE() << (outcome.ok() ? outcome->reason : "");
      return deltas;
    }
    for (int32_t p = 0; p < count; ++p) {
      const auto delta = trainer->Delta(p);
      EXPECT_TRUE(delta.ok()) << delta.status();
      const auto* data = static_cast<const float*>(delta->data);
      deltas[step - 1].emplace_back(data, data + gradients[p].size());
    }
    EXPECT_TRUE(trainer->Done().ok());
  }
  EXPECT_TRUE(trainer->Close().ok());
  return deltas;
}

TEST(RulesTest, GoldenSequencesThroughAServer) {
  std::vector<GoldenCase> cases = GoldenCases();
  ASSERT_EQ(cases.size(), 26u);
  std::vector<ParameterSpec> parameters;
  for (GoldenCase& golden : cases) {
    if (golden.rule.period > 1) {
      ASSERT_OK(SetOption(golden.rule, "phase", std::to_string(golden.phase)));
    }
    parameters.push_back(WithRule("case" + std::to_string(parameters.size()),
                                  {golden.rows, golden.cols}, golden.rule));
  }
  for (const Staging staging : {Staging::kDouble, Staging::kLazy}) {
    MemoryCluster cluster(1, StagedServer(staging));
    const auto deltas = DeltasOf(cluster, parameters, 4, [&](int64_t step, int32_t p) {
      const Dense g = GoldenGradient(step - 1, cases[p].rows, cases[p].cols);
      return Values(g.values.begin(), g.values.end());
    });
    double worst = 0;
    for (size_t c = 0; c < cases.size(); ++c) {
      for (int64_t step = 0; step < 4; ++step) {
        const Dense& expected = cases[c].deltas[step];
        double error = 0;
        for (size_t i = 0; i < expected.values.size(); ++i)
          error = std::max(error, std::abs(deltas[step].at(c)[i] - expected.values[i]));
        EXPECT_LE(error, 2e-5 * MaxAbs(expected)) << cases[c].name << " step " << step + 1;
        worst = std::max(worst, error / MaxAbs(expected));
      }
    }
    std::printf("%zu sequences, 4 steps, staging %s: error at most %.2g of the largest delta\n",
                cases.size(), std::string(StagingName(staging)).c_str(), worst);
  }
}

constexpr int64_t kSteps = 5;
constexpr int64_t kCols = 24;

// Rows [begin, end) of a matrix of `total` rows, drawn for this step.
Values RowsOf(int64_t step, int64_t seed, int64_t total, int64_t begin, int64_t end) {
  const Values all = Gradient(total * kCols, step, 0, static_cast<int32_t>(seed));
  return {all.begin() + begin * kCols, all.begin() + end * kCols};
}

// One parameter of several matrices against as many parameters, for every rule: `whole[r]` is cut
// at `cuts` into parts, all as the rule of `parts[r]`.
void ExpectPartsEqualWhole(const std::vector<ParameterSpec>& whole,
                           const std::vector<Rule>& part_rules, const std::vector<int64_t>& cuts) {
  const size_t parts = cuts.size() - 1;
  std::vector<ParameterSpec> separate;
  for (size_t r = 0; r < whole.size(); ++r) {
    for (size_t i = 0; i < parts; ++i) {
      separate.push_back(WithRule(whole[r].name + "." + std::to_string(i),
                                  {cuts[i + 1] - cuts[i], kCols}, part_rules[r]));
    }
  }
  MemoryCluster one(2, StagedServer(Staging::kLazy));
  const auto together = DeltasOf(one, whole, kSteps, [&](int64_t step, int32_t p) {
    return RowsOf(step, p, cuts.back(), 0, cuts.back());
  });
  MemoryCluster other(3, StagedServer(Staging::kDouble));
  const auto apart = DeltasOf(other, separate, kSteps, [&](int64_t step, int32_t p) {
    const size_t i = p % parts;
    return RowsOf(step, p / static_cast<int64_t>(parts), cuts.back(), cuts[i], cuts[i + 1]);
  });
  for (int64_t step = 0; step < kSteps; ++step) {
    for (size_t r = 0; r < whole.size(); ++r) {
      Values joined;
      for (size_t i = 0; i < parts; ++i) {
        const Values& part = apart[step].at(r * parts + i);
        joined.insert(joined.end(), part.begin(), part.end());
      }
      EXPECT_EQ(together[step].at(r), joined)
          << DescribeRule(whole[r].rule) << " step " << step + 1;
    }
  }
}

TEST(RulesTest, FusedSplitsEqualRegisteredMatrices) {
  const std::vector<int64_t> cuts = {0, 40, 52, 64};
  std::vector<ParameterSpec> whole;
  std::vector<Rule> rules;
  for (const Rule& rule : SpectralRules()) {
    Rule fused = rule;
    ASSERT_OK(SetOption(fused, "splits", "40,12,12"));
    if (!ValidateRule(fused, 64, kCols).ok()) continue;  // row selection goes over whole matrices
    whole.push_back(WithRule("qkv" + std::to_string(whole.size()), {64, kCols}, fused));
    rules.push_back(rule);
  }
  EXPECT_GE(whole.size(), 9u);
  ExpectPartsEqualWhole(whole, rules, cuts);
}

TEST(RulesTest, StackedExpertsEqualMatrices) {
  std::vector<ParameterSpec> whole;
  std::vector<Rule> rules = SpectralRules();
  rules.push_back(*PresetRule("adamw"));
  for (const Rule& rule : rules) {
    whole.push_back(WithRule("experts" + std::to_string(whole.size()), {3, 20, kCols}, rule, 1));
  }
  ExpectPartsEqualWhole(whole, rules, {0, 20, 40, 60});
}

TEST(RulesTest, AResultDoesNotDependOnWhoSharesTheServer) {
  std::vector<ParameterSpec> all;
  for (const Rule& rule : SpectralRules()) {
    all.push_back(WithRule("w" + std::to_string(all.size()), {36, kCols}, rule));
  }
  MemoryCluster shared(1);
  const auto together = DeltasOf(
      shared, all, kSteps, [](int64_t step, int32_t p) { return RowsOf(step, p, 36, 0, 36); });
  for (size_t p = 0; p < all.size(); ++p) {
    MemoryCluster own(1, StagedServer(p % 2 == 0 ? Staging::kDouble : Staging::kLazy));
    const auto alone = DeltasOf(own, {all[p]}, kSteps, [p](int64_t step, int32_t) {
      return RowsOf(step, static_cast<int64_t>(p), 36, 0, 36);
    });
    for (int64_t step = 0; step < kSteps; ++step) {
      EXPECT_EQ(alone[step].at(0), together[step].at(p)) << all[p].rule.preset << step;
    }
  }
}

// A stack that two ranks push by rows, cut in the middle of experts; one expert gets no gradient at
// all and stays as it is. Views are of the user's own shapes.
TEST(RulesTest, ExpertsWithoutTokensStayAsTheyAre) {
  MemoryCluster cluster(2);
  std::vector<ParameterSpec> parameters = {Param("experts", {3, 4, 6})};
  parameters[0].stack_dims = 1;
  ASSERT_OK(SetOption(parameters[0].rule, "lr", "0.5"));
  ASSERT_OK(SetOption(parameters[0].rule, "weight_decay", "0.5"));
  const Values gradient = Gradient(72, 1, 0, 0);
  RunRanks(2, [&](int32_t rank) {
    TrainerOptions options = cluster.Options(rank, 2);
    // Rank 0: expert 0 and half of expert 1; rank 1 the rest, expert 2 as a block of its own.
    options.push =
        rank == 0 ? std::vector<PushBlock>{{"experts", {0, 6, 0, 6}}}
                  : std::vector<PushBlock>{{"experts", {6, 8, 0, 6}}, {"experts", {8, 12, 0, 6}}};
    auto trainer = MustConnect(cluster, options, parameters);
    ASSERT_NE(trainer, nullptr);
    ASSERT_OK(trainer->Begin(1));
    const float* data = gradient.data();
    if (rank == 0) {
      ASSERT_OK(trainer->Push(0, {data, ElementType::kFp32, {3, 2, 6}, {}}));
    } else {
      EXPECT_STATUS(trainer->EndPush(), kFailedPrecondition, "\"experts\" [6:8, 0:6]");
      ASSERT_OK(trainer->Push(0, {data + 36, ElementType::kFp32, {2, 6}, {}}));
      ASSERT_OK(trainer->PushAbsent(1));
    }
    ASSERT_OK(trainer->EndPush());
    ASSERT_OK(trainer->WaitParameter("experts").status());
    ASSERT_OK(trainer->Wait().status());
    const auto delta = trainer->Delta("experts");
    ASSERT_TRUE(delta.ok()) << delta.status();
    // Every second element of a tensor whose experts lie in reverse order.
    Values weights(144, 1);
    ASSERT_OK(trainer->Apply("experts",
                             {weights.data() + 96, ElementType::kFp32, {3, 4, 6}, {-48, 12, 2}}));
    for (int64_t i = 0; i < 72; ++i) {
      const int64_t at = 96 - i / 24 * 48 + i % 24 * 2;
      const bool absent = i >= 48;
      EXPECT_EQ(static_cast<const float*>(delta->data)[i], absent ? 0 : -0.5f * gradient[i]) << i;
      EXPECT_EQ(weights[at], absent ? 1 : 0.75f - 0.5f * gradient[i]) << i;
      EXPECT_EQ(weights[at + 1], 1);
    }
    EXPECT_EQ(trainer->timings().bytes_staged, 0);
    ASSERT_OK(trainer->Done());
    ASSERT_OK(trainer->Close());
  });
}

// ---------------------------------------------------------------- polora

std::vector<ParameterSpec> Pair(int64_t rank, int64_t in, int64_t out) {
  std::vector<ParameterSpec> pair = {Param("lora.a", {rank, in}, "polora"),
                                     Param("lora.b", {out, rank}, "polora")};
  pair[0].rule.pair = "lora.b";
  pair[1].rule.pair = "lora.a";
  for (ParameterSpec& factor : pair) EXPECT_TRUE(SetOption(factor.rule, "lr", "0.5").ok());
  return pair;
}

// Both factors in fp64, each step from the state before the step of either.
class ReferenceFactors {
 public:
  explicit ReferenceFactors(const std::vector<ParameterSpec>& pair,
                            const std::vector<Values>& start)
      : pair_(pair) {
    for (int f = 0; f < 2; ++f) {
      rules_.emplace_back(pair[f].rule, pair[f].rows(), pair[f].cols());
      weights_.emplace_back(pair[f].rows(), pair[f].cols(),
                            std::vector<double>(start[f].begin(), start[f].end()));
    }
  }
  // `moves[f]`: factor f is not skipped or absent.
  void Step(int64_t step, const std::vector<Values>& gradients, double scale,
            const std::vector<bool>& moves) {
    const std::vector<Dense> before = weights_;
    const std::vector<std::vector<Dense>> state = {rules_[0].state(), rules_[1].state()};
    for (int f = 0; f < 2; ++f) {
      if (!moves[f]) continue;
      StepArgs args;
      args.step = step;
      args.clip_scale = scale;
      args.lr = pair_[f].rule.lr;
      const Dense g(pair_[f].rows(), pair_[f].cols(),
                    std::vector<double>(gradients[f].begin(), gradients[f].end()));
      const ReferencePair pair{before[f], before[1 - f], state[1 - f]};
      weights_[f] = ReferenceRule::Apply(before[f], rules_[f].Step(g, args, &pair), args);
    }
  }
  const Dense& weights(int f) const { return weights_[f]; }

 private:
  const std::vector<ParameterSpec> pair_;
  std::vector<ReferenceRule> rules_;
  std::vector<Dense> weights_;
};

// Plain steps from B = 0, a clipped one, one dropped and redone, one in which A is not finite and
// left out, one in which B has no gradient.
TEST(RulesTest, PoloraFactorsSeeEachOtherAsBeforeTheStep) {
  for (const Staging staging : {Staging::kDouble, Staging::kLazy}) {
    MemoryCluster cluster(2, StagedServer(staging));
    const std::vector<ParameterSpec> pair = Pair(3, 17, 11);
    RunRanks(2, [&](int32_t rank) {
      TrainerOptions options = cluster.Options(rank, 2);
      options.mode = UpdateMode::kWeights;
      auto trainer = MustConnect(cluster, options, pair);
      ASSERT_NE(trainer, nullptr);
      std::vector<Values> weights = {Gradient(51, 0, 0, 0), Values(33, 0)};
      if (rank == 0) {
        ASSERT_OK(trainer->InitWeights("lora.a", View(weights[0], {3, 17})));
        ASSERT_OK(trainer->InitWeights("lora.b", View(weights[1], {11, 3})));
      }
      ReferenceFactors reference(pair, weights);
      int32_t attempt = 0;
      for (int64_t step = 1; step <= 9;) {
        StepOptions fields;
        fields.commit = CommitMode::kPerMatrix;
        if (step == 3) fields.max_grad_norm = 0.5;
        if (step == 4 && attempt == 0) fields.groups[0].lr = 0.1 * (rank + 1);
        ASSERT_OK(trainer->Begin(step, fields));
        std::vector<Values> gradients = {Gradient(51, step, 0, 0), Gradient(33, step, 0, 1)};
        if (step == 6) gradients[0][5] = std::numeric_limits<float>::infinity();
        ASSERT_OK(trainer->Push(0, View(gradients[0])));
        ASSERT_OK(step == 7 ? trainer->PushAbsent(1) : trainer->Push(1, View(gradients[1])));
        ASSERT_OK(trainer->EndPush());
        const auto outcome = trainer->Wait();
        ASSERT_TRUE(outcome.ok()) << outcome.status();
        ASSERT_EQ(outcome->outcome, step == 4 && attempt == 0 ? Outcome::kDrop : Outcome::kCommit);
        if (outcome->outcome == Outcome::kDrop) {
          ASSERT_OK(trainer->Done());
          ++attempt;
          continue;
        }
        if (step == 6) {
          EXPECT_EQ(outcome->skipped, std::vector<std::string>{"lora.a"});
        }
        ASSERT_OK(trainer->ApplyAll({MutableView(&weights[0]), MutableView(&weights[1])}));
        ASSERT_OK(trainer->Done());
        const double scale = step == 3 ? 0.5 / outcome->grad_norm : 1;
        reference.Step(step, gradients, scale, {step != 6, step != 7});
        for (int f = 0; f < 2; ++f) {
          const Dense& expected = reference.weights(f);
          for (size_t i = 0; i < expected.values.size(); ++i) {
            ASSERT_NEAR(weights[f][i], expected.values[i], 2e-4 * std::max(1e-3, MaxAbs(expected)))
                << "step " << step << " factor " << f;
          }
        }
        attempt = 0;
        ++step;
      }
      ASSERT_OK(trainer->Close());
    });
  }
}

// ---------------------------------------------------------------- what is refused

// Nothing is changed by a refused run: the same servers take a good one.
TEST(RulesTest, RefusesWhatCannotWorkWithTheReason) {
  MemoryCluster cluster(2);
  const auto refused = [&](const std::vector<ParameterSpec>& parameters, UpdateMode mode,
                           const std::vector<std::string>& texts) {
    TrainerOptions options = cluster.Options(0, 1);
    options.mode = mode;
    const auto trainer = Trainer::Connect(options, parameters, cluster.transport());
    ASSERT_TRUE(absl::IsInvalidArgument(trainer.status())) << trainer.status();
    for (const std::string& text : texts) {
      EXPECT_THAT(std::string(trainer.status().message()), HasSubstr(text));
    }
  };
  const std::vector<ParameterSpec> pair = Pair(3, 17, 11);
  refused(pair, UpdateMode::kDelta, {"lora.a", "WEIGHTS"});
  refused({pair[0]}, UpdateMode::kWeights, {"lora.a", "lora.b", "not registered"});
  std::vector<ParameterSpec> one_sided = pair;
  one_sided.push_back(Param("other.a", {3, 17}, "polora"));
  one_sided[1].rule.pair = "other.a";
  one_sided[2].rule.pair = "lora.b";
  refused(one_sided, UpdateMode::kWeights, {"lora.a", "lora.b", "other.a"});
  ParameterSpec splits = Param("qkv", {30, 8}, "cmuon");
  ASSERT_OK(SetOption(splits.rule, "splits", "10,10,12"));
  refused({splits}, UpdateMode::kDelta, {"qkv", "32", "30"});
  refused({Param("experts", {3, 4, 6}, "muon")}, UpdateMode::kDelta,
          {"experts", "[3, 4, 6]", "stack_dims"});
  ParameterSpec depthwise = Param("conv", {8, 1, 3, 3}, "muon");
  depthwise.stack_dims = 0;
  refused({depthwise}, UpdateMode::kDelta, {"conv", "depthwise", "adamw"});
  refused({Param("bias", {7}, "muon")}, UpdateMode::kDelta, {"bias", "1 dimension", "adamw"});

  TrainerOptions options = cluster.Options(0, 1);
  options.mode = UpdateMode::kWeights;
  auto trainer = MustConnect(cluster, options, pair);
  ASSERT_NE(trainer, nullptr);
  ASSERT_OK(trainer->Close());
}

}  // namespace
}  // namespace stiefel::testing
