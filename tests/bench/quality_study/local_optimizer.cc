#include "tests/bench/quality_study/local_optimizer.h"

#include <utility>

#include "common/status.h"

namespace stiefel::quality {

absl::StatusOr<LocalOptimizer> LocalOptimizer::Create(const std::vector<Array>& arrays,
                                                      const Rule& rule, const Rule& other,
                                                      Backend* backend) {
  STIEFEL_ASSIGN_OR_RETURN(std::unique_ptr<Stream> stream, backend->CreateStream());
  LocalOptimizer optimizer(std::move(stream));
  int64_t workspace = 1;
  for (const Array& array : arrays) {
    STIEFEL_RETURN_IF_ERROR(optimizer.Add(array, array.spectral ? rule : other, backend));
    workspace = std::max(workspace, optimizer.members_.back().matrix->WorkspaceBytes());
  }
  STIEFEL_ASSIGN_OR_RETURN(optimizer.workspace_, backend->Allocate(workspace));
  return optimizer;
}

absl::Status LocalOptimizer::Add(const Array& array, const Rule& rule, Backend* backend) {
  Member member;
  member.array = array;
  member.rule = rule;
  STIEFEL_ASSIGN_OR_RETURN(member.matrix,
                           MatrixRule::Create(rule, array.rows, array.cols, backend));
  for (const StateBuffer& buffer : member.matrix->State()) {
    const int64_t bytes = buffer.rows * buffer.cols * static_cast<int64_t>(sizeof(float));
    for (std::vector<DeviceBuffer>* side : {&member.state, &member.staged}) {
      STIEFEL_ASSIGN_OR_RETURN(DeviceBuffer memory, backend->Allocate(bytes));
      stream_->Zero(memory.data(), bytes);
      side->push_back(std::move(memory));
    }
  }
  member.delta.resize(array.rows * array.cols);
  members_.push_back(std::move(member));
  return stream_->Synchronize();
}

absl::StatusOr<bool> LocalOptimizer::Step(int64_t step, double lr_factor) {
  for (Member& member : members_) {
    STIEFEL_ASSIGN_OR_RETURN(const bool finite, StepOf(&member, step, lr_factor));
    if (!finite) return false;
  }
  return true;
}

absl::StatusOr<bool> LocalOptimizer::StepOf(Member* member, int64_t step, double lr_factor) {
  const Array& array = member->array;
  GradientView gradient;
  gradient.pieces = {{{0, array.rows, 0, array.cols}, array.gradient->data()}};
  StepArgs args;
  args.step = step;
  args.commits = step - 1;
  args.kind = KindAtStep(member->rule, 0, step);
  args.lr = member->rule.lr * lr_factor;
  args.weight_decay = member->rule.weight_decay;
  StepBuffers buffers;
  for (size_t i = 0; i < member->state.size(); ++i) {
    buffers.state.push_back(member->state[i].as<float>());
    buffers.staged_state.push_back(member->staged[i].as<float>());
  }
  buffers.delta = member->delta.data();
  StepResult result;
  STIEFEL_RETURN_IF_ERROR(
      member->matrix->Compute(stream_.get(), gradient, args, buffers, &workspace_, &result));
  STIEFEL_RETURN_IF_ERROR(stream_->Synchronize());
  if (result.nonfinite_gradient > 0 || result.nonfinite_update > 0) return false;
  std::swap(member->state, member->staged);
  const auto decay = static_cast<float>(1 - args.lr * args.weight_decay);
  std::vector<float>& weights = *array.weights;
  for (size_t i = 0; i < weights.size(); ++i) weights[i] = decay * weights[i] + member->delta[i];
  return true;
}

}  // namespace stiefel::quality
