// Spectral rules on matrices that are cut into shards, through running servers: what they compute
// together is that of whole matrices, in the same bits whoever owns the shards, and what they send
// each other is what docs/ARCHITECTURE.md, section 8 says. Also run under ThreadSanitizer.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <limits>

#include "kernels/cpu/cpu_backend.h"
#include "kernels/rules/sharded_rule.h"
#include "plan/shards.h"
#include "server/testing/state_hashes.h"
#include "tests/inmemory/cluster.h"

namespace stiefel::testing {
namespace {

using ::testing::HasSubstr;
using Values = std::vector<float>;

bool FullScale() {
  const char* scale = std::getenv("STIEFEL_TEST_SCALE");
  return scale != nullptr && std::string(scale) == "full";
}

struct CutRun {
  Rule rule;
  int64_t rows = 0;
  int64_t cols = 0;
  int64_t shards = 0;  // 0: whole
  int servers = 1;
  UpdateMode mode = UpdateMode::kDelta;
  std::optional<Staging> staging = {};
  std::optional<double> max_grad_norm = {};
  int64_t steps = 3;
};

struct Outcomes {
  std::vector<Values> deltas;      // by step; WEIGHTS: the weights
  std::vector<int64_t> peer_sums;  // bytes of that step, over all servers
  std::vector<int64_t> peer_gathers;
  std::map<int32_t, uint64_t> hashes;
};

Rule WithOptions(const std::string& preset,
                 const std::vector<std::pair<std::string, std::string>>& options) {
  Rule rule = *PresetRule(preset);
  for (const auto& [key, value] : options) {
    const absl::Status set = SetOption(rule, key, value);
    EXPECT_TRUE(set.ok()) << set;
  }
  return rule;
}

ParameterSpec ParameterOf(const CutRun& run) {
  ParameterSpec parameter;
  parameter.name = "w";
  parameter.shape = {run.rows, run.cols};
  parameter.rule = run.rule;
  parameter.shards = run.shards;
  return parameter;
}

int64_t PeerBytes(MemoryCluster& cluster, int servers, bool sums) {
  int64_t bytes = 0;
  for (int s = 0; s < servers; ++s) {
    const v1::ServerStatus status = cluster.server(s).core()->StatusNow();
    bytes += sums ? status.runs(0).peer_sum_bytes() : status.runs(0).peer_gather_bytes();
  }
  return bytes;
}

Outcomes Train(const CutRun& run) {
  ServerOptions server = SmallServer();
  server.memory_limit_bytes = int64_t{2} << 30;
  server.staging = run.staging;
  MemoryCluster cluster(run.servers, server);
  Outcomes outcomes;
  TrainerOptions options = cluster.Options(0, 1);
  options.mode = run.mode;
  options.chunk_bytes = 1 << 20;
  options.step_timeout = absl::Seconds(300);
  auto trainer = MustConnect(cluster, options, {ParameterOf(run)});
  if (trainer == nullptr) return outcomes;
  const int64_t elements = run.rows * run.cols;
  if (run.mode == UpdateMode::kWeights) {
    const Values initial = Gradient(elements, 1000, 0, 0);
    EXPECT_TRUE(trainer->InitWeights("w", View(initial)).ok());
  }
  for (int64_t step = 1; step <= run.steps; ++step) {
    StepOptions step_options;
    step_options.max_grad_norm = run.max_grad_norm;
    EXPECT_TRUE(trainer->Begin(step, step_options).ok());
    const Values gradient = Gradient(elements, step, 0, 0);
    EXPECT_TRUE(trainer->Push(0, View(gradient)).ok());
    EXPECT_TRUE(trainer->EndPush().ok());
    const auto outcome = trainer->Wait();
    EXPECT_TRUE(outcome.ok()) << outcome.status();
    if (!outcome.ok() || outcome->outcome != Outcome::kCommit) {
      ADD_FAILURE() << (outcome.ok() ? outcome->reason : "");
      return outcomes;
    }
    const auto delta = trainer->Delta(0);
    EXPECT_TRUE(delta.ok()) << delta.status();
    const auto* data = static_cast<const float*>(delta->data);
    outcomes.deltas.emplace_back(data, data + elements);
    outcomes.peer_sums.push_back(PeerBytes(cluster, run.servers, true));
    outcomes.peer_gathers.push_back(PeerBytes(cluster, run.servers, false));
    EXPECT_TRUE(trainer->Done().ok());
  }
  for (size_t step = outcomes.peer_sums.size(); step-- > 1;)
    outcomes.peer_sums[step] -= outcomes.peer_sums[step - 1];
  cluster.AwaitDecided(run.steps);
  for (int s = 0; s < run.servers; ++s) AddStateHashes(cluster.server(s).core(), &outcomes.hashes);
  EXPECT_TRUE(trainer->Close().ok());
  return outcomes;
}

// The largest difference over the largest entry, of the worst step.
double Error(const Outcomes& a, const Outcomes& b) {
  double worst = 0;
  EXPECT_EQ(a.deltas.size(), b.deltas.size());
  for (size_t step = 0; step < std::min(a.deltas.size(), b.deltas.size()); ++step) {
    double error = 0, largest = 0;
    for (size_t i = 0; i < a.deltas[step].size(); ++i) {
      error = std::max(error, std::abs(double{a.deltas[step][i]} - b.deltas[step][i]));
      largest = std::max(largest, std::abs(double{b.deltas[step][i]}));
    }
    worst = std::max(worst, error / largest);
  }
  return worst;
}

int64_t RefreshSums(const CutRun& run) {
  const auto backend = *CreateCpuBackend(1);
  const ShardOf first{run.rows, run.cols, 0, EvenCuts(run.rows, run.cols, run.shards)};
  return (*ShardedRule::Create(run.rule, first, backend.get()))->RefreshSums();
}

// 2 (p - 1) m^2 values for each sum of a refresh, over all of p servers with one shard each; in a
// row-wise step nothing where rows lie within shards, else m sums of squares and one count.
void CheckBytes(const CutRun& run, const Outcomes& outcomes) {
  const int64_t m = std::min(run.rows, run.cols);
  for (int64_t step = 1; step <= run.steps; ++step) {
    const bool refresh = KindAtStep(run.rule, 0, step) == StepKind::kRefresh;
    const int64_t copies = 2 * (run.servers - 1);
    const int64_t expected = refresh                ? copies * m * m * 4 * RefreshSums(run)
                             : run.rows >= run.cols ? 0
                                                    : copies * (m + 1) * 8;
    EXPECT_EQ(outcomes.peer_sums[step - 1], expected)
        << run.rows << " x " << run.cols << " on " << run.servers << ", step " << step;
  }
}

// On 1 to `shards` servers in the same bits; near the whole matrix; in the bytes of the formula.
void CheckRun(CutRun run, const std::string& what) {
  run.servers = 1;
  const int64_t shards = run.shards;
  run.shards = 0;
  const Outcomes whole = Train(run);
  run.shards = shards;
  std::optional<Outcomes> first;
  for (run.servers = 1; run.servers <= shards; ++run.servers) {
    const Outcomes cut = Train(run);
    ASSERT_EQ(cut.deltas.size(), static_cast<size_t>(run.steps)) << what;
    const double error = Error(cut, whole);
    EXPECT_LE(error, 5e-4) << what;
    if (!first) {
      std::printf("%s, %lld x %lld in %lld shards: error at most %.2g of the largest entry\n",
                  what.c_str(), static_cast<long long>(run.rows), static_cast<long long>(run.cols),
                  static_cast<long long>(shards), error);
      first = cut;
    }
    EXPECT_EQ(cut.deltas, first->deltas) << what << " on " << run.servers << " servers";
    EXPECT_EQ(cut.hashes, first->hashes) << what << " on " << run.servers << " servers";
    EXPECT_EQ(cut.hashes.size(), static_cast<size_t>(shards));
    if (run.servers == shards) CheckBytes(run, cut);
    if (run.servers == 1) {
      EXPECT_EQ(cut.peer_gathers.back(), 0);
    }
  }
}

Rule PeriodicRule() {
  return WithOptions("periodic_rowwise_muon", {{"period", "2"}, {"phase", "0"}});
}

TEST(ShardedRefreshTest, StandardAndGramFormAndPeriodicRules) {
  const std::vector<std::pair<std::string, Rule>> rules = {
      {"muon, standard form", WithOptions("muon", {{"form", "standard"}})},
      {"muon, Gram form", WithOptions("muon", {{"form", "gram"}})},
      {"periodic", PeriodicRule()}};
  for (const auto& [what, rule] : rules) {
    for (const auto& [rows, cols] :
         std::vector<std::pair<int64_t, int64_t>>{{96, 400}, {400, 96}}) {
      for (const int64_t shards : {2, 3}) CheckRun({rule, rows, cols, shards}, what);
    }
  }
}

// The matrix of the issue: 1024 x 4096, and 4096 x 1024, shared by 2 and 3 servers.
TEST(ShardedRefreshTest, ALargeMatrixOnTwoAndThreeServers) {
  const Rule gram = WithOptions("muon", {{"form", "gram"}});
  CutRun run{gram, 1024, 4096, 3};
  run.steps = 1;
  CheckRun(run, "muon, Gram form");
  if (!FullScale()) return;
  for (const auto& [rows, cols] :
       std::vector<std::pair<int64_t, int64_t>>{{1024, 4096}, {4096, 1024}}) {
    for (const int64_t shards : {2, 3}) {
      CheckRun({gram, rows, cols, shards}, "muon, Gram form");
      CheckRun({WithOptions("muon", {{"form", "standard"}}), rows, cols, shards}, "muon, standard");
      CheckRun({PeriodicRule(), rows, cols, shards}, "periodic");
    }
  }
}

TEST(ShardedRefreshTest, WeightsModeStagingAndClipping) {
  for (const UpdateMode mode : {UpdateMode::kDelta, UpdateMode::kWeights}) {
    for (const std::optional<double> norm : {std::optional<double>(), std::optional<double>(3.0)}) {
      CutRun run{PeriodicRule(), 60, 200, 3};
      run.mode = mode;
      run.max_grad_norm = norm;
      run.steps = 4;
      run.staging = Staging::kDouble;
      const Outcomes reference = Train(run);
      CutRun whole = run;
      whole.shards = 0;
      EXPECT_LE(Error(reference, Train(whole)), 5e-4);
      run.servers = 3;
      for (const Staging staging : {Staging::kDouble, Staging::kLazy}) {
        run.staging = staging;
        const Outcomes here = Train(run);
        EXPECT_EQ(here.deltas, reference.deltas);
        EXPECT_EQ(here.hashes, reference.hashes);
      }
    }
  }
}

// ---------------------------------------------------------------- what goes wrong

class StepTest : public ::testing::Test {
 protected:
  static constexpr int64_t kRows = 24, kCols = 60;

  explicit StepTest(int servers = 3) : cluster_(servers) {}

  void Connect(absl::Duration step_timeout = absl::Seconds(20)) {
    const CutRun run{WithOptions("muon", {{"form", "gram"}}), kRows, kCols, 3};
    TrainerOptions options = cluster_.Options(0, 1);
    options.step_timeout = step_timeout;
    options.push = {{"w", {0, kRows, 0, 20}},
                    {"w", {0, kRows, 20, kCols}},  // shard 0, the others
                    {"b", {0, 1, 0, 4}}};
    trainer_ = MustConnect(cluster_, options, {ParameterOf(run), Param("b", {4})});
    ASSERT_NE(trainer_, nullptr);
  }

  // Null: absent. The outcome, or why not.
  absl::StatusOr<StepOutcome> Step(const Values* left, const Values* right,
                                   const StepOptions& options = {}) {
    if (absl::Status begun = trainer_->Begin(trainer_->next_step(), options); !begun.ok())
      return begun;
    const Values b(4, 1.0f);
    for (int32_t block = 0; block < 2; ++block) {
      const Values* values = block == 0 ? left : right;
      const absl::Status pushed =
          values == nullptr ? trainer_->PushAbsent(block) : trainer_->Push(block, View(*values));
      if (!pushed.ok()) return pushed;
    }
    if (absl::Status pushed = trainer_->Push(2, View(b)); !pushed.ok()) return pushed;
    if (absl::Status ended = trainer_->EndPush(); !ended.ok()) return ended;
    return trainer_->Wait();
  }
  Values Left(int64_t step) const { return Gradient(kRows * 20, step, 0, 0); }
  Values Right(int64_t step) const { return Gradient(kRows * 40, step, 0, 1); }
  Values Delta() {
    const auto delta = trainer_->Delta(0);
    EXPECT_TRUE(delta.ok()) << delta.status();
    if (!delta.ok()) return {};
    const auto* data = static_cast<const float*>(delta->data);
    return Values(data, data + kRows * kCols);
  }
  // Of a step that must commit.
  Values Committed(const Values* left, const Values* right, const StepOptions& options = {}) {
    const auto outcome = Step(left, right, options);
    EXPECT_TRUE(outcome.ok()) << outcome.status();
    if (!outcome.ok()) return {};
    EXPECT_EQ(outcome->outcome, Outcome::kCommit) << outcome->reason;
    Values delta = Delta();
    EXPECT_TRUE(trainer_->Done().ok());
    return delta;
  }

  MemoryCluster cluster_;
  std::unique_ptr<Trainer> trainer_;
};

TEST_F(StepTest, ANonFiniteShardSkipsTheStepOnAllServers) {
  ASSERT_NO_FATAL_FAILURE(Connect());
  Values left = Left(1), right = Right(1);
  const Values good = right;
  right[kRows * 40 - 1] = std::numeric_limits<float>::quiet_NaN();
  const auto outcome = Step(&left, &right);
  ASSERT_TRUE(outcome.ok()) << outcome.status();
  EXPECT_EQ(outcome->outcome, Outcome::kSkip);
  EXPECT_THAT(outcome->reason, HasSubstr("1 non-finite gradient elements in w [0:24, 40:60]"));
  ASSERT_OK(trainer_->Done());
  // The state is as it was: step 2 is the first step of a run.
  const Values second = Committed(&left, &good);
  MemoryCluster fresh(1);
  trainer_.reset();
  TrainerOptions options = fresh.Options(0, 1);
  auto other = MustConnect(
      fresh, options, {ParameterOf({WithOptions("muon", {{"form", "gram"}}), kRows, kCols, 3})});
  ASSERT_NE(other, nullptr);
  Values whole(kRows * kCols);
  for (int64_t i = 0; i < kRows; ++i) {
    std::copy_n(&left[i * 20], 20, &whole[i * kCols]);
    std::copy_n(&good[i * 40], 40, &whole[i * kCols + 20]);
  }
  ASSERT_OK(other->Begin(1));
  ASSERT_OK(other->Push(0, View(whole)));
  ASSERT_OK(other->EndPush());
  ASSERT_TRUE(other->Wait().ok());
  const auto* first = static_cast<const float*>(other->Delta(0)->data);
  EXPECT_EQ(second, Values(first, first + kRows * kCols));
}

// Also with a second round, in which all shards take part though one has nothing to gain.
TEST_F(StepTest, PerMatrixCommitLeavesTheMatrixOutAndClipsTheOthers) {
  ASSERT_NO_FATAL_FAILURE(Connect());
  Values left = Left(1);
  const Values right = Right(1);
  left[7] = std::numeric_limits<float>::infinity();
  StepOptions options;
  options.commit = CommitMode::kPerMatrix;
  options.max_grad_norm = 0.5;
  const auto outcome = Step(&left, &right, options);
  ASSERT_TRUE(outcome.ok()) << outcome.status();
  EXPECT_EQ(outcome->outcome, Outcome::kCommit) << outcome->reason;
  EXPECT_EQ(outcome->skipped, std::vector<std::string>{"w"});
  EXPECT_DOUBLE_EQ(outcome->grad_norm, 2);  // of b alone
  EXPECT_TRUE(absl::IsNotFound(trainer_->Delta(0).status()));
  ASSERT_OK(trainer_->Done());
  left = Left(2);
  EXPECT_FALSE(Committed(&left, &right).empty());
}

// Absent on all ranks leaves the parameter as it is; what is absent in part is zero.
TEST_F(StepTest, AbsentGradients) {
  ASSERT_NO_FATAL_FAILURE(Connect());
  const auto outcome = Step(nullptr, nullptr);
  ASSERT_TRUE(outcome.ok()) << outcome.status();
  EXPECT_EQ(outcome->outcome, Outcome::kCommit);
  EXPECT_TRUE(absl::IsNotFound(trainer_->Delta(0).status()));
  ASSERT_OK(trainer_->Done());
  const Values left = Left(2), right = Right(2), zero(kRows * 20, 0.0f);
  const Values second = Committed(nullptr, &right);
  const Values third = Committed(&left, &right);
  trainer_.reset();
  MemoryCluster fresh(3);
  TrainerOptions options = fresh.Options(0, 1);
  options.push = {{"w", {0, kRows, 0, 20}}, {"w", {0, kRows, 20, kCols}}};
  auto other = MustConnect(
      fresh, options, {ParameterOf({WithOptions("muon", {{"form", "gram"}}), kRows, kCols, 3})});
  ASSERT_NE(other, nullptr);
  for (int64_t step = 1; step <= 2; ++step) {
    ASSERT_OK(other->Begin(step));
    ASSERT_OK(other->Push(0, View(step == 1 ? zero : left)));
    ASSERT_OK(other->Push(1, View(right)));
    ASSERT_OK(other->EndPush());
    ASSERT_TRUE(other->Wait().ok());
    const auto* delta = static_cast<const float*>(other->Delta(0)->data);
    EXPECT_EQ(step == 1 ? second : third, Values(delta, delta + kRows * kCols)) << step;
    ASSERT_OK(other->Done());
  }
}

// A peer that falls silent within the sum: the attempt is dropped at the deadline, which names it,
// and done again once it is back, in the same bits.
TEST_F(StepTest, AFrozenPeerDropsTheAttempt) {
  ASSERT_NO_FATAL_FAILURE(Connect(absl::Seconds(2)));
  const Values left = Left(1), right = Right(1);
  cluster_.peers().Freeze(cluster_.addresses()[1]);
  auto outcome = Step(&left, &right);
  ASSERT_TRUE(outcome.ok()) << outcome.status();
  EXPECT_EQ(outcome->outcome, Outcome::kDrop);
  EXPECT_THAT(outcome->reason, HasSubstr("server1:1"));
  ASSERT_OK(trainer_->Done());
  cluster_.peers().Thaw(cluster_.addresses()[1]);
  Values again;
  for (int attempt = 1; attempt < 20 && again.empty(); ++attempt) {
    outcome = Step(&left, &right);
    ASSERT_TRUE(outcome.ok()) << outcome.status();
    EXPECT_EQ(outcome->attempt, attempt);
    if (outcome->outcome == Outcome::kCommit) again = Delta();
    ASSERT_OK(trainer_->Done());
  }
  ASSERT_FALSE(again.empty());
  trainer_.reset();
  MemoryCluster fresh(1);
  auto other =
      MustConnect(fresh, fresh.Options(0, 1),
                  {ParameterOf({WithOptions("muon", {{"form", "gram"}}), kRows, kCols, 3})});
  Values whole(kRows * kCols);
  for (int64_t i = 0; i < kRows; ++i) {
    std::copy_n(&left[i * 20], 20, &whole[i * kCols]);
    std::copy_n(&right[i * 40], 40, &whole[i * kCols + 20]);
  }
  ASSERT_OK(other->Begin(1));
  ASSERT_OK(other->Push(0, View(whole)));
  ASSERT_OK(other->EndPush());
  ASSERT_TRUE(other->Wait().ok());
  const auto* first = static_cast<const float*>(other->Delta(0)->data);
  EXPECT_EQ(again, Values(first, first + kRows * kCols));
}

// A server that dies ends the wait with its name, as a drop or an error, and nobody hangs.
TEST_F(StepTest, AKilledServerIsNamed) {
  ASSERT_NO_FATAL_FAILURE(Connect(absl::Seconds(2)));
  const Values left = Left(1), right = Right(1);
  cluster_.peers().Kill(cluster_.addresses()[2]);
  cluster_.server(2).Kill();
  const auto outcome = Step(&left, &right);
  if (outcome.ok()) {
    EXPECT_EQ(outcome->outcome, Outcome::kDrop);
    EXPECT_THAT(outcome->reason, HasSubstr("server2:1"));
  } else {
    EXPECT_THAT(std::string(outcome.status().message()), HasSubstr("server2:1"));
  }
}

}  // namespace
}  // namespace stiefel::testing
