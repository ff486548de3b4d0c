// Gradients recorded once and replayed through real servers: the same bits whatever the number of
// servers, the order, repetition and interruption of chunks, and where the new state waits.
#include <cmath>
#include <cstdio>
#include <cstring>
#include <limits>
#include <random>

#include "client/grpc_transport.h"
#include "common/checksum.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/e2e/faulty_transport.h"
#include "tests/e2e/grpc_cluster.h"

namespace stiefel {
namespace {

using ::testing::HasSubstr;

constexpr int32_t kRanks = 2;
constexpr int64_t kSteps = 50;

#define ASSERT_OK(expr)                   \
  do {                                    \
    const absl::Status status_ = (expr);  \
    ASSERT_TRUE(status_.ok()) << status_; \
  } while (false)

std::vector<ParameterSpec> Model() {
  std::vector<ParameterSpec> model;
  const auto add = [&model](const std::string& name, std::vector<int64_t> shape,
                            const std::string& preset) {
    ParameterSpec parameter;
    parameter.name = name;
    parameter.shape = std::move(shape);
    parameter.rule = *PresetRule(preset);
    EXPECT_TRUE(SetOption(parameter.rule, "weight_decay", "0.1").ok());
    model.push_back(std::move(parameter));
  };
  add("attn", {48, 40}, "muon");
  add("mlp", {40, 96}, "periodic_rowwise_muon");
  add("head", {33, 20}, "lion");
  add("bias", {301}, "adamw");
  add("gain", {7}, "sgd");
  return model;
}

// What every rank pushes, drawn once. Steps 7 and 23 have one infinity from rank 1.
class Recording {
 public:
  Recording() {
    std::mt19937_64 random(2024);
    std::normal_distribution<float> normal;
    for (const ParameterSpec& parameter : Model()) {
      sizes_.push_back(parameter.rows() * parameter.cols());
    }
    gradients_.resize(kSteps * kRanks);
    for (auto& gradient : gradients_) {
      for (const int64_t size : sizes_) {
        gradient.emplace_back(size);
        for (float& value : gradient.back()) value = normal(random);
      }
    }
    for (const int64_t step : {7, 23}) {
      gradients_[(step - 1) * kRanks + 1][1][1234] = std::numeric_limits<float>::infinity();
    }
  }
  const std::vector<std::vector<float>>& At(int64_t step, int32_t rank) const {
    return gradients_[(step - 1) * kRanks + rank];
  }
  const std::vector<int64_t>& sizes() const { return sizes_; }

 private:
  std::vector<int64_t> sizes_;
  std::vector<std::vector<std::vector<float>>> gradients_;
};

using Weights = std::vector<std::vector<float>>;

struct Variant {
  int servers = 1;
  Staging staging = Staging::kDouble;
  UpdateMode mode = UpdateMode::kDelta;
  Faults faults;
  bool any_order = false;  // blocks are pushed in random order
};

struct Result {
  uint64_t weights_hash = 0;
  std::map<int32_t, uint64_t> state;
  std::vector<Weights> weights_after;  // by step, [0] the initial ones
  int64_t skipped = 0;
  int64_t dropped = 0;
};

Weights InitialWeights(const Recording& recording) {
  Weights weights;
  for (const int64_t size : recording.sizes()) weights.emplace_back(size, 0.5f);
  return weights;
}

TensorView View(const std::vector<float>& values) {
  return {values.data(), ElementType::kFp32, {static_cast<int64_t>(values.size())}, {}};
}
std::vector<MutableTensorView> Views(Weights* weights) {
  std::vector<MutableTensorView> views;
  for (std::vector<float>& w : *weights) {
    views.push_back({w.data(), ElementType::kFp32, {static_cast<int64_t>(w.size())}, {}});
  }
  return views;
}

// Step 11 is dropped once, because the ranks disagree on a learning rate.
StepOptions OptionsOf(int64_t step, int32_t attempt, int32_t rank) {
  StepOptions options;
  options.max_grad_norm = step % 5 == 0 ? 10.0 : 1000.0;
  options.groups[0].lr = 0.02 / static_cast<double>(step);
  if (step == 11 && attempt == 0) options.groups[0].lr = 0.01 * (rank + 1);
  return options;
}

// One attempt; `target` takes the update in.
void Attempt(Trainer* trainer, const Recording& recording, const Variant& variant, int64_t step,
             int32_t attempt, int32_t rank, Weights* target, StepOutcome* outcome) {
  ASSERT_OK(trainer->Begin(step, OptionsOf(step, attempt, rank)));
  const auto& gradient = recording.At(step, rank);
  std::vector<int32_t> order;
  for (size_t b = 0; b < gradient.size(); ++b) order.push_back(static_cast<int32_t>(b));
  if (variant.any_order) {
    std::shuffle(order.begin(), order.end(), std::mt19937_64(step * 7 + rank));
  }
  for (const int32_t b : order) ASSERT_OK(trainer->Push(b, View(gradient[b])));
  ASSERT_OK(trainer->EndPush(/*local_sum_squares=*/rank));
  const auto waited = trainer->Wait();
  ASSERT_TRUE(waited.ok()) << waited.status();
  *outcome = *waited;
  if (outcome->outcome != Outcome::kDrop) ASSERT_OK(trainer->ApplyAll(Views(target)));
  ASSERT_OK(trainer->Done());
}

void RunRank(const Recording& recording, const Variant& variant, const GrpcCluster& cluster,
             FaultyTransport* transport, int32_t rank, Result* result) {
  TrainerOptions options = cluster.Options(rank, kRanks);
  options.mode = variant.mode;
  auto connected = Trainer::Connect(options, Model(), transport);
  ASSERT_TRUE(connected.ok()) << connected.status();
  Trainer* trainer = connected->get();
  Weights weights = InitialWeights(recording);
  if (variant.mode == UpdateMode::kWeights && rank == 0) {
    const std::vector<ParameterSpec> model = Model();
    for (size_t p = 0; p < model.size(); ++p) {
      ASSERT_OK(trainer->InitWeights(model[p].name, View(weights[p])));
    }
  }
  result->weights_after.push_back(weights);
  int32_t attempt = 0;
  for (int64_t step = 1; step <= kSteps;) {
    StepOutcome outcome;
    ASSERT_NO_FATAL_FAILURE(
        Attempt(trainer, recording, variant, step, attempt, rank, &weights, &outcome));
    ASSERT_EQ(outcome.attempt, attempt) << outcome.reason;
    if (outcome.outcome == Outcome::kDrop) {
      ++result->dropped;
      ++attempt;
      ASSERT_LT(attempt, 3) << outcome.reason;
      continue;
    }
    if (outcome.outcome == Outcome::kSkip) {
      ++result->skipped;
      EXPECT_THAT(outcome.reason, HasSubstr("mlp"));
      EXPECT_THAT(outcome.reason, HasSubstr("rank 1"));
      EXPECT_EQ(weights, result->weights_after.back());
    }
    result->weights_after.push_back(weights);
    attempt = 0;
    ++step;
  }
  Hash64 hash;
  for (const std::vector<float>& w : weights) hash.Update(w.data(), w.size() * sizeof(float));
  result->weights_hash = hash.Digest();
}

Result Replay(const std::string& name, const Recording& recording, const Variant& variant) {
  GrpcCluster cluster(variant.servers, variant.staging);
  FaultyTransport transport(GrpcTransport(), variant.faults);
  std::vector<Result> results(kRanks);
  RunRanks(kRanks, [&](int32_t rank) {
    RunRank(recording, variant, cluster, &transport, rank, &results[rank]);
  });
  Result result = results[0];
  EXPECT_EQ(results[1].weights_hash, result.weights_hash) << name;
  result.state = cluster.StateHashes();
  EXPECT_EQ(result.skipped, 2) << name;
  EXPECT_EQ(result.dropped, 1) << name;
  EXPECT_EQ(transport.cuts(), static_cast<int64_t>(variant.faults.cuts.size())) << name;
  if (variant.faults.shuffle) {
    EXPECT_GT(transport.reordered(), 100) << name;
  }
  uint64_t state = 0;
  for (const auto& [index, hash] : result.state) state = state * 31 + hash;
  std::printf("%-28s weights %016llx state %016llx (%lld chunks)\n", name.c_str(),
              static_cast<unsigned long long>(result.weights_hash),
              static_cast<unsigned long long>(state), static_cast<long long>(transport.chunks()));
  return result;
}

TEST(ReplayTest, SameBitsWhateverServersOrderRepetitionAndCuts) {
  const Recording recording;
  const Result first = Replay("1 server", recording, {});
  ASSERT_EQ(first.state.size(), Model().size());
  const auto same = [&](const std::string& name, const Variant& variant) {
    const Result other = Replay(name, recording, variant);
    EXPECT_EQ(other.weights_hash, first.weights_hash) << name;
    EXPECT_EQ(other.state, first.state) << name;
  };
  Variant variant;
  variant.servers = 2;
  same("2 servers", variant);
  variant.servers = 3;
  same("3 servers", variant);
  variant.servers = 2;
  variant.staging = Staging::kLazy;
  same("2 servers, lazy", variant);
  variant.any_order = variant.faults.shuffle = true;
  same("shuffled, lazy", variant);
  variant.staging = Staging::kDouble;
  variant.faults.twice = true;
  same("shuffled, every chunk twice", variant);
  variant.faults = Faults();
  std::mt19937_64 random(5);
  while (variant.faults.cuts.size() < 20) variant.faults.cuts.insert(1 + random() % 680);
  same("cut at 20 moments", variant);
  variant.faults.shuffle = variant.faults.twice = true;
  variant.staging = Staging::kLazy;
  variant.servers = 3;
  same("all of it, 3 servers, lazy", variant);
}

int64_t Ordered(float value) {
  int32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits >= 0 ? bits : int64_t{std::numeric_limits<int32_t>::min()} - bits;
}

// From equal weights, a step gives the same weights within one unit in the last place whether the
// server keeps them or the trainer applies the delta.
TEST(ReplayTest, DeltaAndWeightsModesAgree) {
  const Recording recording;
  Variant weights_variant;
  weights_variant.servers = 2;
  weights_variant.mode = UpdateMode::kWeights;
  const Result kept = Replay("WEIGHTS, 2 servers", recording, weights_variant);
  ASSERT_EQ(kept.weights_after.size(), kSteps + 1);
  weights_variant.servers = 3;
  weights_variant.staging = Staging::kLazy;
  EXPECT_EQ(Replay("WEIGHTS, 3 servers, lazy", recording, weights_variant).weights_hash,
            kept.weights_hash);

  GrpcCluster cluster(1);
  int64_t worst = 0;
  RunRanks(kRanks, [&](int32_t rank) {
    auto connected = Trainer::Connect(cluster.Options(rank, kRanks), Model(), GrpcTransport());
    ASSERT_TRUE(connected.ok()) << connected.status();
    for (int64_t step = 1; step <= kSteps; ++step) {
      Weights weights = kept.weights_after[step - 1];
      StepOutcome outcome;
      for (int32_t attempt = 0; attempt == 0 || outcome.outcome == Outcome::kDrop; ++attempt) {
        ASSERT_LT(attempt, 3);
        ASSERT_NO_FATAL_FAILURE(
            Attempt(connected->get(), recording, {}, step, attempt, rank, &weights, &outcome));
      }
      if (rank != 0) continue;
      for (size_t p = 0; p < weights.size(); ++p) {
        for (size_t i = 0; i < weights[p].size(); ++i) {
          worst = std::max(
              worst, std::abs(Ordered(weights[p][i]) - Ordered(kept.weights_after[step][p][i])));
        }
      }
    }
  });
  std::printf("DELTA against WEIGHTS: at most %lld ulp in a step\n", static_cast<long long>(worst));
  EXPECT_LE(worst, 1);
}

// One infinity in one chunk from one rank: nothing changes anywhere, and the next step works.
TEST(ReplayTest, OneInfinitySkipsTheStepEverywhere) {
  const Recording recording;
  GrpcCluster cluster(2);
  std::map<int32_t, uint64_t> before;
  RunRanks(kRanks, [&](int32_t rank) {
    auto connected = Trainer::Connect(cluster.Options(rank, kRanks), Model());
    ASSERT_TRUE(connected.ok()) << connected.status();
    Trainer* trainer = connected->get();
    Weights weights = InitialWeights(recording);
    StepOutcome outcome;
    for (int64_t step = 1; step <= 8; ++step) {
      if (step == 7 && rank == 1) before = cluster.StateHashes();
      const Weights untouched = weights;
      ASSERT_NO_FATAL_FAILURE(Attempt(trainer, recording, {}, step, 0, rank, &weights, &outcome));
      EXPECT_EQ(outcome.outcome, step == 7 ? Outcome::kSkip : Outcome::kCommit) << outcome.reason;
      EXPECT_EQ(weights == untouched, step == 7) << step;
      if (step != 7) continue;
      EXPECT_THAT(outcome.reason, HasSubstr("mlp"));
      EXPECT_THAT(outcome.reason, HasSubstr("rank 1"));
      if (rank == 1) {
        EXPECT_EQ(cluster.StateHashes(), before);
        EXPECT_EQ(before.size(), Model().size());
      }
    }
    ASSERT_OK(trainer->Close());
  });
}

}  // namespace
}  // namespace stiefel
