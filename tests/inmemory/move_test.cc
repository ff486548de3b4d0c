// Servers are added, drained and replaced while a run trains: the weights and the state that come
// of it are those of a run left alone, bit for bit. Also run under ThreadSanitizer.
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <future>
#include <limits>

#include "common/clock.h"
#include "common/status.h"
#include "server/run_host.h"
#include "server/testing/state_hashes.h"
#include "tests/inmemory/cluster.h"

namespace stiefel::testing {
namespace {

using Values = std::vector<float>;

constexpr auto kPatience = std::chrono::seconds(60);

bool FullScale() {
  const char* scale = std::getenv("STIEFEL_TEST_SCALE");
  return scale != nullptr && std::strcmp(scale, "full") == 0;
}

struct Model {
  std::vector<ParameterSpec> parameters;
  UpdateMode mode = UpdateMode::kDelta;
  std::optional<Staging> staging;
};

ParameterSpec Wire(ParameterSpec parameter, DType dtype) {
  parameter.push_dtype = dtype;
  return parameter;
}
ParameterSpec Cut(ParameterSpec parameter, int64_t shards) {
  parameter.shards = shards;
  return parameter;
}

// Rules with every kind of state, in both dtypes, whole and cut.
Model MixedModel(UpdateMode mode, Staging staging) {
  Model model;
  model.mode = mode;
  model.staging = staging;
  model.parameters = {Param("a", {24, 16}, "muon"),
                      Wire(Param("b", {16, 40}, "adamw"), DType::kBf16),
                      Param("c", {20, 12}, "periodic_rowwise_muon"),
                      Cut(Param("d", {48, 8}, "adamw"), 3),
                      Cut(Param("e", {32, 16}, "muon"), 2),
                      Wire(Param("f", {8, 8}, "muonbp"), DType::kBf16),
                      Param("g", {300}, "adamw")};
  if (mode == UpdateMode::kWeights) {
    model.parameters.push_back(Param("h.A", {4, 24}, "polora"));
    model.parameters.push_back(Param("h.B", {20, 4}, "polora"));
    EXPECT_TRUE(SetOption(model.parameters[7].rule, "pair", "h.B").ok());
    EXPECT_TRUE(SetOption(model.parameters[8].rule, "pair", "h.A").ok());
  }
  return model;
}

struct Result {
  int64_t steps = 0;
  std::vector<Values> weights;  // of rank 0
  std::map<int32_t, uint64_t> hashes;
  int64_t moves = 0;
};

// A run on the first servers of a cluster, with others at hand.
class Training {
 public:
  Training(int servers, int first, int32_t world_size, Model model)
      : model_(std::move(model)), cluster_(servers, Server(model_)), world_size_(world_size) {
    first_.assign(cluster_.addresses().begin(), cluster_.addresses().begin() + first);
  }

  MemoryCluster& cluster() { return cluster_; }
  std::string address(int server) const { return cluster_.addresses()[server]; }
  // The last step that some rank has applied.
  int64_t progress() const { return progress_.load(); }
  void AwaitStep(int64_t step) const {
    while (progress() < step && !failed_) std::this_thread::yield();
  }
  // Rank `rank` dies before its next step, without a word, and comes again.
  void KillRank(int32_t rank) { dies_ = rank; }
  void AwaitReborn() const {
    while (dies_ >= 0 && !failed_) std::this_thread::yield();
  }
  void set_move_bytes(int64_t bytes) { move_bytes_ = bytes; }

  // Asks for a change of placement through a server of the run, and waits for it.
  absl::Status Replan(const std::vector<int>& add, const std::vector<int>& drain) {
    v1::ReplanRequest request;
    request.set_name("test");
    for (const int server : add) request.add_add(address(server));
    for (const int server : drain) request.add_drain(address(server));
    request.set_wait_seconds(50);
    for (;;) {
      std::shared_ptr<RunHost> host;
      for (size_t s = 0; s < cluster_.addresses().size() && host == nullptr; ++s) {
        if (cluster_.server(s).dead()) continue;
        const auto run = cluster_.server(s).core()->FindRun("test");
        if (run.ok() && !(*run)->Away()) host = *run;
      }
      if (host == nullptr || failed_) return absl::NotFoundError("no server holds the run");
      std::promise<absl::Status> answered;
      host->Replan(request, [&answered](const absl::Status& status, const v1::ReplanResponse&) {
        answered.set_value(status);
      });
      std::future<absl::Status> answer = answered.get_future();
      EXPECT_EQ(answer.wait_for(kPatience), std::future_status::ready);
      const absl::Status status = answer.get();
      // The leader is just joining somewhere else.
      const bool again = status.message().find("is connected") != absl::string_view::npos ||
                         status.message().find("has ended") != absl::string_view::npos;
      if (!again) return status;
    }
  }

  // Of the newest placement that any server knows.
  std::vector<std::string> ServersNow() {
    v1::ServerInfo::HeldRun newest;
    for (size_t s = 0; s < cluster_.addresses().size(); ++s) {
      if (cluster_.server(s).dead()) continue;
      const v1::ServerInfo info = cluster_.server(s).core()->Info();
      for (const v1::ServerInfo::HeldRun& run : info.runs()) {
        if (run.placement_epoch() > newest.placement_epoch()) newest = run;
      }
    }
    return {newest.servers().begin(), newest.servers().end()};
  }
  // Returns once the server has no part in the run.
  void AwaitGone(int server) {
    for (bool gone = false; !gone && !failed_;) {
      const v1::ServerInfo info = cluster_.server(server).core()->Info();
      gone = info.runs_size() == 0 || info.runs(0).server_index() < 0;
    }
  }

  // Trains until `script` has returned, then a few steps more; or `steps` steps where there is no
  // script.
  Result Run(const std::function<void()>& script, int64_t steps = 0) {
    if (steps > 0) last_ = steps;
    std::vector<std::thread> ranks;
    for (int32_t rank = 0; rank < world_size_; ++rank)
      ranks.emplace_back([this, rank] { Train(rank); });
    if (script) {
      AwaitStep(1);
      script();
      AwaitStep(progress() + 2);
      stop_ = true;
    }
    while (trained_ < world_size_) std::this_thread::yield();
    if (!failed_) CollectHashes();
    collected_ = true;
    for (std::thread& rank : ranks) rank.join();
    result_.steps = last_;
    return result_;
  }

 private:
  static ServerOptions Server(const Model& model) {
    ServerOptions options = SmallServer();
    options.staging = model.staging;
    return options;
  }

  TrainerOptions Options(int32_t rank, std::optional<int64_t> applied) {
    TrainerOptions options = cluster_.Options(rank, world_size_);
    options.servers = first_;
    options.mode = model_.mode;
    options.applied_step = applied;
    options.move_bytes = move_bytes_;
    options.push = RowPushBlocks(model_.parameters, rank, world_size_);
    return options;
  }

  // Every thread ends, whatever fails.
  void Train(int32_t rank) {
    std::vector<Values> weights;
    std::unique_ptr<Trainer> trainer = Steps(rank, &weights);
    if (::testing::Test::HasFailure()) failed_ = true;
    ++trained_;
    while (!collected_) std::this_thread::yield();
    if (rank == 0) result_.weights = weights;
    if (rank == 0 && trainer != nullptr) result_.moves = trainer->timings().moves;
    if (trainer != nullptr && !failed_) ExpectOk(trainer->Close());
  }

  static void ExpectOk(const absl::Status& status) { EXPECT_TRUE(status.ok()) << status; }

  std::unique_ptr<Trainer> Steps(int32_t rank, std::vector<Values>* weights) {
    auto trainer = MustConnect(cluster_, Options(rank, 0), model_.parameters);
    if (trainer == nullptr) {
      failed_ = true;
      return nullptr;
    }
    const bool pulls = model_.mode == UpdateMode::kWeights;
    for (size_t p = 0; p < model_.parameters.size(); ++p) {
      const ParameterSpec& parameter = model_.parameters[p];
      weights->push_back(
          Gradient(parameter.rows() * parameter.cols(), 0, 0, static_cast<int32_t>(p)));
      if (pulls && rank == 0) ExpectOk(trainer->InitWeights(parameter.name, View(weights->back())));
    }
    for (int64_t step = 1; step <= last_ && !failed_;) {
      if (rank == 0 && stop_ && last_ > step + 1) last_ = step + 1;  // others have not begun it
      if (dies_ == rank) {
        trainer.reset();
        trainer = MustConnect(cluster_, Options(rank, step - 1), model_.parameters);
        dies_ = -1;
        if (trainer == nullptr) return nullptr;
      }
      const absl::Status stepped = Step(trainer.get(), rank, step, weights);
      if (!stepped.ok() && !absl::IsCancelled(stepped)) {
        ADD_FAILURE() << "rank " << rank << " step " << step << ": " << stepped;
        failed_ = true;
      }
      if (!stepped.ok()) continue;
      if (rank == 0) progress_ = step;
      ++step;
    }
    return trainer;
  }

  // CANCELLED: a drop.
  absl::Status Step(Trainer* trainer, int32_t rank, int64_t step, std::vector<Values>* weights) {
    STIEFEL_RETURN_IF_ERROR(trainer->Begin(step));
    const std::vector<PushBlock> blocks = RowPushBlocks(model_.parameters, rank, world_size_);
    std::vector<Values> gradients;
    for (size_t b = 0; b < blocks.size(); ++b)
      gradients.push_back(Gradient(blocks[b].rect.Area(), step, rank, static_cast<int32_t>(b)));
    for (size_t b = 0; b < blocks.size(); ++b) {
      const Rect& rect = blocks[b].rect;
      STIEFEL_RETURN_IF_ERROR(
          trainer->Push(static_cast<int32_t>(b), View(gradients[b], {rect.rows(), rect.cols()})));
    }
    STIEFEL_RETURN_IF_ERROR(trainer->EndPush());
    const auto outcome = trainer->Wait();
    STIEFEL_RETURN_IF_ERROR(outcome.status());
    std::vector<MutableTensorView> views;
    for (Values& values : *weights) views.push_back(MutableView(&values));
    if (outcome->outcome == Outcome::kCommit) STIEFEL_RETURN_IF_ERROR(trainer->ApplyAll(views));
    STIEFEL_RETURN_IF_ERROR(trainer->Done());
    return outcome->outcome == Outcome::kDrop ? absl::CancelledError("dropped") : absl::OkStatus();
  }

  // Once the last decision is recorded on all servers of the run.
  void CollectHashes() {
    for (size_t s = 0; s < cluster_.addresses().size(); ++s) {
      if (cluster_.server(s).dead()) continue;
      const auto run = cluster_.server(s).core()->FindRun("test");
      if (!run.ok() || (*run)->Away()) continue;
      v1::ServerInfo::HeldRun held;
      do {
        (*run)->FillHeldRun(&held);
      } while (held.last_consumed_step() < last_ && !failed_);
      AddStateHashes(cluster_.server(s).core(), &result_.hashes);
    }
  }

  Model model_;
  MemoryCluster cluster_;
  const int32_t world_size_;
  int64_t move_bytes_ = int64_t{1} << 30;
  std::vector<std::string> first_;
  std::atomic<int64_t> last_{std::numeric_limits<int64_t>::max() - 1};
  std::atomic<int64_t> progress_{0};
  std::atomic<bool> stop_{false};
  std::atomic<bool> failed_{false};
  std::atomic<bool> collected_{false};
  std::atomic<int32_t> trained_{0};
  std::atomic<int32_t> dies_{-1};
  Result result_;
};

// What the same run comes to when it is left alone.
void ExpectUndisturbed(const Result& moved, const Model& model, int32_t world_size) {
  Training alone(2, 2, world_size, model);
  const Result expected = alone.Run(nullptr, moved.steps);
  EXPECT_EQ(moved.weights, expected.weights);
  EXPECT_EQ(moved.hashes, expected.hashes);
}

// Two ranks on two servers: one is added, one drained, one replaced, and all but one drained.
void ReplanThroughout(const Model& model, double corrupt) {
  Training training(3, 2, 2, model);
  PeerFaults faults;
  faults.corrupt = corrupt;
  training.cluster().peers().set_faults(faults);
  const Result moved = training.Run([&] {
    ASSERT_OK(training.Replan({2}, {}));
    EXPECT_EQ(training.ServersNow().size(), 3u);
    ASSERT_OK(training.Replan({}, {0}));
    ASSERT_OK(training.Replan({0}, {1}));
    EXPECT_EQ(training.ServersNow(),
              (std::vector<std::string>{training.address(2), training.address(0)}));
    ASSERT_OK(training.Replan({}, {2}));
    EXPECT_EQ(training.ServersNow(), std::vector<std::string>{training.address(0)});
    for (const int gone : {1, 2}) training.AwaitGone(gone);
  });
  EXPECT_GE(moved.moves, 4);
  std::printf("%lld steps, %lld moves\n", static_cast<long long>(moved.steps),
              static_cast<long long>(moved.moves));
  ExpectUndisturbed(moved, model, 2);
}

TEST(MoveTest, DeltaDoubleStaging) {
  ReplanThroughout(MixedModel(UpdateMode::kDelta, Staging::kDouble), 0);
}
TEST(MoveTest, DeltaLazyStaging) {
  ReplanThroughout(MixedModel(UpdateMode::kDelta, Staging::kLazy), 0);
}
TEST(MoveTest, WeightsDoubleStaging) {
  ReplanThroughout(MixedModel(UpdateMode::kWeights, Staging::kDouble), 0);
}
TEST(MoveTest, WeightsLazyStaging) {
  ReplanThroughout(MixedModel(UpdateMode::kWeights, Staging::kLazy), 0);
}

// Element-wise rules alone: nothing else than state goes between servers, and some of it is damaged
// on the way.
TEST(MoveTest, DamagedStateIsFetchedAgain) {
  Model model;
  model.parameters = {Param("a", {24, 16}, "adamw"), Param("b", {40, 40}, "muon"),
                      Cut(Param("c", {48, 8}, "adamw"), 3)};
  ReplanThroughout(model, 0.5);
}

// What may move at once is bounded: the server is emptied, and filled, over several steps.
TEST(MoveTest, BoundedBytesTakeSeveralMoves) {
  Model model;
  for (int i = 0; i < 6; ++i)
    model.parameters.push_back(Param("p" + std::to_string(i), {16, 16}, "muon"));
  Training training(3, 2, 1, model);
  training.set_move_bytes(16 * 16 * 4);  // one
  const Result moved = training.Run([&] {
    ASSERT_OK(training.Replan({}, {1}));
    EXPECT_EQ(training.ServersNow(), std::vector<std::string>{training.address(0)});
  });
  EXPECT_EQ(moved.moves, 3);
  ExpectUndisturbed(moved, model, 1);
}

TEST(MoveTest, WhatCannotBeDoneIsRefusedWithTheReason) {
  Model model;
  model.parameters = {Param("a", {8, 8}, "muon"), Param("b", {64}, "adamw")};
  Training training(2, 2, 1, model);
  const Result moved = training.Run([&] {
    EXPECT_STATUS(training.Replan({}, {0, 1}), kFailedPrecondition, "all 2 servers");
    v1::ReplanRequest request;
    request.add_add("nowhere:1");
    request.set_wait_seconds(30);
    std::promise<absl::Status> answered;
    const auto run = training.cluster().server(0).core()->FindRun("test");
    ASSERT_TRUE(run.ok());
    (*run)->Replan(request, [&](const absl::Status& status, const v1::ReplanResponse&) {
      answered.set_value(status);
    });
    EXPECT_STATUS(answered.get_future().get(), kFailedPrecondition, "nowhere:1");
  });
  EXPECT_EQ(moved.moves, 0);
  ExpectUndisturbed(moved, model, 1);
}

// The server that is to come in dies while it fetches: the move is cancelled, training goes on, and
// the next wish is fulfilled.
TEST(MoveTest, ANewServerDiesWhileItFetches) {
  Model model;
  for (int i = 0; i < 6; ++i)
    model.parameters.push_back(Param("p" + std::to_string(i), {16, 16}, "muon"));
  Training training(4, 2, 2, model);
  const Result moved = training.Run([&] {
    training.cluster().peers().Freeze(training.address(2));  // its fetches hang
    std::thread killer([&] {
      for (;;) {  // until it came in
        const v1::ServerInfo info = training.cluster().server(2).core()->Info();
        if (info.runs_size() > 0) break;
        std::this_thread::yield();
      }
      training.cluster().server(2).Kill();
    });
    const absl::Status status = training.Replan({2}, {});
    killer.join();
    EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << status;
    training.AwaitStep(training.progress() + 2);
    EXPECT_EQ(training.ServersNow().size(), 2u);
    ASSERT_OK(training.Replan({3}, {0}));
  });
  EXPECT_EQ(moved.moves, 1);
  ExpectUndisturbed(moved, model, 2);
}

// Servers that were emptied are stopped for good, as they may be: whoever starts later does not
// wait for them.
TEST(MoveTest, RanksStartAgainAfterEmptiedServersAreGone) {
  const Model model = MixedModel(UpdateMode::kWeights, Staging::kDouble);
  Training training(4, 2, 2, model);
  const Result moved = training.Run([&] {
    for (int round = 0; round < 2; ++round) {  // 2 for 1, 3 for 2
      ASSERT_OK(training.Replan({round + 2}, {round + 1}));
      training.AwaitStep(training.progress() + 1);
      training.cluster().server(round + 1).Kill();
      for (const int32_t rank : {0, 1}) {
        training.KillRank(rank);
        training.AwaitReborn();
        training.AwaitStep(training.progress() + 1);
      }
    }
    EXPECT_EQ(training.ServersNow(),
              (std::vector<std::string>{training.address(0), training.address(3)}));
  });
  ExpectUndisturbed(moved, model, 2);
}

// Ranks die at random moments around changes of placement, the leader among them.
TEST(MoveTest, RanksDieWhileTheRunMoves) {
  const Model model = MixedModel(UpdateMode::kDelta, Staging::kDouble);
  const int rounds = FullScale() ? 40 : 4;
  Training training(3, 2, 2, model);
  std::mt19937_64 random(7);
  int64_t deaths = 0;
  const Result moved = training.Run([&] {
    int out = 2;  // the server that has no part
    for (int round = 0; round < rounds; ++round) {
      const int leaves = (out + 1 + static_cast<int>(random() % 2)) % 3;
      std::thread killer([&, rank = static_cast<int32_t>(random() % 2), wait = random() % 4000] {
        const int64_t until = RealClock().NowMicros() + static_cast<int64_t>(wait);
        while (RealClock().NowMicros() < until) std::this_thread::yield();
        training.KillRank(rank);
        training.AwaitReborn();
        ++deaths;
      });
      absl::Status status;
      do {  // a leader that died has forgotten
        status = training.Replan({out}, {leaves});
      } while (absl::IsFailedPrecondition(status));
      killer.join();
      ASSERT_OK(status);
      out = leaves;
    }
  });
  std::printf("%lld steps, %d moves, %lld deaths\n", static_cast<long long>(moved.steps), rounds,
              static_cast<long long>(deaths));
  ExpectUndisturbed(moved, model, 2);
}

}  // namespace
}  // namespace stiefel::testing
