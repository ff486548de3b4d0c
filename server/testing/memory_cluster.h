// A server, a run and its trainers in memory, and the fp64 reference to compare with.
#ifndef STIEFEL_SERVER_TESTING_MEMORY_CLUSTER_H_
#define STIEFEL_SERVER_TESTING_MEMORY_CLUSTER_H_

#include <algorithm>
#include <cmath>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/reference/reference_rule.h"
#include "server/testing/memory_trainer.h"

namespace stiefel::testing {

inline constexpr int64_t kRows = 24, kCols = 40;

struct Matrix {
  std::string name;
  int64_t rows = kRows, cols = kCols;
  std::string preset = "muon";
  v1::DataType wire = v1::FP32;
};

inline Rule RuleOf(const Matrix& matrix) { return *PresetRule(matrix.preset); }

inline v1::OpenRunRequest Opened(const std::vector<Matrix>& matrices, int world_size,
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

inline v1::Rectangle Rectangle(int64_t row_begin, int64_t row_end, int64_t col_begin,
                               int64_t col_end) {
  v1::Rectangle rect;
  rect.set_row_begin(row_begin);
  rect.set_row_end(row_end);
  rect.set_col_begin(col_begin);
  rect.set_col_end(col_end);
  return rect;
}

inline v1::PushBlock* AddPush(v1::JoinRunRequest* join, const Matrix& matrix) {
  v1::PushBlock* push = join->add_push();
  push->set_parameter(matrix.name);
  *push->mutable_rect() = Rectangle(0, matrix.rows, 0, matrix.cols);
  return push;
}

// Pushes and pulls everything whole.
inline v1::JoinRunRequest Whole(const std::vector<Matrix>& matrices, int world_size) {
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

inline std::vector<float> Gradient(const Matrix& matrix, uint64_t seed) {
  const Dense dense = RandomNormal(matrix.rows, matrix.cols, seed);
  return {dense.values.begin(), dense.values.end()};
}

inline Dense DenseOf(const Matrix& matrix, const std::vector<float>& values) {
  return Dense(matrix.rows, matrix.cols, {values.begin(), values.end()});
}

// Largest difference relative to the largest entry.
inline double Distance(const std::vector<float>& got, const Dense& expected) {
  double worst = 0;
  for (size_t i = 0; i < got.size(); ++i)
    worst = std::max(worst, std::abs(got[i] - expected.values[i]));
  return worst / std::max(MaxAbs(expected), 1e-30);
}
inline constexpr double kTolerance = 2e-5;  // measured 1e-6 in fp32 at these sizes

inline ServerOptions Options(std::optional<Staging> staging = std::nullopt) {
  ServerOptions options;
  options.threads = 2;
  options.memory_limit_bytes = int64_t{1} << 30;
  options.staging = staging;
  return options;
}

// A server, a run and its trainers, all joined and connected.
class MemoryCluster {
 public:
  MemoryCluster(std::vector<Matrix> matrices, int world_size, v1::OpenRunRequest opened,
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
  explicit MemoryCluster(const std::vector<Matrix>& matrices, int world_size = 1,
                         ServerOptions options = Options())
      : MemoryCluster(matrices, world_size, Opened(matrices, world_size),
                      std::vector<v1::JoinRunRequest>(world_size, Whole(matrices, world_size)),
                      options) {}

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

}  // namespace stiefel::testing

#endif  // STIEFEL_SERVER_TESTING_MEMORY_CLUSTER_H_
