// Opening, joining, initial weights, ending and draining of runs.
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "server/run_host.h"
#include "server/testing/memory_cluster.h"

namespace stiefel::testing {
namespace {

using ::testing::HasSubstr;

// ---------------------------------------------------------------- weights

TEST(RunHostLifeTest, WeightsModeServesWhoeverHasNone) {
  const std::vector<Matrix> matrices = {{"a"}, {"b", 8, 8, "adamw"}};
  MemoryCluster cluster(matrices, 2, Opened(matrices, 2, v1::WEIGHTS),
                        std::vector<v1::JoinRunRequest>(2, Whole(matrices, 2)));
  std::vector<std::vector<float>> weights = {Gradient(matrices[0], 71), Gradient(matrices[1], 72)};
  for (int rank = 0; rank < 2; ++rank) cluster[rank].Begin(1);
  // Two halves of "a", the second overlapping, and a copy from the other rank.
  const std::vector<float> top(weights[0].begin(), weights[0].begin() + 10 * kCols);
  const std::vector<float> rest(weights[0].begin() + 6 * kCols, weights[0].end());
  ASSERT_TRUE(cluster[0].InitWeights(0, {0, 10, 0, kCols}, top).ok());
  ASSERT_TRUE(cluster[1].InitWeights(1, {0, 8, 0, 8}, weights[1]).ok());
  auto other = rest;
  other[3] += 1;
  const absl::Status differs = cluster[1].InitWeights(0, {6, kRows, 0, kCols}, other);
  EXPECT_EQ(differs.code(), absl::StatusCode::kAlreadyExists);
  EXPECT_THAT(std::string(differs.message()), HasSubstr("[6, 3] of \"a\""));
  EXPECT_FALSE(cluster[0].Has(v1::ServerMessage::kCredit)) << "weights come first";
  ASSERT_TRUE(cluster[1].InitWeights(0, {6, kRows, 0, kCols}, rest).ok());
  for (int rank = 0; rank < 2; ++rank) {
    cluster[rank].AwaitCredit(1);
    for (int m = 0; m < 2; ++m)
      ASSERT_TRUE(cluster[rank].Push(1, m, Gradient(matrices[m], 3)).ok());
  }
  cluster.EndAndVote(1);
  for (int m = 0; m < 2; ++m) {
    const Rule rule = RuleOf(matrices[m]);
    StepArgs args;
    args.lr = rule.lr;
    args.weight_decay = rule.weight_decay;
    ReferenceRule reference(rule, matrices[m].rows, matrices[m].cols);
    const Dense expected = ReferenceRule::Apply(
        DenseOf(matrices[m], weights[m]),
        reference.Step(DenseOf(matrices[m], Gradient(matrices[m], 3)), args), args);
    EXPECT_LT(Distance(cluster.Delta(0, m, 1), expected), kTolerance);
  }
  cluster.Decide(1, v1::COMMIT);
  EXPECT_TRUE(cluster[0].InitWeights(1, {0, 8, 0, 8}, weights[1]).ok()) << "late copies are fine";
  // A newcomer with nothing gets the weights after the last step.
  const auto after = cluster.Delta(0, 0, 1);
  cluster.clock().Advance(20 * 1000000);
  v1::JoinRunRequest fresh = Whole(matrices, 2);
  fresh.clear_applied_step();
  MemoryTrainer newcomer(&cluster.server(), 1, Incarnation(2, 1));
  newcomer.Join(fresh);
  const auto joined = newcomer.Joined();
  ASSERT_TRUE(joined.ok()) << joined.status();
  EXPECT_FALSE(joined->weights_needed());
  ASSERT_TRUE(newcomer.Connect().ok());
  const ReceivedUpdate got = newcomer.Await(0, 1, 0, 0, 4 * kRows * kCols);
  EXPECT_EQ(got.type, v1::ChunkHeader::WEIGHTS_AT);
  EXPECT_EQ(FloatsOf(got.bytes), after);
}

// ---------------------------------------------------------------- the life of runs

TEST(RunHostLifeTest, WhatDoesNotFitIsRefusedBeforeItIsAllocated) {
  // CASES D16.
  FakeClock clock;
  auto server = *OptimizerServer::Create(Options(), &clock);
  const absl::Status huge =
      server->OpenRun(Opened({{"huge", 1 << 20, 2621440}}, 1)).status();  // 10 TiB of fp32
  EXPECT_EQ(huge.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(huge.message()), HasSubstr("the limit is 1073741824"));
  // 64 trainers of which each pushes all of 4 MiB: 256 MiB, and as much again in windows.
  const std::vector<Matrix> matrices = {{"a", 1024, 1024, "sgd"}};
  ServerOptions options = Options();
  options.memory_limit_bytes = int64_t{300} << 20;
  options.credit_window_bytes = 4 << 20;
  server = *OptimizerServer::Create(options, &clock);
  ASSERT_TRUE(server->OpenRun(Opened(matrices, 64)).ok());
  std::vector<std::unique_ptr<MemoryTrainer>> trainers;
  for (int rank = 0; rank < 64; ++rank) {
    trainers.push_back(std::make_unique<MemoryTrainer>(server.get(), rank));
    trainers.back()->Join(Whole(matrices, 64));
  }
  for (auto& trainer : trainers) {
    const absl::Status refused = trainer->Joined().status();
    EXPECT_EQ(refused.code(), absl::StatusCode::kResourceExhausted);
    EXPECT_THAT(std::string(refused.message()), HasSubstr("pushed 268435456"));
  }
}

TEST(RunHostLifeTest, AutoStagingGoesLazyWhereDoubleDoesNotFit) {
  const std::vector<Matrix> matrices = {{"a", 1024, 1024, "lion"}};  // 4 MiB each: M, M', G, delta
  ServerOptions options = Options();
  options.credit_window_bytes = 4 << 20;
  options.memory_limit_bytes = 18 << 20;
  MemoryCluster lazy(matrices, 1, options);
  EXPECT_EQ(lazy.server().StatusNow().runs(0).staging(), "lazy");
  EXPECT_EQ(lazy.server().StatusNow().declared_bytes() >> 20, 16);
  options.memory_limit_bytes = (20 << 20) + 65536;
  MemoryCluster twice(matrices, 1, options);
  EXPECT_EQ(twice.server().StatusNow().runs(0).staging(), "double");
}

TEST(RunHostLifeTest, OneRunAtATimeAndTheNextAfterItsEnd) {
  const std::vector<Matrix> matrices = {{"a", 8, 8}};
  MemoryCluster cluster(matrices, 2);
  OptimizerServer& server = cluster.server();
  EXPECT_TRUE(server.OpenRun(Opened(matrices, 2))->already_open());
  v1::OpenRunRequest other = Opened(matrices, 2);
  other.set_name("other");
  other.set_run_uid(8);
  const absl::Status refused = server.OpenRun(other).status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(refused.message()),
              ::testing::AllOf(HasSubstr("\"test\" (uid 7"), HasSubstr("\"other\" (uid 8"),
                               HasSubstr("its trainers live")));
  // CASES D4: its trainers die; the refusal says for how long, then the run is released.
  const auto pass = [&](double seconds) {
    for (double t = 0; t < seconds; t += 0.5) {
      cluster.clock().Advance(500000);
      server.Tick();
    }
  };
  pass(16);
  EXPECT_THAT(std::string(server.OpenRun(other).status().message()),
              HasSubstr("without trainers it is released in 29"));
  EXPECT_NEAR(server.Info().runs(0).release_seconds(), 299, 1);
  cluster.clock().Advance(int64_t{301} * 1000000);
  server.Tick();  // a late tick: the server was away, not the trainers
  EXPECT_FALSE(server.OpenRun(other).ok());
  pass(300);
  EXPECT_TRUE(server.OpenRun(other).ok());
  EXPECT_EQ(server.FindRun("test").status().code(), absl::StatusCode::kNotFound);
  v1::CloseRunRequest close;
  close.mutable_sender()->set_run_uid(7);
  EXPECT_TRUE(server.CloseRun(close)->run_ended()) << "closing is idempotent";
}

TEST(RunHostLifeTest, JoinNamesWhoIsMissing) {
  // CASES D10.
  FakeClock clock;
  auto server = *OptimizerServer::Create(Options(), &clock);
  const std::vector<Matrix> matrices = {{"a", 8, 8}};
  ASSERT_TRUE(server->OpenRun(Opened(matrices, 3)).ok());
  MemoryTrainer trainer(server.get(), 1);
  v1::JoinRunRequest join = Whole(matrices, 3);
  join.set_wait_seconds(0.5);
  trainer.Join(join);
  clock.Advance(600000);
  server->Tick();
  const absl::Status late = trainer.Joined().status();
  EXPECT_EQ(late.code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_THAT(std::string(late.message()), HasSubstr("1 of 3 trainers joined; missing ranks 0, 2"));
}

TEST(RunHostLifeTest, MemoryGoesBackWhenTheRunEnds) {
  const std::vector<Matrix> matrices = {{"a", 256, 256}};
  MemoryCluster cluster(matrices);
  cluster.Begin(1);
  ASSERT_TRUE(cluster[0].Push(1, 0, Gradient(matrices[0], 1)).ok());
  cluster.EndAndVote(1);
  cluster.Delta(0, 0, 1);
  cluster.Decide(1, v1::COMMIT);
  v1::CloseRunRequest close;
  *close.mutable_sender() = cluster[0].sender();
  close.set_applied_step(1);
  const auto closed = cluster.server().CloseRun(close);
  ASSERT_TRUE(closed.ok()) << closed.status();
  EXPECT_TRUE(closed->run_ended());
  EXPECT_EQ(cluster.server().FindRun("test").status().code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(std::string(cluster[0].AwaitControlEnd().message()),
              HasSubstr("closed after step 1"));
  cluster.server().Tick();
  EXPECT_TRUE(cluster.server().OpenRun(Opened(matrices, 1)).ok());
}

TEST(RunHostLifeTest, DrainDropsTheOpenAttemptAndWaitsForItsDecision) {
  const std::vector<Matrix> matrices = {{"a", 8, 8}};
  MemoryCluster cluster(matrices);
  cluster.Begin(1);
  cluster.server().Drain();
  EXPECT_THAT(cluster[0].Next(v1::ServerMessage::kDrop).drop().reason(), HasSubstr("is draining"));
  EXPECT_FALSE(cluster.server().Drained());
  cluster.Decide(1, v1::DROP);
  EXPECT_TRUE(cluster.server().Drained());
  EXPECT_EQ(cluster.server().OpenRun(Opened(matrices, 2)).status().code(),
            absl::StatusCode::kUnavailable);
}

TEST(RunHostLifeTest, HashDoesNotDependOnWhoOwnsWhat) {
  const std::vector<Matrix> matrices = {{"a", 8, 8}, {"b", 6, 10}};
  uint64_t together = 0, apart = 0;
  for (const bool split : {false, true}) {
    for (int index = 0; index < (split ? 2 : 1); ++index) {
      v1::OpenRunRequest opened = Opened(matrices, 1);
      if (split) {
        opened.add_servers("there:2");
        opened.set_owners(1, 1);
        opened.set_server_index(index);
      }
      MemoryCluster cluster(matrices, 1, opened, {Whole(matrices, 1)});
      cluster.Begin(1);
      for (int m = 0; m < 2; ++m) {
        if (!split || m == index) {
          ASSERT_TRUE(cluster[0].Push(1, m, Gradient(matrices[m], m)).ok());
        }
      }
      cluster.EndAndVote(1);
      cluster.Decide(1, v1::COMMIT);
      (split ? apart : together) += cluster.Hash();
    }
  }
  EXPECT_EQ(together, apart);
}

}  // namespace
}  // namespace stiefel::testing
