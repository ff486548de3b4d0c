// The host of a run without gRPC: trainers in memory push to it, and what they get is compared with
// the fp64 reference.
#include "server/run_host.h"

#include <cmath>
#include <limits>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/reference/reference_rule.h"
#include "server/testing/memory_trainer.h"

namespace stiefel::testing {
namespace {

using ::testing::HasSubstr;

constexpr int64_t kRows = 24, kCols = 40;

struct Matrix {
  std::string name;
  int64_t rows = kRows, cols = kCols;
  std::string preset = "muon";
  v1::DataType wire = v1::FP32;
};

Rule RuleOf(const Matrix& matrix) { return *PresetRule(matrix.preset); }

v1::OpenRunRequest Opened(const std::vector<Matrix>& matrices, int world_size,
                          v1::UpdateMode mode = v1::DELTA) {
  v1::OpenRunRequest request;
  request.set_name("test");
  request.set_run_uid(7);
  *request.mutable_leader() = Incarnation(1, 100).ToProto();
  request.set_world_size(world_size);
  request.set_start_step(1);
  request.set_update_mode(mode);
  for (const Matrix& matrix : matrices) {
    v1::Parameter* parameter = request.add_parameters();
    parameter->set_name(matrix.name);
    parameter->add_shape(matrix.rows);
    parameter->add_shape(matrix.cols);
    parameter->mutable_rule()->set_preset(matrix.preset);
    parameter->set_push_dtype(matrix.wire);
    request.add_phases(0);
    request.add_owners(0);
  }
  request.add_servers("here:1");
  request.set_placement_epoch(1);
  request.set_protocol_version(kProtocolVersion);
  return request;
}

v1::Rectangle Rectangle(int64_t row_begin, int64_t row_end, int64_t col_begin, int64_t col_end) {
  v1::Rectangle rect;
  rect.set_row_begin(row_begin);
  rect.set_row_end(row_end);
  rect.set_col_begin(col_begin);
  rect.set_col_end(col_end);
  return rect;
}

v1::PushBlock* AddPush(v1::JoinRunRequest* join, const Matrix& matrix) {
  v1::PushBlock* push = join->add_push();
  push->set_parameter(matrix.name);
  *push->mutable_rect() = Rectangle(0, matrix.rows, 0, matrix.cols);
  return push;
}

// Pushes and pulls everything whole.
v1::JoinRunRequest Whole(const std::vector<Matrix>& matrices, int world_size) {
  v1::JoinRunRequest join;
  join.set_name("test");
  join.set_world_size(world_size);
  join.set_applied_step(0);
  join.set_wait_seconds(60);
  for (const Matrix& matrix : matrices) {
    AddPush(&join, matrix);
    v1::PullBlock* pull = join.add_pull();
    pull->set_parameter(matrix.name);
    *pull->mutable_rect() = Rectangle(0, matrix.rows, 0, matrix.cols);
  }
  return join;
}

std::vector<float> Gradient(const Matrix& matrix, uint64_t seed) {
  const Dense dense = RandomNormal(matrix.rows, matrix.cols, seed);
  return {dense.values.begin(), dense.values.end()};
}

Dense DenseOf(const Matrix& matrix, const std::vector<float>& values) {
  return Dense(matrix.rows, matrix.cols, {values.begin(), values.end()});
}

// Largest difference relative to the largest entry.
double Distance(const std::vector<float>& got, const Dense& expected) {
  double worst = 0;
  for (size_t i = 0; i < got.size(); ++i)
    worst = std::max(worst, std::abs(got[i] - expected.values[i]));
  return worst / std::max(MaxAbs(expected), 1e-30);
}
constexpr double kTolerance = 2e-5;  // measured 1e-6 in fp32 at these sizes

ServerOptions Options(std::optional<Staging> staging = std::nullopt) {
  ServerOptions options;
  options.threads = 2;
  options.memory_limit_bytes = int64_t{1} << 30;
  options.staging = staging;
  return options;
}

// A server, a run and its trainers, all joined and connected.
class Cluster {
 public:
  Cluster(std::vector<Matrix> matrices, int world_size, v1::OpenRunRequest opened,
          std::vector<v1::JoinRunRequest> joins, ServerOptions options = Options())
      : matrices_(std::move(matrices)), server_(*OptimizerServer::Create(options, &clock_)) {
    EXPECT_TRUE(server_->OpenRun(opened).ok());
    for (int rank = 0; rank < world_size; ++rank) {
      trainers_.push_back(std::make_unique<MemoryTrainer>(server_.get(), rank));
      trainers_.back()->Join(joins[rank]);
    }
    for (auto& trainer : trainers_) {
      const auto joined = trainer->Joined();
      EXPECT_TRUE(joined.ok()) << joined.status();
      const absl::Status connected = trainer->Connect();
      EXPECT_TRUE(connected.ok()) << connected;
    }
  }
  explicit Cluster(const std::vector<Matrix>& matrices, int world_size = 1,
                   ServerOptions options = Options())
      : Cluster(matrices, world_size, Opened(matrices, world_size),
                std::vector<v1::JoinRunRequest>(world_size, Whole(matrices, world_size)), options) {
  }

  MemoryTrainer& operator[](int rank) { return *trainers_[rank]; }
  OptimizerServer& server() { return *server_; }
  FakeClock& clock() { return clock_; }
  std::shared_ptr<RunHost> run() { return *server_->FindRun("test"); }

  void Begin(int64_t step, int32_t attempt = 0, const v1::BeginStep& begin = {}) {
    for (auto& trainer : trainers_) trainer->Begin(step, attempt, begin);
    for (auto& trainer : trainers_) trainer->AwaitCredit(step, attempt);
  }
  v1::Vote EndAndVote(int64_t step, int32_t attempt = 0) {
    for (auto& trainer : trainers_) trainer->End(step, attempt);
    return trainers_[0]->Next(v1::ServerMessage::kVote).vote();
  }
  // Decides, and waits until every rank heard of it.
  void Decide(int64_t step, v1::Outcome outcome, int32_t attempt = 0, int32_t round = 0,
              std::vector<int32_t> skipped = {}) {
    trainers_[0]->Decide(step, outcome, attempt, round, std::move(skipped));
    for (auto& trainer : trainers_) trainer->Next(v1::ServerMessage::kDecided);
  }
  std::vector<float> Delta(int rank, int block, int64_t step, int32_t attempt = 0,
                           int32_t round = 0) {
    const Matrix& matrix = matrices_[block];
    return FloatsOf(
        trainers_[rank]->Await(block, step, attempt, round, 4 * matrix.rows * matrix.cols).bytes);
  }
  uint64_t Hash() { return StatusWithHash().runs(0).state_hash(); }
  v1::ServerStatus StatusWithHash() {
    v1::GetStatusRequest request;
    request.set_state_hash(true);
    Mutex mutex;
    CondVar changed;
    std::optional<v1::ServerStatus> answer;
    server_->GetStatus(request, [&](v1::ServerStatus status) {
      MutexLock lock(&mutex);
      answer = std::move(status);
      changed.NotifyAll();
    });
    MutexLock lock(&mutex);
    while (!answer) changed.Wait(&mutex);
    return *answer;
  }

 private:
  const std::vector<Matrix> matrices_;
  FakeClock clock_{1000000};
  std::unique_ptr<OptimizerServer> server_;
  std::vector<std::unique_ptr<MemoryTrainer>> trainers_;
};

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
  Cluster cluster(matrices, 1, Options(GetParam()));
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
    Cluster cluster(matrices, 1, Options(staging));
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
  Cluster cluster(matrices, 3, Opened(matrices, 3), joins);
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
  Cluster cluster(matrices);
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
  Cluster cluster(matrices, 2, Options(GetParam()));
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
  Cluster cluster(matrices, 1, Options(GetParam()));
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
  Cluster cluster(matrices, 1, Options(GetParam()));
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
  Cluster cluster(matrices, 2, Options(GetParam()));
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
  Cluster cluster(matrices);
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

// ---------------------------------------------------------------- chunks

TEST(RunHostTest, DuplicatesAreNotAdded) {
  // CASES D27: pieces out of order and repeated.
  const std::vector<Matrix> matrices = {{"a", 4, 8, "sgd"}};
  Cluster cluster(matrices);
  cluster.Begin(1);
  const auto g = Gradient(matrices[0], 1);
  const std::string bytes = BytesOf(g);
  for (const int64_t begin : {24, 8, 24, 0, 16, 0, 8}) {
    v1::ChunkHeader header = cluster[0].Header(1);
    MemoryTrainer::AddPiece(&header, 0, begin, bytes.substr(begin * 4, 32));
    ASSERT_TRUE(cluster[0].Chunk(header, bytes.substr(begin * 4, 32)).ok());
  }
  cluster.EndAndVote(1);
  const auto delta = cluster.Delta(0, 0, 1);
  for (size_t i = 0; i < g.size(); ++i)
    EXPECT_EQ(delta[i], static_cast<float>(-RuleOf(matrices[0]).lr) * g[i]);
  EXPECT_EQ(cluster.server().StatusNow().runs(0).chunks_duplicate(), 3);
  // After the vote they are stale, and acknowledged.
  EXPECT_TRUE(cluster[0].Push(1, 0, g).ok());
}

TEST(RunHostTest, DamagedPieceIsForgottenAndMayComeAgain) {
  const std::vector<Matrix> matrices = {{"a", 4, 8, "sgd"}};
  Cluster cluster(matrices);
  cluster.Begin(1);
  const auto g = Gradient(matrices[0], 1);
  std::string bytes = BytesOf(g);
  v1::ChunkHeader header = cluster[0].Header(1);
  MemoryTrainer::AddPiece(&header, 0, 0, bytes);
  std::string damaged = bytes;
  damaged[17] ^= 1;
  EXPECT_EQ(cluster[0].Chunk(header, damaged).code(), absl::StatusCode::kDataLoss);
  v1::TrainerMessage query;
  query.mutable_arrived_query()->set_step(1);
  cluster[0].Send(query);
  EXPECT_EQ(cluster[0].Next(v1::ServerMessage::kArrived).arrived().parts(0).bounds_size(), 0);
  EXPECT_TRUE(cluster[0].Chunk(header, bytes).ok());
  cluster.EndAndVote(1);
  EXPECT_EQ(cluster.Delta(0, 0, 1)[4], static_cast<float>(-RuleOf(matrices[0]).lr) * g[4]);
  // Equal bounds with another checksum.
  v1::ChunkHeader other = cluster[0].Header(1);
  MemoryTrainer::AddPiece(&other, 0, 0, damaged);
  EXPECT_TRUE(cluster[0].Chunk(other, damaged).ok()) << "sealed: discarded";
}

TEST(RunHostTest, HostileChunksChangeNothing) {
  const std::vector<Matrix> matrices = {{"a", 4, 8, "sgd"}};
  Cluster cluster(matrices, 2);
  const std::string payload(32, 'x');
  const auto chunk = [&](auto change) {
    v1::ChunkHeader header = cluster[0].Header(1);
    MemoryTrainer::AddPiece(&header, 0, 0, payload);
    change(&header);
    return cluster[0].Chunk(header, payload);
  };
  EXPECT_EQ(chunk([](auto*) {}).code(), absl::StatusCode::kFailedPrecondition) << "no credit yet";
  cluster.Begin(1);
  using Code = absl::StatusCode;
  const auto piece = [](v1::ChunkHeader* h) { return h->mutable_pieces(0); };
  EXPECT_EQ(chunk([&](auto* h) { piece(h)->set_offset(25); }).code(), Code::kOutOfRange);
  EXPECT_EQ(chunk([&](auto* h) { piece(h)->set_offset(-1); }).code(), Code::kOutOfRange);
  EXPECT_EQ(chunk([&](auto* h) { piece(h)->set_offset(INT64_MAX); }).code(), Code::kOutOfRange);
  EXPECT_EQ(chunk([&](auto* h) { piece(h)->set_count(9); }).code(), Code::kInvalidArgument);
  EXPECT_EQ(chunk([&](auto* h) { piece(h)->set_count(-8); }).code(), Code::kInvalidArgument);
  EXPECT_EQ(chunk([&](auto* h) { piece(h)->set_count(INT64_MAX); }).code(), Code::kInvalidArgument);
  EXPECT_EQ(chunk([&](auto* h) { piece(h)->set_block(1); }).code(), Code::kInvalidArgument);
  EXPECT_EQ(chunk([&](auto* h) { piece(h)->set_block(-1); }).code(), Code::kInvalidArgument);
  EXPECT_EQ(chunk([&](auto* h) { piece(h)->set_part(1); }).code(), Code::kInvalidArgument);
  EXPECT_EQ(chunk([&](auto* h) { h->set_type(v1::ChunkHeader::UPDATE); }).code(),
            Code::kInvalidArgument);
  EXPECT_EQ(chunk([&](auto* h) { h->mutable_sender()->set_rank(1); }).code(),
            Code::kInvalidArgument);
  EXPECT_EQ(chunk([&](auto* h) { h->mutable_sender()->set_run_uid(8); }).code(),
            Code::kFailedPrecondition);
  EXPECT_EQ(chunk([&](auto* h) { h->mutable_sender()->set_placement_epoch(2); }).code(),
            Code::kFailedPrecondition);
  EXPECT_EQ(chunk([&](auto* h) { h->set_step(2); }).code(), Code::kFailedPrecondition);
  EXPECT_EQ(chunk([&](auto* h) { h->set_attempt(1); }).code(), Code::kFailedPrecondition);
  EXPECT_TRUE(chunk([&](auto* h) { h->set_step(0); }).ok()) << "stale: discarded";
  EXPECT_TRUE(chunk([](auto*) {}).ok());
  EXPECT_EQ(chunk([&](auto* h) { piece(h)->set_crc32c(1); }).code(), Code::kDataLoss);
  EXPECT_EQ(chunk([&](auto* h) { piece(h)->set_offset(4); }).code(), Code::kInvalidArgument)
      << "overlaps without being equal";
  v1::ChunkHeader absent = cluster[0].Header(1);
  absent.add_pieces()->set_absent(true);
  EXPECT_EQ(cluster[0].Chunk(absent, "").code(), Code::kInvalidArgument) << "data came before";
}

TEST(RunHostTest, CreditGrowsWithWhatIsConsumedAndBoundsWhatIsTaken) {
  // CASES E7. A window is 4 MiB; the block is 20 MiB.
  const std::vector<Matrix> matrices = {{"a", 5, 1 << 20, "sgd"}};
  ServerOptions options = Options();
  options.credit_window_bytes = kMaxMessageBytes;
  Cluster cluster(matrices, 2, options);
  for (int rank = 0; rank < 2; ++rank) cluster[rank].Begin(1);
  const v1::Credit first = cluster[0].Next(v1::ServerMessage::kCredit).credit();
  EXPECT_EQ(first.granted_bytes(), kMaxMessageBytes);
  const std::string row(4 << 20, '\0');
  v1::ChunkHeader header = cluster[0].Header(1);
  MemoryTrainer::AddPiece(&header, 0, 0, row);
  ASSERT_TRUE(cluster[0].Chunk(header, row).ok());
  EXPECT_EQ(cluster[0].Next(v1::ServerMessage::kCredit).credit().granted_bytes(),
            2 * kMaxMessageBytes);
  v1::TrainerMessage query;
  query.mutable_arrived_query()->set_step(1);
  cluster[0].Send(query);
  const v1::Arrived arrived = cluster[0].Next(v1::ServerMessage::kArrived).arrived();
  EXPECT_EQ(arrived.consumed_bytes(), kMaxMessageBytes);
  EXPECT_EQ(arrived.parts(0).bounds(1), 1 << 20);
  // Beyond the credit and one window more in one chunk.
  const std::string much(13 << 20, '\0');
  v1::ChunkHeader large = cluster[0].Header(1);
  MemoryTrainer::AddPiece(&large, 0, 1 << 20, much);
  EXPECT_EQ(cluster[0].Chunk(large, much).code(), absl::StatusCode::kResourceExhausted);
}

// ---------------------------------------------------------------- streams

TEST(RunHostTest, SlowReaderHoldsUpNobody) {
  const std::vector<Matrix> matrices = {{"a", 512, 2048, "sgd"}};  // 4 MiB: two chunks
  Cluster cluster(matrices, 2);
  cluster[1].set_reading(false);
  for (int64_t step = 1; step <= 2; ++step) {
    cluster.Begin(step);
    for (int rank = 0; rank < 2; ++rank)
      ASSERT_TRUE(cluster[rank].Push(step, 0, Gradient(matrices[0], step)).ok());
    cluster.EndAndVote(step);
    cluster.Delta(0, 0, step);
    cluster.Decide(step, v1::COMMIT);
  }
  cluster[1].set_reading(true);
  EXPECT_EQ(cluster.Delta(1, 0, 2), cluster.Delta(0, 0, 2));
}

TEST(RunHostTest, MemoryThatSomebodyStillReadsIsNotOverwritten) {
  for (const v1::UpdateMode mode : {v1::DELTA, v1::WEIGHTS}) {
    const std::vector<Matrix> matrices = {{"a", 64, 64, "sgd"}};
    Cluster cluster(matrices, 1, Opened(matrices, 1, mode), {Whole(matrices, 1)});
    if (mode == v1::WEIGHTS) {
      ASSERT_TRUE(cluster[0].InitWeights(0, {0, 64, 0, 64}, Gradient(matrices[0], 5)).ok());
    }
    cluster[0].set_keep_chunks(true);
    std::vector<OutgoingChunk> kept;  // as slices of a dead stream would
    std::vector<std::string> bytes;
    for (int64_t step = 1; step <= 4; ++step) {
      cluster.Begin(step);
      ASSERT_TRUE(cluster[0].Push(step, 0, Gradient(matrices[0], step)).ok());
      cluster.EndAndVote(step);
      bytes.push_back(BytesOf(cluster.Delta(0, 0, step)));
      for (OutgoingChunk& chunk : cluster[0].TakeChunks()) kept.push_back(std::move(chunk));
      cluster.Decide(step, v1::COMMIT);
    }
    ASSERT_EQ(kept.size(), 4u);
    for (int i = 0; i < 4; ++i) {
      EXPECT_EQ(
          std::string(static_cast<const char*>(kept[i].payload[0].data), kept[i].payload[0].size),
          bytes[i])
          << "step " << i + 1;
    }
  }
}

TEST(RunHostTest, BrokenStreamGetsEverythingAgain) {
  const std::vector<Matrix> matrices = {{"a", 512, 2048, "sgd"}, {"b", 8, 8}};
  Cluster cluster(matrices, 2);
  cluster[1].set_reading(false);
  cluster.Begin(1);
  for (int rank = 0; rank < 2; ++rank) {
    for (int m = 0; m < 2; ++m)
      ASSERT_TRUE(cluster[rank].Push(1, m, Gradient(matrices[m], m)).ok());
  }
  cluster.EndAndVote(1);
  cluster.Delta(0, 0, 1);
  cluster[1].DropData();
  cluster[1].set_reading(true);
  cluster.Decide(1, v1::COMMIT);
  // The step is decided, and kept for whoever has not applied it (PROTOCOL rule 5).
  ASSERT_TRUE(cluster[1].ConnectData().ok());
  EXPECT_EQ(cluster.Delta(1, 0, 1), cluster.Delta(0, 0, 1));
  EXPECT_EQ(cluster.Delta(1, 1, 1), cluster.Delta(0, 1, 1));
}

TEST(RunHostTest, ColumnBlocksAndNarrowTypesArriveWhole) {
  const std::vector<Matrix> matrices = {{"a", 6, 3000, "sgd", v1::BF16}};
  v1::JoinRunRequest join = Whole(matrices, 1);
  *join.mutable_pull(0)->mutable_rect() = Rectangle(1, 5, 2, 2999);  // long rows: spans
  v1::PullBlock* narrow = join.add_pull();
  narrow->set_parameter("a");
  *narrow->mutable_rect() = Rectangle(0, 6, 10, 17);  // short rows: gathered
  Cluster cluster(matrices, 1, Opened(matrices, 1), {join});
  cluster.Begin(1);
  std::vector<uint16_t> g(6 * 3000);
  for (size_t i = 0; i < g.size(); ++i) g[i] = FloatToBf16(static_cast<float>(i % 251));
  const std::string bytes(reinterpret_cast<const char*>(g.data()), g.size() * 2);
  v1::ChunkHeader header = cluster[0].Header(1);
  MemoryTrainer::AddPiece(&header, 0, 0, bytes, 2);
  ASSERT_TRUE(cluster[0].Chunk(header, bytes).ok());
  cluster.EndAndVote(1);
  const float step = static_cast<float>(-RuleOf(matrices[0]).lr);
  const Rect rects[] = {{1, 5, 2, 2999}, {0, 6, 10, 17}};
  for (int block = 0; block < 2; ++block) {
    const Rect& rect = rects[block];
    const std::string got = cluster[0].Await(block, 1, 0, 0, 2 * rect.Area()).bytes;
    ASSERT_EQ(static_cast<int64_t>(got.size()), 2 * rect.Area());
    for (int64_t i = 0; i < rect.Area(); ++i) {
      uint16_t value;
      std::memcpy(&value, got.data() + 2 * i, 2);
      const int64_t at =
          (rect.row_begin + i / rect.cols()) * 3000 + rect.col_begin + i % rect.cols();
      ASSERT_EQ(value, FloatToBf16(step * Bf16ToFloat(g[at]))) << "block " << block << " " << i;
    }
  }
}

TEST(RunHostTest, NewerIncarnationFencesTheOlder) {
  const std::vector<Matrix> matrices = {{"a", 8, 8}};
  Cluster cluster(matrices, 2);
  cluster[1].DropData();
  cluster.clock().Advance(20 * 1000000);  // its lease ends
  cluster[0].Send([] {
    v1::TrainerMessage heartbeat;
    heartbeat.mutable_heartbeat();
    return heartbeat;
  }());
  MemoryTrainer newer(&cluster.server(), 1, Incarnation(2, 5));
  newer.Join(Whole(matrices, 2));
  ASSERT_TRUE(newer.Joined().ok());
  EXPECT_TRUE(cluster[1].Next(v1::ServerMessage::kRefused).refused().fenced());
  EXPECT_EQ(cluster[1].AwaitControlEnd().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_FALSE(cluster[1].ConnectData().ok());
  EXPECT_TRUE(newer.Connect().ok());
}

// ---------------------------------------------------------------- weights

TEST(RunHostTest, WeightsModeServesWhoeverHasNone) {
  const std::vector<Matrix> matrices = {{"a"}, {"b", 8, 8, "adamw"}};
  Cluster cluster(matrices, 2, Opened(matrices, 2, v1::WEIGHTS),
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

TEST(RunHostTest, WhatDoesNotFitIsRefusedBeforeItIsAllocated) {
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

TEST(RunHostTest, AutoStagingGoesLazyWhereDoubleDoesNotFit) {
  const std::vector<Matrix> matrices = {{"a", 1024, 1024, "lion"}};  // 4 MiB each: M, M', G, delta
  ServerOptions options = Options();
  options.credit_window_bytes = 4 << 20;
  options.memory_limit_bytes = 18 << 20;
  Cluster lazy(matrices, 1, options);
  EXPECT_EQ(lazy.server().StatusNow().runs(0).staging(), "lazy");
  EXPECT_EQ(lazy.server().StatusNow().declared_bytes() >> 20, 16);
  options.memory_limit_bytes = (20 << 20) + 65536;
  Cluster twice(matrices, 1, options);
  EXPECT_EQ(twice.server().StatusNow().runs(0).staging(), "double");
}

TEST(RunHostTest, OneRunAtATimeAndTheNextAfterItsEnd) {
  const std::vector<Matrix> matrices = {{"a", 8, 8}};
  Cluster cluster(matrices, 2);
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

TEST(RunHostTest, JoinNamesWhoIsMissing) {
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

TEST(RunHostTest, MemoryGoesBackWhenTheRunEnds) {
  const std::vector<Matrix> matrices = {{"a", 256, 256}};
  Cluster cluster(matrices);
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

TEST(RunHostTest, DrainDropsTheOpenAttemptAndWaitsForItsDecision) {
  const std::vector<Matrix> matrices = {{"a", 8, 8}};
  Cluster cluster(matrices);
  cluster.Begin(1);
  cluster.server().Drain();
  EXPECT_THAT(cluster[0].Next(v1::ServerMessage::kDrop).drop().reason(), HasSubstr("is draining"));
  EXPECT_FALSE(cluster.server().Quiet());
  cluster.Decide(1, v1::DROP);
  EXPECT_TRUE(cluster.server().Quiet());
  EXPECT_EQ(cluster.server().OpenRun(Opened(matrices, 2)).status().code(),
            absl::StatusCode::kUnavailable);
}

TEST(RunHostTest, HashDoesNotDependOnWhoOwnsWhat) {
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
      Cluster cluster(matrices, 1, opened, {Whole(matrices, 1)});
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
