// Steps in memory, without gRPC: what trainers get is compared with the fp64 reference.
#include "server/run_host.h"

#include <cmath>
#include <limits>

#include "gtest/gtest.h"
#include "server/testing/memory_cluster.h"

namespace stiefel::testing {
namespace {

class Stagings : public ::testing::TestWithParam<Staging> {};
INSTANTIATE_TEST_SUITE_P(Both, Stagings, ::testing::Values(Staging::kDouble, Staging::kLazy),
                         [](const auto& info) {
                           return info.param == Staging::kDouble ? "Double" : "Lazy";
                         });

TEST_P(Stagings, StepsOfEveryFamilyMatchTheReference) {
  const std::vector<Matrix> matrices = {{"wide"},
                                        {"tall", kCols, kRows},
                                        {"rowwise", kRows, kCols, "periodic_rowwise_muon"},
                                        {"adam", 1, 50, "adamw"},
                                        {"lion", 7, 9, "lion"}};
  MemoryCluster cluster(matrices, 1, Options(GetParam()));
  std::vector<ReferenceRule> references;
  for (const Matrix& m : matrices) references.emplace_back(RuleOf(m), m.rows, m.cols);
  for (int64_t step = 1; step <= 5; ++step) {
    cluster.Begin(step);
    for (size_t m = 0; m < matrices.size(); ++m)
      ASSERT_TRUE(cluster[0].Push(step, m, Gradient(matrices[m], step * 10 + m)).ok());
    const v1::Vote vote = cluster.EndAndVote(step);
    ASSERT_EQ(vote.matrices_size(), static_cast<int>(matrices.size()));
    for (size_t m = 0; m < matrices.size(); ++m) {
      const Rule rule = RuleOf(matrices[m]);
      StepArgs args;
      args.step = step;
      args.commits = step - 1;
      args.kind = KindAtStep(rule, 0, step);
      args.lr = rule.lr;
      args.weight_decay = rule.weight_decay;
      const ReferenceStep expected =
          references[m].Step(DenseOf(matrices[m], Gradient(matrices[m], step * 10 + m)), args);
      EXPECT_LT(Distance(cluster.Delta(0, m, step), expected.delta), kTolerance)
          << matrices[m].name << " step " << step;
    }
    cluster.Decide(step, v1::COMMIT);
  }
  const v1::ServerStatus status = cluster.server().StatusNow();
  // CASES B1: what really ran is counted.
  EXPECT_EQ(status.runs(0).matrices(0).refreshes(), 5);
  EXPECT_EQ(status.runs(0).matrices(2).refreshes(), 2);  // steps 1 and 4 of period 3
  EXPECT_EQ(status.runs(0).matrices(2).last_kind(), "row_wise");
  EXPECT_EQ(status.runs(0).matrices(3).last_kind(), "element_wise");
  EXPECT_EQ(status.runs(0).staging(), std::string(StagingName(GetParam())));
}

TEST(RunHostTest, BothStagingsGiveTheSameBits) {
  const std::vector<Matrix> matrices = {{"a"}, {"b", 33, 20, "adamw"}, {"c", 10, 10, "sgd"}};
  std::vector<uint64_t> hashes;
  std::vector<std::vector<float>> deltas;
  for (const Staging staging : {Staging::kDouble, Staging::kLazy}) {
    MemoryCluster cluster(matrices, 1, Options(staging));
    for (int64_t step = 1; step <= 3; ++step) {
      cluster.Begin(step);
      for (int m = 0; m < 3; ++m)
        ASSERT_TRUE(cluster[0].Push(step, m, Gradient(matrices[m], step + m)).ok());
      cluster.EndAndVote(step);
      for (int m = 0; m < 3; ++m) deltas.push_back(cluster.Delta(0, m, step));
      cluster.Decide(step, v1::COMMIT);
      hashes.push_back(cluster.Hash());
    }
  }
  for (int i = 0; i < 9; ++i) EXPECT_EQ(deltas[i], deltas[i + 9]);
  for (int i = 0; i < 3; ++i) EXPECT_EQ(hashes[i], hashes[i + 3]);
  EXPECT_NE(hashes[0], hashes[1]);
}

TEST(RunHostTest, WeightedMeanOverRanksReduceGroupsAndParts) {
  // CASES B4: four parts equal their sum. Rank 0 and 1 form one reduce group of "b".
  const std::vector<Matrix> matrices = {{"a"}, {"b", 8, 8}};
  std::vector<v1::JoinRunRequest> joins(3, Whole(matrices, 3));
  for (auto& join : joins) join.mutable_push(0)->set_parts(2);
  joins[0].mutable_push(1)->set_reduce_group(5);
  joins[1].mutable_push(1)->set_reduce_group(5);
  MemoryCluster cluster(matrices, 3, Opened(matrices, 3), joins);
  const double weights[] = {1, 1, 3};
  for (int rank = 0; rank < 3; ++rank) {
    v1::BeginStep begin;
    begin.set_weight(weights[rank]);
    cluster[rank].Begin(1, 0, begin);
  }
  Dense a(kRows, kCols), b(8, 8);
  for (int rank = 2; rank >= 0; --rank) {  // the order of arrival does not matter
    cluster[rank].AwaitCredit(1);
    for (int part = 1; part >= 0; --part) {
      const auto g = Gradient(matrices[0], 100 * rank + part);
      ASSERT_TRUE(cluster[rank].Push(1, 0, g, 0, part).ok());
      a = Combine(1, a, weights[rank] / 5, DenseOf(matrices[0], g));
    }
    const auto g = Gradient(matrices[1], 1000 + rank);
    ASSERT_TRUE(cluster[rank].Push(1, 1, g).ok());
    b = Combine(1, b, (rank == 2 ? 3.0 : 1.0) / 4, DenseOf(matrices[1], g));
  }
  const v1::Vote vote = cluster.EndAndVote(1);
  EXPECT_NEAR(vote.matrices(0).sum_squares() / std::pow(FrobeniusNorm(a), 2), 1, 1e-6);
  EXPECT_NEAR(vote.matrices(1).sum_squares() / std::pow(FrobeniusNorm(b), 2), 1, 1e-6);
  StepArgs args;
  args.lr = RuleOf(matrices[0]).lr;
  for (int rank = 0; rank < 3; ++rank) {
    EXPECT_LT(Distance(cluster.Delta(rank, 0, 1),
                       ReferenceRule(RuleOf(matrices[0]), kRows, kCols).Step(a, args).delta),
              kTolerance);
    EXPECT_LT(Distance(cluster.Delta(rank, 1, 1),
                       ReferenceRule(RuleOf(matrices[1]), 8, 8).Step(b, args).delta),
              kTolerance);
  }
}

TEST(RunHostTest, CommonFieldsOverrideTheRule) {
  const std::vector<Matrix> matrices = {{"a", kRows, kCols, "periodic_rowwise_muon"}};
  MemoryCluster cluster(matrices);
  v1::BeginStep begin;
  auto& group = (*begin.mutable_common()->mutable_groups())[0];
  group.set_lr(0.5);
  group.set_beta(0.25);
  group.set_kind(v1::OFF_REFRESH);
  begin.mutable_common()->set_grad_scale(4);
  cluster.Begin(1, 0, begin);
  ASSERT_TRUE(cluster[0].Push(1, 0, Gradient(matrices[0], 1)).ok());
  const v1::Vote vote = cluster.EndAndVote(1);
  const Dense g =
      Combine(0.25, DenseOf(matrices[0], Gradient(matrices[0], 1)), 0, Dense(kRows, kCols));
  EXPECT_NEAR(vote.matrices(0).sum_squares() / std::pow(FrobeniusNorm(g), 2), 1, 1e-6);
  StepArgs args;
  args.kind = StepKind::kOffRefresh;
  args.lr = 0.5;
  args.beta = 0.25;
  EXPECT_LT(Distance(cluster.Delta(0, 0, 1),
                     ReferenceRule(RuleOf(matrices[0]), kRows, kCols).Step(g, args).delta),
            kTolerance);
}

TEST_P(Stagings, NonFiniteGradientSkipsTheStepAndLeavesTheState) {
  // CASES A6.
  const std::vector<Matrix> matrices = {{"a"}, {"h.3.mlp.w", 8, 8}};
  MemoryCluster cluster(matrices, 2, Options(GetParam()));
  const auto step = [&](int64_t s, float poison) {
    cluster.Begin(s);
    for (int rank = 0; rank < 2; ++rank) {
      for (int m = 0; m < 2; ++m) {
        auto g = Gradient(matrices[m], s + m);
        if (rank == 1 && m == 1) g[5] = g[9] = g[17] = poison;
        ASSERT_TRUE(cluster[rank].Push(s, m, g).ok());
      }
    }
  };
  step(1, 1);
  cluster.EndAndVote(1);
  cluster.Decide(1, v1::COMMIT);
  const uint64_t before = cluster.Hash();
  step(2, std::numeric_limits<float>::quiet_NaN());
  const v1::Vote vote = cluster.EndAndVote(2);
  EXPECT_EQ(vote.matrices(1).nonfinite_gradient(), 3);
  EXPECT_EQ(vote.matrices(1).explanation(),
            "3 non-finite gradient elements in h.3.mlp.w, pushed by rank 1");
  EXPECT_EQ(vote.matrices(0).nonfinite_gradient(), 0);
  cluster.Decide(2, v1::SKIP);
  EXPECT_EQ(cluster.Hash(), before);
  const v1::ServerStatus status = cluster.server().StatusNow();
  EXPECT_EQ(status.runs(0).skipped_steps(), 1);
  EXPECT_EQ(status.runs(0).matrices(1).last_skip_reason(), vote.matrices(1).explanation());
  step(3, 1);
  EXPECT_EQ(cluster.EndAndVote(3).matrices(1).nonfinite_gradient(), 0);
  cluster.Decide(3, v1::COMMIT);
  EXPECT_NE(cluster.Hash(), before);
}

TEST_P(Stagings, PerMatrixSkipsOnlyTheNonFiniteOne) {
  const std::vector<Matrix> matrices = {{"a"}, {"b", 8, 8}};
  MemoryCluster cluster(matrices, 1, Options(GetParam()));
  v1::BeginStep begin;
  begin.mutable_common()->set_commit(v1::PER_MATRIX);
  cluster.Begin(1, 0, begin);
  auto poisoned = Gradient(matrices[0], 1);
  poisoned[0] = std::numeric_limits<float>::infinity();
  ASSERT_TRUE(cluster[0].Push(1, 0, poisoned).ok());
  ASSERT_TRUE(cluster[0].Push(1, 1, Gradient(matrices[1], 2)).ok());
  EXPECT_EQ(cluster.EndAndVote(1).commit(), v1::PER_MATRIX);
  const v1::ServerStatus before = cluster.StatusWithHash();
  cluster.Decide(1, v1::COMMIT, 0, 0, {0});
  const v1::ServerStatus after = cluster.StatusWithHash();
  EXPECT_EQ(after.runs(0).matrices(0).state_hash(), before.runs(0).matrices(0).state_hash());
  EXPECT_NE(after.runs(0).matrices(1).state_hash(), before.runs(0).matrices(1).state_hash());
  EXPECT_EQ(after.runs(0).matrices(0).commits(), 0);
  EXPECT_EQ(after.runs(0).matrices(0).skips(), 1);
  EXPECT_EQ(after.runs(0).matrices(1).commits(), 1);
}

TEST_P(Stagings, RescaleComputesAgainFromTheKeptGradient) {
  // The second round must have the bits of a step whose gradient was scaled from the beginning.
  const std::vector<Matrix> matrices = {{"a", kRows, kCols, "sgd"}, {"idle", 4, 4}};
  MemoryCluster cluster(matrices, 1, Options(GetParam()));
  v1::BeginStep begin;
  begin.mutable_common()->set_max_grad_norm(1);
  cluster.Begin(1, 0, begin);
  const auto g = Gradient(matrices[0], 1);
  ASSERT_TRUE(cluster[0].Push(1, 0, g).ok());
  ASSERT_TRUE(cluster[0].PushAbsent(1, 1).ok());
  EXPECT_EQ(cluster.EndAndVote(1).max_grad_norm(), 1);
  v1::TrainerMessage rescale;
  rescale.mutable_rescale()->set_step(1);
  rescale.mutable_rescale()->set_scale(0.5);
  cluster[0].Send(rescale);
  while (cluster[0].Next(v1::ServerMessage::kVote).vote().round() == 0) {
  }
  const auto delta = cluster.Delta(0, 0, 1, 0, 1);
  const float step = static_cast<float>(-RuleOf(matrices[0]).lr);
  for (size_t i = 0; i < g.size(); ++i) ASSERT_EQ(delta[i], step * (0.5f * g[i]));
  // What is absent is absent in this round too, or a trainer would wait for ever.
  EXPECT_TRUE(cluster[0].Await(1, 1, 0, 1, 1).absent);
  cluster.Decide(1, v1::COMMIT, 0, 1);
  EXPECT_EQ(cluster.server().StatusNow().runs(0).matrices(0).commits(), 1);
}

TEST_P(Stagings, AbsentEverywhereIsUntouched) {
  // CASES B10: and is updated from the first gradient on.
  const std::vector<Matrix> matrices = {{"a"}, {"expert", 8, 8}};
  MemoryCluster cluster(matrices, 2, Options(GetParam()));
  const v1::ServerStatus before = cluster.StatusWithHash();
  for (int64_t step = 1; step <= 2; ++step) {
    cluster.Begin(step);
    for (int rank = 0; rank < 2; ++rank) {
      ASSERT_TRUE(cluster[rank].Push(step, 0, Gradient(matrices[0], step)).ok());
      const bool absent = step == 1 || rank == 0;
      ASSERT_TRUE((absent ? cluster[rank].PushAbsent(step, 1)
                          : cluster[rank].Push(step, 1, Gradient(matrices[1], 9)))
                      .ok());
    }
    const v1::Vote vote = cluster.EndAndVote(step);
    EXPECT_EQ(vote.matrices(1).absent(), step == 1);
    EXPECT_EQ(cluster[1].Await(1, step, 0, 0, 4 * 64).absent, step == 1);
    cluster.Decide(step, v1::COMMIT);
    const v1::ServerStatus after = cluster.StatusWithHash();
    EXPECT_EQ(after.runs(0).matrices(1).commits(), step - 1);
    if (step == 1) {
      EXPECT_EQ(after.runs(0).matrices(1).state_hash(), before.runs(0).matrices(1).state_hash());
    }
  }
  // The rank that pushed it weighs alone.
  StepArgs args;
  args.lr = RuleOf(matrices[1]).lr;
  const Dense g = DenseOf(matrices[1], Gradient(matrices[1], 9));
  EXPECT_LT(Distance(cluster.Delta(0, 1, 2),
                     ReferenceRule(RuleOf(matrices[1]), 8, 8).Step(g, args).delta),
            kTolerance);
}

TEST(RunHostTest, DroppedAttemptIsRedoneWithoutTrace) {
  const std::vector<Matrix> matrices = {{"a"}};
  MemoryCluster cluster(matrices);
  cluster.Begin(1);
  ASSERT_TRUE(cluster[0].Push(1, 0, Gradient(matrices[0], 1)).ok());
  cluster.EndAndVote(1);
  const uint64_t before = cluster.Hash();
  cluster.Decide(1, v1::DROP);
  EXPECT_EQ(cluster.Hash(), before);
  cluster.Begin(1, 1);
  ASSERT_TRUE(cluster[0].Push(1, 0, Gradient(matrices[0], 2), 1).ok());
  cluster.EndAndVote(1, 1);
  StepArgs args;
  args.lr = RuleOf(matrices[0]).lr;
  const Dense g = DenseOf(matrices[0], Gradient(matrices[0], 2));
  EXPECT_LT(Distance(cluster.Delta(0, 0, 1, 1),
                     ReferenceRule(RuleOf(matrices[0]), kRows, kCols).Step(g, args).delta),
            kTolerance);
}

}  // namespace
}  // namespace stiefel::testing
