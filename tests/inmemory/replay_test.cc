// A run of every rule, recorded once and replayed: the same bits in weights and state whatever the
// number of servers, the order and repetition of chunks, and where the new state waits. Also run
// under ThreadSanitizer.
#include <cstdio>
#include <limits>
#include <map>

#include "server/testing/state_hashes.h"
#include "tests/e2e/faulty_transport.h"
#include "tests/inmemory/cluster.h"

namespace stiefel::testing {
namespace {

constexpr int32_t kRanks = 2;
constexpr int64_t kSteps = 8;
constexpr int64_t kSkipped = 5, kDropped = 4, kClipped = 3;

// Every preset on a matrix of its own; a fused QKV, a stack of experts, a polora pair.
std::vector<ParameterSpec> Model() {
  std::vector<ParameterSpec> model;
  for (const PresetInfo& info : Presets()) {
    const std::string preset(info.name);
    if (preset == "polora") continue;
    model.push_back(Param("w." + preset, {30, 26}, preset));
    Rule& rule = model.back().rule;
    if (preset == "cmuon") {
      EXPECT_TRUE(SetOption(rule, "splits", "14,8,8").ok());
    }
    if (!rule.tiles.empty()) {
      EXPECT_TRUE(SetOption(rule, "tile", "12").ok());
    }
  }
  model.push_back(Param("bias", {301}, "adamw"));
  for (const std::string preset : {"dion3", "periodic_rowwise_muon"}) {
    model.push_back(Param("experts." + preset, {3, 20, 12}, preset));
    model.back().stack_dims = 1;
  }
  model.push_back(Param("lora.a", {2, 4, 20}, "polora"));
  model.push_back(Param("lora.b", {2, 30, 4}, "polora"));
  for (size_t f = 0; f < 2; ++f) {
    ParameterSpec& factor = model[model.size() - 2 + f];
    factor.rule.pair = f == 0 ? "lora.b" : "lora.a";
    factor.stack_dims = 1;
  }
  for (ParameterSpec& parameter : model) {
    EXPECT_TRUE(SetOption(parameter.rule, "weight_decay", "0.1").ok());
  }
  return model;
}

struct Variant {
  int servers = 1;
  Staging staging = Staging::kDouble;
  bool row_blocks = false;  // each rank pushes its rows, which are those of the mean
  Faults faults;
};

struct Result {
  std::vector<std::vector<float>> weights;
  std::map<int32_t, uint64_t> state;
};

// Equal on both ranks, so that the mean does not depend on who pushes what.
std::vector<std::vector<float>> Gradients(const std::vector<ParameterSpec>& model, int64_t step) {
  std::vector<std::vector<float>> gradients;
  for (size_t p = 0; p < model.size(); ++p) {
    gradients.push_back(
        Gradient(model[p].rows() * model[p].cols(), step, 0, static_cast<int32_t>(p)));
  }
  if (step == kSkipped) gradients[3][7] = std::numeric_limits<float>::infinity();
  return gradients;
}

void PushAll(Trainer* trainer, const std::vector<ParameterSpec>& model,
             const std::vector<PushBlock>& blocks,
             const std::vector<std::vector<float>>& gradients) {
  for (size_t b = 0; b < blocks.size(); ++b) {
    size_t p = 0;
    while (model[p].name != blocks[b].parameter) ++p;
    const Rect& rect = blocks[b].rect;
    const int64_t first = rect.row_begin * model[p].cols() + rect.col_begin;
    ASSERT_OK(trainer->Push(static_cast<int32_t>(b),
                            {gradients[p].data() + first, ElementType::kFp32, {rect.Area()}, {}}));
  }
}

void RunRank(const Variant& variant, MemoryCluster* cluster, Transport* transport, int32_t rank,
             Result* result) {
  const std::vector<ParameterSpec> model = Model();
  TrainerOptions options = cluster->Options(rank, kRanks);
  options.mode = UpdateMode::kWeights;
  options.push = variant.row_blocks ? RowPushBlocks(model, rank, kRanks) : WholePushBlocks(model);
  auto trainer = Trainer::Connect(options, model, transport);
  ASSERT_TRUE(trainer.ok()) << trainer.status();
  std::vector<std::vector<float>>& weights = result->weights;
  for (size_t p = 0; p < model.size(); ++p) {
    weights.push_back(Gradient(model[p].rows() * model[p].cols(), 0, 0, static_cast<int32_t>(p)));
    if (rank == 0) ASSERT_OK((*trainer)->InitWeights(model[p].name, View(weights[p])));
  }
  int32_t attempt = 0;
  for (int64_t step = 1; step <= kSteps;) {
    StepOptions fields;
    fields.max_grad_norm = step == kClipped ? 5.0 : 1e6;
    if (step == kDropped && attempt == 0) fields.groups[0].lr = 0.01 * (rank + 1);
    ASSERT_OK((*trainer)->Begin(step, fields));
    const std::vector<std::vector<float>> gradients = Gradients(model, step);
    PushAll(trainer->get(), model, options.push, gradients);
    ASSERT_OK((*trainer)->EndPush());
    const auto outcome = (*trainer)->Wait();
    ASSERT_TRUE(outcome.ok()) << outcome.status();
    const Outcome expected = step == kDropped && attempt == 0 ? Outcome::kDrop
                             : step == kSkipped               ? Outcome::kSkip
                                                              : Outcome::kCommit;
    ASSERT_EQ(outcome->outcome, expected) << outcome->reason;
    std::vector<MutableTensorView> views;
    for (std::vector<float>& w : weights) views.push_back(MutableView(&w));
    if (expected != Outcome::kDrop) ASSERT_OK((*trainer)->ApplyAll(views));
    ASSERT_OK((*trainer)->Done());
    ++attempt;
    if (expected == Outcome::kDrop) continue;
    attempt = 0;
    ++step;
  }
}

Result Replay(const Variant& variant) {
  ServerOptions server = SmallServer();
  server.staging = variant.staging;
  MemoryCluster cluster(variant.servers, server);
  FaultyTransport transport(cluster.transport(), variant.faults);
  std::vector<Result> results(kRanks);
  RunRanks(kRanks,
           [&](int32_t rank) { RunRank(variant, &cluster, &transport, rank, &results[rank]); });
  EXPECT_EQ(results[0].weights, results[1].weights);
  for (int s = 0; s < variant.servers; ++s) {
    AddStateHashes(cluster.server(s).core(), &results[0].state);
  }
  return results[0];
}

TEST(ReplayTest, EveryRuleGivesTheSameBitsWhateverTheServersAndTheOrder) {
  const Result first = Replay({});
  ASSERT_FALSE(::testing::Test::HasFailure());
  ASSERT_EQ(first.state.size(), Model().size() + 2 * 2 + 2);  // two stacks of 3, two of 2
  int variants = 1;
  const auto same = [&](const std::string& name, const Variant& variant) {
    const Result other = Replay(variant);
    EXPECT_EQ(other.weights == first.weights, true) << name;
    EXPECT_EQ(other.state, first.state) << name;
    ++variants;
  };
  Variant variant;
  variant.staging = Staging::kLazy;
  same("lazy", variant);
  variant.servers = 3;
  same("3 servers, lazy", variant);
  variant.servers = 2;
  variant.staging = Staging::kDouble;
  variant.faults.shuffle = variant.faults.twice = true;
  same("2 servers, shuffled, every chunk twice", variant);
  variant.servers = 3;
  variant.row_blocks = true;
  same("3 servers, rows, shuffled, every chunk twice", variant);
  std::printf("%zu parameters, %lld steps: %d variants of equal bits\n", Model().size(),
              static_cast<long long>(kSteps), variants);
}

}  // namespace
}  // namespace stiefel::testing
