// How calls of the client end when servers, ranks and streams break, and when the trainer leaves.
// Real servers without gRPC; also run under ThreadSanitizer.
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <random>

#include "common/clock.h"
#include "gmock/gmock.h"
#include "tests/inmemory/cluster.h"

namespace stiefel::testing {
namespace {

using ::testing::HasSubstr;

double Seconds(int64_t since) { return static_cast<double>(RealClock().NowMicros() - since) / 1e6; }

// ---------------------------------------------------------------- what breaks

// CASES D3.
TEST(SessionFaultsTest, UnreachableServerIsNamedInBoundedTime) {
  MemoryCluster cluster(1);
  TrainerOptions options = cluster.Options(0, 1);
  options.servers.push_back("nobody:7");
  options.connect_timeout = absl::Milliseconds(300);
  const int64_t start = RealClock().NowMicros();
  const auto trainer = Trainer::Connect(options, {Param("w", {8})}, cluster.transport());
  EXPECT_STATUS(trainer.status(), kUnavailable, "nobody:7");
  EXPECT_LT(Seconds(start), 10);
}

TEST(SessionFaultsTest, BadOptionsAreRefusedBeforeAnythingIsSent) {
  MemoryCluster cluster(1);
  const auto connect = [&](const std::function<void(TrainerOptions*)>& change,
                           std::vector<ParameterSpec> parameters = {Param("w", {8, 8})}) {
    TrainerOptions options = cluster.Options(0, 1);
    change(&options);
    return Trainer::Connect(options, parameters, cluster.transport()).status();
  };
  const auto nothing = [](TrainerOptions*) {};
  EXPECT_STATUS(connect([](auto* o) { o->rank = 1; }), kInvalidArgument, "1");
  EXPECT_STATUS(connect([](auto* o) { o->servers.clear(); }), kInvalidArgument, "servers");
  EXPECT_STATUS(connect([](auto* o) { o->servers.push_back(o->servers[0]); }), kInvalidArgument,
                "server0:1");
  EXPECT_STATUS(connect([](auto* o) { o->data_streams = 0; }), kInvalidArgument, "data_streams");
  EXPECT_STATUS(connect([](auto* o) { o->chunk_bytes = 1 << 30; }), kInvalidArgument,
                "chunk_bytes");
  EXPECT_STATUS(connect([](auto* o) { o->applied_step = std::nullopt; }), kInvalidArgument,
                "applied_step");
  EXPECT_STATUS(connect([](auto* o) { o->push = {{"w", {0, 9, 0, 8}}}; }), kInvalidArgument, "9");
  EXPECT_STATUS(connect([](auto* o) { o->push = {{"x", {0, 8, 0, 8}}}; }), kNotFound, "x");
  EXPECT_STATUS(connect(nothing, {}), kInvalidArgument, "no parameters");
  EXPECT_STATUS(connect(nothing, {Param("w", {8}), Param("w", {8})}), kInvalidArgument, "w");
  EXPECT_STATUS(connect(nothing, {Param("w", {0, 8})}), kInvalidArgument, "w");
  EXPECT_STATUS(connect(nothing, {Param("w", {8}, "muon")}), kInvalidArgument, "w");
  // A gap is found by the servers when all have joined.
  EXPECT_STATUS(connect([](auto* o) {
                  o->push = {{"w", {0, 7, 0, 8}}};
                }),
                kFailedPrecondition, "nobody pushes");
}

TEST(SessionFaultsTest, MissingRankIsNamedAtTheJoinDeadline) {
  MemoryCluster cluster(1);
  TrainerOptions options = cluster.Options(0, 2);
  options.join_timeout = absl::Milliseconds(400);
  const auto trainer = Trainer::Connect(options, {Param("w", {8})}, cluster.transport());
  EXPECT_STATUS(trainer.status(), kDeadlineExceeded, "missing rank 1");
}

TEST(SessionFaultsTest, ARankThatLivesCannotJoinTwice) {
  MemoryCluster cluster(1);
  auto trainer = MustConnect(cluster, cluster.Options(0, 1), {Param("w", {8})});
  ASSERT_NE(trainer, nullptr);
  TrainerOptions options = cluster.Options(0, 1);
  options.join_timeout = absl::Milliseconds(200);
  EXPECT_STATUS(Trainer::Connect(options, {Param("w", {8})}, cluster.transport()).status(),
                kAlreadyExists, "rank 0");
}

class BrokenServerTest : public ::testing::TestWithParam<bool> {};

// CASES D1, E4, E12: a server that dies or freezes in a step is named within the deadline.
TEST_P(BrokenServerTest, EveryCallReturnsAndNamesIt) {
  MemoryCluster cluster(2);
  TrainerOptions options = cluster.Options(0, 1);
  options.step_timeout = absl::Milliseconds(500);
  auto trainer = MustConnect(cluster, options, {Param("a", {64, 64}), Param("b", {64, 64})});
  ASSERT_NE(trainer, nullptr);
  const std::vector<float> g(64 * 64, 1.0f);
  ASSERT_OK(trainer->Begin(1));
  ASSERT_OK(trainer->Push(0, View(g)));
  GetParam() ? cluster.server(1).Freeze() : cluster.server(1).Kill();
  ASSERT_OK(trainer->Push(1, View(g)));
  ASSERT_OK(trainer->EndPush());
  const int64_t start = RealClock().NowMicros();
  EXPECT_STATUS(trainer->Wait().status(), kUnavailable, "server1:1");
  EXPECT_STATUS(trainer->WaitParameter("b", absl::Milliseconds(1)).status(), kUnavailable,
                "server1:1");
  EXPECT_LT(Seconds(start), 10);
  trainer->Close().IgnoreError();
  trainer.reset();
  EXPECT_LT(Seconds(start), 20);
}
INSTANTIATE_TEST_SUITE_P(KilledAndFrozen, BrokenServerTest, ::testing::Bool());

// The other rank never begins: the attempt is dropped at the step deadline, which names it; when it
// comes the step is redone.
TEST(SessionFaultsTest, MissingRankDropsTheAttempt) {
  MemoryCluster cluster(1);
  Mutex mutex;
  CondVar changed;
  bool dropped = false;
  RunRanks(2, [&](int32_t rank) {
    TrainerOptions options = cluster.Options(rank, 2);
    options.step_timeout = absl::Milliseconds(400);
    auto trainer = MustConnect(cluster, options, {Param("w", {8})});
    ASSERT_NE(trainer, nullptr);
    const std::vector<float> g(8, 1.0f);
    if (rank == 1) {
      MutexLock lock(&mutex);
      while (!dropped) changed.Wait(&mutex);
    }
    int drops = 0;
    for (Outcome outcome = Outcome::kDrop; outcome != Outcome::kCommit;) {
      ASSERT_OK(trainer->Begin(1));
      ASSERT_OK(trainer->Push(0, View(g)));
      ASSERT_OK(trainer->EndPush());
      const auto waited = trainer->Wait();
      ASSERT_TRUE(waited.ok()) << waited.status();
      outcome = waited->outcome;
      ASSERT_OK(trainer->Done());
      if (outcome == Outcome::kDrop) {
        EXPECT_THAT(waited->reason, HasSubstr("missing BeginStep of rank"));
        if (drops++ == 0 && rank == 0) {
          EXPECT_EQ(waited->attempt, 0);
          EXPECT_THAT(waited->reason, HasSubstr("rank 1"));
        }
      }
      MutexLock lock(&mutex);
      dropped = true;
      changed.NotifyAll();
    }
    EXPECT_TRUE(rank == 1 || drops > 0);
    EXPECT_EQ(trainer->next_step(), 2);
  });
}

// The leader dies in a step; its successor redoes or finishes it.
TEST(SessionFaultsTest, ANewLeaderTakesTheRunOver) {
  MemoryCluster cluster(2);
  const std::vector<ParameterSpec> parameters = {Param("a", {16}), Param("b", {16})};
  const std::vector<float> g(16, 1.0f);
  const auto step = [&](Trainer* trainer, int64_t number) {
    for (;;) {
      if (absl::Status begun = trainer->Begin(number); !begun.ok()) return begun;
      for (int p = 0; p < 2; ++p) {
        if (absl::Status pushed = trainer->Push(p, View(g)); !pushed.ok()) return pushed;
      }
      if (absl::Status ended = trainer->EndPush(); !ended.ok()) return ended;
      const auto outcome = trainer->Wait();
      if (!outcome.ok()) return outcome.status();
      if (absl::Status done = trainer->Done(); !done.ok()) return done;
      if (outcome->outcome == Outcome::kCommit) return absl::OkStatus();
    }
  };
  RunRanks(2, [&](int32_t rank) {
    auto trainer = MustConnect(cluster, cluster.Options(rank, 2), parameters);
    ASSERT_NE(trainer, nullptr);
    ASSERT_OK(step(trainer.get(), 1));
    if (rank == 0) {
      ASSERT_OK(trainer->Begin(2));
      ASSERT_OK(trainer->Push(0, View(g)));
      trainer.reset();
      TrainerOptions again = cluster.Options(0, 2);
      again.applied_step = 1;
      trainer = MustConnect(cluster, again, parameters);
      ASSERT_NE(trainer, nullptr);
    }
    ASSERT_OK(step(trainer.get(), 2));
    ASSERT_OK(step(trainer.get(), 3));
    EXPECT_EQ(trainer->next_step(), 4);
  });
}

// The leader dies after all have voted: that is said at the deadline, and a new leader finishes the
// step that the old one had not decided.
TEST(SessionFaultsTest, ANewLeaderFinishesAVotedStep) {
  MemoryCluster cluster(2);
  const std::vector<ParameterSpec> parameters = {Param("a", {16}), Param("b", {16})};
  const std::vector<float> g(16, 1.0f);
  const auto push = [&](Trainer* trainer) {
    ASSERT_OK(trainer->Begin(1));
    ASSERT_OK(trainer->Push(0, View(g)));
    ASSERT_OK(trainer->Push(1, View(g)));
    ASSERT_OK(trainer->EndPush());
  };
  Mutex mutex;
  CondVar changed;
  int stage = 0;
  const auto reach = [&](int s) {
    MutexLock lock(&mutex);
    stage = s;
    changed.NotifyAll();
  };
  const auto await = [&](int s) {
    MutexLock lock(&mutex);
    while (stage < s) changed.Wait(&mutex);
  };
  RunRanks(2, [&](int32_t rank) {
    TrainerOptions options = cluster.Options(rank, 2);
    options.step_timeout = absl::Seconds(1);
    auto trainer = MustConnect(cluster, options, parameters);
    ASSERT_NE(trainer, nullptr);
    if (rank == 0) {
      push(trainer.get());
      while (trainer->timings().push_s == 0) std::this_thread::yield();
      trainer.reset();
      reach(1);
      await(2);
      trainer = MustConnect(cluster, options, parameters);
      ASSERT_NE(trainer, nullptr);
    } else {
      await(1);
      push(trainer.get());
      EXPECT_STATUS(trainer->Wait().status(), kDeadlineExceeded, "the leader (rank 0)");
      reach(2);
    }
    // The same outcome for the one that waited and for the one that only now asks.
    const auto outcome = trainer->Wait();
    ASSERT_TRUE(outcome.ok()) << outcome.status();
    EXPECT_EQ(outcome->outcome, Outcome::kCommit) << outcome->reason;
    EXPECT_EQ(outcome->step, 1);
    std::vector<float> w(16);
    ASSERT_OK(trainer->Apply("a", MutableView(&w)));
    EXPECT_FLOAT_EQ(w[0], -0.1f);
    ASSERT_OK(trainer->Done());
  });
}

// Streams break again and again; every step commits once and gives the same bits.
TEST(SessionFaultsTest, BrokenStreamsAreResumed) {
  std::vector<std::vector<float>> results;
  for (const bool broken : {false, true}) {
    MemoryCluster cluster(2);
    std::atomic<bool> stop{false};
    std::thread cutter([&] {
      std::mt19937 random(7);
      while (broken && !stop) {
        Mutex mutex;
        MutexLock lock(&mutex);
        CondVar never;
        never.WaitForMicros(&mutex, 1000 + random() % 20000);
        cluster.server(random() % 2).CutStreams();
      }
    });
    std::vector<float> w(200 * 100);
    int64_t reconnects = 0;
    RunRanks(2, [&](int32_t rank) {
      auto trainer = MustConnect(cluster, cluster.Options(rank, 2),
                                 {Param("a", {200, 100}), Param("b", {200, 100})});
      ASSERT_NE(trainer, nullptr);
      std::vector<float> mine(200 * 100);
      std::vector<float> other(200 * 100);
      for (int64_t step = 1; step <= 10; ++step) {
        ASSERT_OK(trainer->Begin(step));
        const std::vector<float> g = Gradient(200 * 100, step, rank, 0);
        ASSERT_OK(trainer->Push(0, View(g)));
        ASSERT_OK(trainer->Push(1, View(g)));
        ASSERT_OK(trainer->EndPush());
        const auto outcome = trainer->Wait();
        ASSERT_TRUE(outcome.ok()) << outcome.status();
        ASSERT_EQ(outcome->outcome, Outcome::kCommit) << outcome->reason;
        ASSERT_OK(trainer->ApplyAll({MutableView(&mine), MutableView(&other)}));
        ASSERT_OK(trainer->Done());
        if (rank == 0) reconnects += trainer->timings().reconnects;
      }
      if (rank == 0) w = mine;
    });
    stop = true;
    cutter.join();
    results.push_back(w);
    EXPECT_EQ(broken, reconnects > 0);
  }
  EXPECT_EQ(results[0], results[1]);
}

// ---------------------------------------------------------------- leaving

TEST(SessionFaultsTest, CancelEndsWaits) {
  MemoryCluster cluster(1);
  RunRanks(2, [&](int32_t rank) {
    auto trainer = MustConnect(cluster, cluster.Options(rank, 2), {Param("w", {8})});
    ASSERT_NE(trainer, nullptr);
    if (rank == 1) return;
    ASSERT_OK(trainer->Begin(1));
    std::thread canceller([&] { trainer->Cancel(); });
    EXPECT_STATUS(trainer->Wait().status(), kCancelled, "cancelled");
    canceller.join();
    EXPECT_STATUS(trainer->EndPush(), kCancelled, "cancelled");
  });
}

// Cancelled and destroyed at random moments while another thread pushes and waits. The gradient
// goes right after the trainer: AddressSanitizer sees whoever still reads it.
TEST(SessionFaultsTest, DestroyedAtAnyMoment) {
  std::mt19937 random(3);
  for (int round = 0; round < 12; ++round) {
    MemoryCluster cluster(1);
    auto trainer = MustConnect(cluster, cluster.Options(0, 1), {Param("w", {256, 256})});
    ASSERT_NE(trainer, nullptr);
    auto gradient = std::make_unique<std::vector<float>>(256 * 256, 1.0f);
    Trainer* const raw = trainer.get();
    Mutex mutex;
    CondVar changed;
    int phase = 0;
    const auto reach = [&](int p) {
      MutexLock lock(&mutex);
      phase = p;
      changed.NotifyAll();
    };
    const int stop_at = static_cast<int>(random() % 4);
    std::thread user([&] {
      bool ok = true;
      for (int64_t step = 1; ok && step <= 3; ++step) {
        ok = raw->Begin(step).ok();
        reach(1);
        ok = ok && raw->Push(0, View(*gradient)).ok();
        reach(2);
        ok = ok && raw->EndPush().ok();
        reach(3);
        ok = ok && raw->Wait().ok() && raw->Done().ok();
      }
      reach(4);
    });
    {
      MutexLock lock(&mutex);
      while (phase < stop_at) changed.Wait(&mutex);
    }
    raw->Cancel();
    user.join();
    trainer.reset();
    gradient.reset();
  }
}

// CASES E9: children of a fork are unharmed, and every call in them says what is wrong.
TEST(SessionFaultsTest, ForkedChildrenGetAnError) {
  MemoryCluster cluster(1);
  auto trainer = MustConnect(cluster, cluster.Options(0, 1), {Param("w", {8})});
  ASSERT_NE(trainer, nullptr);
  std::vector<pid_t> children;
  for (int i = 0; i < 8; ++i) {
    const pid_t child = fork();
    if (child == 0) {
      const std::vector<float> g(8);
      const auto refused = [](const absl::Status& status) {
        return absl::IsFailedPrecondition(status) &&
               status.message().find("fork") != std::string::npos;
      };
      const bool all = refused(trainer->Begin(1)) && refused(trainer->Push(0, View(g))) &&
                       refused(trainer->EndPush()) && refused(trainer->Wait().status()) &&
                       refused(trainer->Done()) && refused(trainer->Close()) &&
                       refused(trainer->Delta(0).status());
      trainer->Cancel();
      trainer.reset();
      _exit(all ? 0 : 1);
    }
    children.push_back(child);
  }
  for (const pid_t child : children) {
    int status = 0;
    ASSERT_EQ(waitpid(child, &status, 0), child);
    EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status;
  }
  const std::vector<float> g(8, 1.0f);
  ASSERT_OK(trainer->Begin(1));
  ASSERT_OK(trainer->Push(0, View(g)));
  ASSERT_OK(trainer->EndPush());
  ASSERT_OK(trainer->Wait().status());
  ASSERT_OK(trainer->Done());
}

}  // namespace
}  // namespace stiefel::testing
