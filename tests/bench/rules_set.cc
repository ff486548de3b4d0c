#include "tests/bench/rules_set.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <numeric>
#include <random>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/status.h"
#include "plan/cost.h"
#include "plan/phases.h"

namespace stiefel {
namespace {

constexpr int kMaxCallers = 8;  // as the server's default

using Clock = std::chrono::steady_clock;

double SecondsSince(Clock::time_point begin) {
  return std::chrono::duration<double>(Clock::now() - begin).count();
}

int64_t Elements(const PlanMatrix& matrix) { return matrix.rows * matrix.cols; }

absl::StatusOr<DeviceBuffer> Zeros(Backend* backend, int64_t bytes) {
  STIEFEL_ASSIGN_OR_RETURN(DeviceBuffer buffer, backend->Allocate(bytes));
  std::memset(buffer.data(), 0, static_cast<size_t>(bytes));
  return buffer;
}

void FillNormal(int64_t elements, uint64_t seed, float* values) {
  std::mt19937_64 random(seed);
  std::normal_distribution<float> normal(0, 1e-3f);
  for (int64_t i = 0; i < elements; ++i) values[i] = normal(random);
}

}  // namespace

absl::StatusOr<RandomGradients> RandomGradients::Create(Backend* backend,
                                                        const std::vector<PlanMatrix>& matrices) {
  RandomGradients gradients;
  for (const PlanMatrix& matrix : matrices) {
    STIEFEL_ASSIGN_OR_RETURN(DeviceBuffer memory,
                             backend->Allocate(Elements(matrix) * DTypeSize(matrix.push_dtype)));
    gradients.data_.push_back(memory.data());
    gradients.memory_.push_back(std::move(memory));
  }
  ThreadPool pool(backend->Info().threads);
  pool.ParallelFor(static_cast<int64_t>(matrices.size()), [&](int64_t i) {
    const int64_t elements = Elements(matrices[i]);
    std::vector<float> values(elements);
    FillNormal(elements, static_cast<uint64_t>(i) + 1, values.data());
    Convert(values.data(), DType::kFp32, gradients.memory_[i].data(), matrices[i].push_dtype,
            elements);
  });
  return gradients;
}

RuleSet::RuleSet(Backend* backend, std::vector<PlanMatrix> matrices, Mode mode)
    : backend_(backend),
      matrices_(std::move(matrices)),
      mode_(mode),
      cycle_steps_(CycleSteps(matrices_)),
      callers_(std::min(backend->Info().threads, kMaxCallers)),
      workers_(callers_.threads()),
      held_(matrices_.size()) {}

absl::StatusOr<std::unique_ptr<RuleSet>> RuleSet::Create(Backend* backend,
                                                         std::vector<PlanMatrix> matrices,
                                                         Mode mode) {
  std::unique_ptr<RuleSet> set(new RuleSet(backend, std::move(matrices), mode));
  STIEFEL_RETURN_IF_ERROR(set->Allocate());
  return set;
}

absl::Status RuleSet::Allocate() {
  STIEFEL_ASSIGN_OR_RETURN(const std::vector<int64_t> phases, AssignPhases(matrices_));
  int64_t workspace_bytes = 0;
  for (size_t i = 0; i < matrices_.size(); ++i) {
    held_[i].phase = phases[i];
    STIEFEL_RETURN_IF_ERROR(AllocateMatrix(matrices_[i], &held_[i]));
    workspace_bytes = std::max(workspace_bytes, held_[i].rule->WorkspaceBytes());
  }
  for (Worker& worker : workers_) {
    STIEFEL_ASSIGN_OR_RETURN(worker.stream, backend_->CreateStream());
    STIEFEL_ASSIGN_OR_RETURN(worker.workspace, Zeros(backend_, workspace_bytes));
  }
  return absl::OkStatus();
}

absl::Status RuleSet::AllocateMatrix(const PlanMatrix& matrix, Held* held) {
  STIEFEL_ASSIGN_OR_RETURN(held->rule,
                           MatrixRule::Create(matrix.rule, matrix.rows, matrix.cols, backend_));
  for (const StateBuffer& buffer : held->rule->State()) {
    const int64_t bytes = buffer.rows * buffer.cols * static_cast<int64_t>(sizeof(float));
    for (std::vector<DeviceBuffer>* state : {&held->state, &held->staged_state}) {
      STIEFEL_ASSIGN_OR_RETURN(DeviceBuffer memory, Zeros(backend_, bytes));
      state->push_back(std::move(memory));
    }
  }
  if (mode_ == Mode::kDelta) {
    STIEFEL_ASSIGN_OR_RETURN(held->delta,
                             Zeros(backend_, Elements(matrix) * DTypeSize(matrix.pull_dtype)));
    return absl::OkStatus();
  }
  const int64_t bytes = Elements(matrix) * static_cast<int64_t>(sizeof(float));
  STIEFEL_ASSIGN_OR_RETURN(held->weights, Zeros(backend_, bytes));
  STIEFEL_ASSIGN_OR_RETURN(held->staged_weights, Zeros(backend_, bytes));
  return absl::OkStatus();
}

int64_t RuleSet::elements() const {
  int64_t sum = 0;
  for (const PlanMatrix& matrix : matrices_) sum += Elements(matrix);
  return sum;
}

StepKind RuleSet::KindOf(size_t matrix, int64_t step) const {
  return KindAtStep(matrices_[matrix].rule, held_[matrix].phase, step);
}

std::vector<size_t> RuleSet::Order(const std::vector<StepKind>& kinds) const {
  std::vector<double> units(matrices_.size());
  for (size_t i = 0; i < units.size(); ++i) units[i] = StepCost(matrices_[i], kinds[i]).Units();
  std::vector<size_t> order(matrices_.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::stable_sort(order.begin(), order.end(),
                   [&](size_t a, size_t b) { return units[a] > units[b]; });
  return order;
}

absl::StatusOr<double> RuleSet::Step(const std::vector<const void*>& gradients,
                                     std::optional<StepKind> kind) {
  ++step_;
  std::vector<StepKind> kinds(matrices_.size());
  for (size_t i = 0; i < kinds.size(); ++i) kinds[i] = kind.value_or(KindOf(i, step_));
  const std::vector<size_t> order = Order(kinds);
  std::atomic<size_t> next{0};
  const Clock::time_point begin = Clock::now();
  callers_.ParallelFor(std::min(callers_.threads(), static_cast<int>(order.size())),
                       [&](int64_t index) {
                         Worker& worker = workers_[index];
                         for (size_t at = next++; at < order.size(); at = next++) {
                           const size_t i = order[at];
                           worker.status.Update(StepMatrix(i, gradients[i], kinds[i], &worker));
                         }
                       });
  const double seconds = SecondsSince(begin);
  for (const Worker& worker : workers_) STIEFEL_RETURN_IF_ERROR(worker.status);
  return seconds;
}

absl::Status RuleSet::StepMatrix(size_t matrix, const void* gradient, StepKind kind,
                                 Worker* worker) {
  const PlanMatrix& plan = matrices_[matrix];
  Held& held = held_[matrix];
  GradientView view;
  view.pieces.push_back({Rect{0, plan.rows, 0, plan.cols}, gradient, plan.push_dtype});
  StepArgs args;
  args.step = step_;
  args.commits = step_ - 1;
  args.kind = kind;
  args.lr = plan.rule.lr;
  args.weight_decay = plan.rule.weight_decay;
  StepBuffers buffers;
  for (const DeviceBuffer& state : held.state) buffers.state.push_back(state.as<float>());
  for (const DeviceBuffer& state : held.staged_state)
    buffers.staged_state.push_back(state.as<float>());
  buffers.delta = held.delta.data();
  buffers.delta_dtype = plan.pull_dtype;
  buffers.weights = held.weights.as<float>();
  buffers.staged_weights = held.staged_weights.as<float>();
  StepResult result;
  STIEFEL_RETURN_IF_ERROR(
      held.rule->Compute(worker->stream.get(), view, args, buffers, &worker->workspace, &result));
  STIEFEL_RETURN_IF_ERROR(worker->stream->Synchronize());
  if (result.nonfinite_gradient != 0 || result.nonfinite_update != 0) {
    return absl::InternalError(
        absl::StrCat("step ", step_, " of ", plan.name, " (", DescribeRule(plan.rule),
                     "): ", result.nonfinite_gradient, " elements of the gradient and ",
                     result.nonfinite_update, " of the update are not finite"));
  }
  held.state.swap(held.staged_state);
  std::swap(held.weights, held.staged_weights);
  return absl::OkStatus();
}

double RuleSet::CopySeconds() {
  const int64_t parts = callers_.threads();
  const Clock::time_point begin = Clock::now();
  callers_.ParallelFor(static_cast<int64_t>(matrices_.size()) * parts, [&](int64_t piece) {
    const Held& held = held_[piece / parts];
    const int64_t bytes = held.state[0].bytes();
    const int64_t first = bytes * (piece % parts) / parts;
    const int64_t end = bytes * (piece % parts + 1) / parts;
    std::memcpy(held.staged_state[0].as<char>() + first, held.state[0].as<char>() + first,
                static_cast<size_t>(end - first));
  });
  return SecondsSince(begin);
}

double RuleSet::FlopsPerStep() const {
  double flops = 0;
  for (int64_t step = 1; step <= cycle_steps_; ++step) {
    for (size_t i = 0; i < matrices_.size(); ++i)
      flops += StepCost(matrices_[i], KindOf(i, step)).flops;
  }
  return flops / static_cast<double>(cycle_steps_);
}

absl::StatusOr<double> GemmRate(Backend* backend, DType dtype) {
  constexpr int64_t kSizes[] = {512, 1024, 2048};
  constexpr int kTries = 3;
  constexpr int64_t kLargest = kSizes[2] * kSizes[2];
  STIEFEL_ASSIGN_OR_RETURN(const std::unique_ptr<Stream> stream, backend->CreateStream());
  std::vector<float> normal(kLargest);
  FillNormal(kLargest, 1, normal.data());
  DeviceBuffer operands[3];
  for (DeviceBuffer& operand : operands) {
    STIEFEL_ASSIGN_OR_RETURN(operand, backend->Allocate(kLargest * DTypeSize(dtype)));
    Convert(normal.data(), DType::kFp32, operand.data(), dtype, kLargest);
  }
  double best = 0;
  for (const int64_t n : kSizes) {
    for (int i = 0; i < kTries; ++i) {
      GemmArgs args;
      args.a = {operands[0].data(), dtype, n, n};
      args.b = {operands[1].data(), dtype, n, n};
      args.c = {operands[2].data(), dtype, n, n};
      const Clock::time_point begin = Clock::now();
      stream->Gemm(args);
      STIEFEL_RETURN_IF_ERROR(stream->Synchronize());
      const auto size = static_cast<double>(n);
      best = std::max(best, 2 * size * size * size / SecondsSince(begin));
    }
  }
  return best;
}

}  // namespace stiefel
