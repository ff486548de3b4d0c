// Matrices that are cut into shards, element-wise rules: whoever owns the shards, the run is that
// of whole matrices bit for bit. Also run under ThreadSanitizer.
#include <limits>

#include "server/testing/state_hashes.h"
#include "tests/inmemory/cluster.h"

namespace stiefel::testing {
namespace {

using ::testing::HasSubstr;
using Values = std::vector<float>;

constexpr int64_t kSteps = 3;

ParameterSpec Cut(ParameterSpec parameter, int64_t shards) {
  parameter.shards = shards;
  return parameter;
}

// One with rows to cut, one with columns (rows long enough to be sent from where they lie, and
// not), a vector, a stack, and one that stays whole.
std::vector<ParameterSpec> Model(int64_t shards) {
  std::vector<ParameterSpec> model = {Cut(Param("tall", {37, 9}, "adamw"), shards),
                                      Cut(Param("wide", {5, 3100}, "sgd"), shards),
                                      Cut(Param("narrow", {4, 50}, "adamw"), shards),
                                      Cut(Param("vector", {301}, "adamw"), shards),
                                      Param("stack", {2, 12, 4}, "sgd"),
                                      Param("whole", {6, 6}, "adamw")};
  model[4].stack_dims = 1;
  model[4].shards = shards;
  return model;
}

int64_t Elements(const ParameterSpec& p) { return p.rows() * p.cols(); }

struct Result {
  std::vector<Values> weights;  // by parameter, as rank 0 has them
  std::map<int32_t, uint64_t> hashes;
  friend bool operator==(const Result& a, const Result& b) { return a.weights == b.weights; }
};

// Ranks push bands of rows that overlap nowhere and pull everything. Views are transposed on odd
// steps, so that what is lent and what is staged both occur.
Result Train(int servers, int64_t shards, int32_t world_size, UpdateMode mode) {
  MemoryCluster cluster(servers);
  const std::vector<ParameterSpec> model = Model(shards);
  Result result;
  RunRanks(world_size, [&](int32_t rank) {
    TrainerOptions options = cluster.Options(rank, world_size);
    options.mode = mode;
    options.push = RowPushBlocks(model, rank, world_size);
    auto trainer = MustConnect(cluster, options, model);
    ASSERT_NE(trainer, nullptr);
    std::vector<Values> weights;
    for (size_t p = 0; p < model.size(); ++p) {
      weights.push_back(Gradient(Elements(model[p]), 0, 0, static_cast<int32_t>(p)));
      if (mode == UpdateMode::kWeights && rank == 0) {
        ASSERT_OK(trainer->InitWeights(model[p].name, View(weights[p])));
      }
    }
    for (int64_t step = 1; step <= kSteps; ++step) {
      ASSERT_OK(trainer->Begin(step));
      std::vector<Values> gradients;
      for (size_t b = 0; b < options.push.size(); ++b) {
        const Rect& rect = options.push[b].rect;
        gradients.push_back(Gradient(rect.Area(), step, rank, static_cast<int32_t>(b)));
      }
      for (size_t b = 0; b < options.push.size(); ++b) {
        const Rect& rect = options.push[b].rect;
        TensorView view = View(gradients[b], {rect.rows(), rect.cols()});
        if (step % 2 == 0) view.strides = {1, rect.rows()};
        ASSERT_OK(trainer->Push(static_cast<int32_t>(b), view));
      }
      ASSERT_OK(trainer->EndPush());
      const auto outcome = trainer->Wait();
      ASSERT_TRUE(outcome.ok()) << outcome.status();
      ASSERT_EQ(outcome->outcome, Outcome::kCommit) << outcome->reason;
      for (size_t p = 0; p < model.size(); ++p) {
        const auto delta = trainer->Delta(static_cast<int32_t>(p));
        ASSERT_TRUE(delta.ok()) << delta.status();
        ASSERT_OK(trainer->Apply(static_cast<int32_t>(p), MutableView(&weights[p])));
        if (mode == UpdateMode::kWeights) {
          EXPECT_EQ(weights[p], Values(static_cast<const float*>(delta->data),
                                       static_cast<const float*>(delta->data) + weights[p].size()));
        }
      }
      ASSERT_OK(trainer->Done());
    }
    if (rank == 0) {
      result.weights = weights;
      cluster.AwaitDecided(kSteps);
      for (int s = 0; s < servers; ++s) AddStateHashes(cluster.server(s).core(), &result.hashes);
    }
    ASSERT_OK(trainer->Close());
  });
  return result;
}

TEST(ShardsTest, ElementWiseRulesDoNotDependOnCutsOrOwners) {
  for (const UpdateMode mode : {UpdateMode::kDelta, UpdateMode::kWeights}) {
    const Result whole = Train(1, 0, 2, mode);
    ASSERT_EQ(whole.weights.size(), 6u);
    std::optional<Result> cut;
    for (const int servers : {1, 2, 3}) {
      const Result here = Train(servers, 3, 2, mode);
      EXPECT_EQ(here, whole) << servers << " servers";
      EXPECT_EQ(here.hashes.size(), 6u * 3 + 1);  // the stack has two matrices
      if (cut) {
        EXPECT_EQ(here.hashes, cut->hashes) << servers << " servers";
      }
      cut = here;
    }
  }
}

// One shard that is not finite leaves the whole matrix out, and nothing else.
TEST(ShardsTest, PerMatrixCommitSkipsAllShardsOfAMatrix) {
  MemoryCluster cluster(2);
  std::vector<ParameterSpec> model = {Cut(Param("a", {8, 4}), 2), Param("b", {4, 4})};
  auto trainer = MustConnect(cluster, cluster.Options(0, 1), model);
  ASSERT_NE(trainer, nullptr);
  Values a(32, 1.0f), b(16, 3.0f);
  a[30] = std::numeric_limits<float>::infinity();
  StepOptions options;
  options.commit = CommitMode::kPerMatrix;
  ASSERT_OK(trainer->Begin(1, options));
  ASSERT_OK(trainer->Push("a", View(a)));
  ASSERT_OK(trainer->Push("b", View(b)));
  ASSERT_OK(trainer->EndPush());
  const auto outcome = trainer->Wait();
  ASSERT_TRUE(outcome.ok()) << outcome.status();
  EXPECT_EQ(outcome->outcome, Outcome::kCommit);
  EXPECT_EQ(outcome->skipped, std::vector<std::string>{"a"});
  EXPECT_THAT(outcome->reason, HasSubstr("a [4:8, 0:4]"));
  EXPECT_DOUBLE_EQ(outcome->grad_norm, 12);
  EXPECT_TRUE(absl::IsNotFound(trainer->Delta("a").status()));
  EXPECT_TRUE(trainer->Delta("b").ok());
  ASSERT_OK(trainer->Done());
  ASSERT_OK(trainer->Close());
}

// What nobody pushes is named where it lies in the matrix.
TEST(ShardsTest, AGapIsNamedInCoordinatesOfTheMatrix) {
  MemoryCluster cluster(2);
  const std::vector<ParameterSpec> model = {Cut(Param("a", {4, 30}), 3)};
  TrainerOptions options = cluster.Options(0, 1);
  options.push = {{"a", {0, 4, 0, 17}}, {"a", {1, 4, 17, 30}}};
  const auto trainer = Trainer::Connect(options, model, cluster.transport());
  EXPECT_STATUS(trainer.status(), kFailedPrecondition, "\"a\" (4 x 30)");
  EXPECT_THAT(std::string(trainer.status().message()),
              ::testing::AnyOf(HasSubstr("[0:1, 17:20]"), HasSubstr("[0:1, 20:30]")));
}

}  // namespace
}  // namespace stiefel::testing
