#include "kernels/rules/rule_base.h"

#include <cmath>
#include <memory>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/status.h"
#include "kernels/rules/element_coefficients.h"
#include "plan/cost.h"

namespace stiefel {
namespace {

static_assert(sizeof(StepStats) <= kFigureBytes);

Delivery DeliveryOf(const StepArgs& args, const StepBuffers& buffers) {
  Delivery delivery;
  delivery.delta = buffers.delta;
  delivery.delta_dtype = buffers.delta_dtype;
  delivery.decay = static_cast<float>(1 - args.lr * args.weight_decay);
  delivery.weights = buffers.weights;
  delivery.new_weights = buffers.staged_weights;
  delivery.payload = buffers.weights_payload;
  delivery.payload_dtype = buffers.payload_dtype;
  return delivery;
}

PlanMatrix WholeMatrix(const Rule& rule, int64_t rows, int64_t cols) {
  PlanMatrix matrix;
  matrix.rows = rows;
  matrix.cols = cols;
  matrix.rule = rule;
  return matrix;
}

void FillResult(const StepStats& stats, const Measured& measured, double elements,
                StepResult* result) {
  *result = StepResult();
  result->sum_squares = stats.gradient_sum_squares;
  result->nonfinite_gradient = stats.nonfinite_gradient;
  result->nonfinite_update = stats.direction.nonfinite + stats.nonfinite_output;
  result->update_rms = std::sqrt(stats.applied_sum_squares / elements);
  result->newton_schulz = measured.polar;
  if (measured.polar) result->residual = stats.residual;
  if (measured.spectral) result->row_wise_spectral = stats.spectral_norm;
}

}  // namespace

void SetScale(RuleStep* step, double s, double ratio) {
  step->pass.delivery.step = static_cast<float>(-step->args.lr * (s * ratio));
  step->pass.delivery.scale = s;
}

RuleParts::RuleParts(const PlanMatrix& matrix, std::string method)
    : rule_(matrix.rule),
      rows_(matrix.rows),
      cols_(matrix.cols),
      method_(std::move(method)),
      state_(RuleState(matrix.rule, matrix.rows, matrix.cols)),
      refresh_cost_(StepCost(matrix, StepKind::kRefresh).Units()),
      off_refresh_cost_(StepCost(matrix, StepKind::kOffRefresh).Units()) {}

double RuleParts::CostOf(StepKind kind) const {
  return kind == StepKind::kRefresh ? refresh_cost_ : off_refresh_cost_;
}

int RuleParts::StateIndex(std::string_view name) const {
  for (size_t i = 0; i < state_.size(); ++i) {
    if (state_[i].name == name) return static_cast<int>(i);
  }
  return -1;
}

RuleStep RuleParts::Prepare(const GradientPlan& plan, const StepArgs& args,
                            const StepBuffers& buffers, DeviceBuffer* workspace) const {
  RuleStep step;
  step.pass = Pass(plan, args);
  for (size_t i = 0; i < state_.size(); ++i) {
    step.state[i] = buffers.state[i];
    step.staged[i] = buffers.staged_state[i];
    if (!state_[i].elementwise) continue;
    step.pass.state[i] = step.state[i];
    step.pass.new_state[i] = step.staged[i];
  }
  step.pass.delivery = DeliveryOf(args, buffers);
  step.pass.stats = workspace->as<StepStats>();
  step.args = args;
  step.buffers = &buffers;
  step.workspace = workspace->as<char>() + kFigureBytes;
  return step;
}

void RuleParts::Report(Stream* stream, const RuleStep& step, const Measured& measured,
                       StepResult* result) const {
  auto stats = std::make_shared<StepStats>();
  stream->CopyToHost(stats.get(), step.pass.stats, sizeof(StepStats));
  stream->Then([stats, measured, result, elements = static_cast<double>(rows_ * cols_)](
                   const absl::Status&) { FillResult(*stats, measured, elements, result); });
}

absl::Status RuleParts::AbsorbBy(const EnqueueStep& enqueue, const GradientView& gradient,
                                 const StepArgs& args, const std::vector<float*>& state) const {
  STIEFEL_RETURN_IF_ERROR(CheckArgs(args));
  if (state.size() != state_.size()) {
    return absl::InvalidArgumentError(
        absl::StrCat("Absorb: ", state.size(), " state buffers, but the rule has ", state_.size()));
  }
  if (state_.empty()) return absl::OkStatus();
  STIEFEL_ASSIGN_OR_RETURN(const GradientPlan plan, GradientPlan::Make(gradient, rows_, cols_));
  RuleStep step;
  step.pass = Pass(plan, args);
  step.args = args;
  for (size_t i = 0; i < state.size(); ++i) {
    step.state[i] = state[i];
    step.staged[i] = state[i];
    if (!state_[i].elementwise) continue;
    step.pass.state[i] = state[i];
    step.pass.new_state[i] = state[i];
  }
  enqueue(&step);
  return absl::OkStatus();
}

RuleBase::RuleBase(const Rule& rule, int64_t rows, int64_t cols, std::string method)
    : RuleParts(WholeMatrix(rule, rows, cols), std::move(method)) {}

int64_t RuleBase::WorkspaceBytes() const { return kFigureBytes + StepWorkspaceBytes(); }

absl::Status RuleBase::Compute(Stream* stream, const GradientView& gradient, const StepArgs& args,
                               const StepBuffers& buffers, DeviceBuffer* workspace,
                               StepResult* result) {
  STIEFEL_RETURN_IF_ERROR(CheckArgs(args));
  STIEFEL_RETURN_IF_ERROR(CheckBuffers(buffers, *workspace, WorkspaceBytes()));
  STIEFEL_ASSIGN_OR_RETURN(const GradientPlan plan, GradientPlan::Make(gradient, rows_, cols_));
  RuleStep step = Prepare(plan, args, buffers, workspace);
  stream->Zero(step.pass.stats, sizeof(StepStats));
  const Measured measured = Enqueue(stream, &step);
  Report(stream, step, measured, result);
  return absl::OkStatus();
}

absl::Status RuleBase::Absorb(Stream* stream, const GradientView& gradient, const StepArgs& args,
                              const std::vector<float*>& state) {
  return AbsorbBy([this, stream](RuleStep* step) { EnqueueAbsorb(stream, step); }, gradient, args,
                  state);
}

void RuleBase::EnqueueAbsorb(Stream* stream, RuleStep* step) { stream->Run(step->pass); }

absl::Status RuleParts::CheckArgs(const StepArgs& args) const {
  const auto bad = [](std::string_view name, double value, std::string_view range) {
    return absl::InvalidArgumentError(absl::StrCat("step argument ", std::string(name), "=", value,
                                                   " is not ", std::string(range)));
  };
  const auto non_negative = [](double v) { return std::isfinite(v) && v >= 0; };
  if (args.step < 1) return bad("step", static_cast<double>(args.step), "at least 1");
  if (args.commits < 0) return bad("commits", static_cast<double>(args.commits), "at least 0");
  if (!non_negative(args.clip_scale)) return bad("clip_scale", args.clip_scale, "finite and >= 0");
  if (!non_negative(args.lr)) return bad("lr", args.lr, "finite and >= 0");
  if (!non_negative(args.weight_decay))
    return bad("weight_decay", args.weight_decay, "finite and >= 0");
  if (args.beta.has_value() && !(*args.beta >= 0 && *args.beta < 1))
    return bad("beta", *args.beta, "in [0, 1)");
  if (args.beta.value_or(0) > 0 && state_.empty()) {
    return absl::InvalidArgumentError(
        absl::StrCat("step argument beta=", *args.beta, ": ", rule_.preset,
                     " was registered with beta=0 and keeps no momentum"));
  }
  return absl::OkStatus();
}

absl::Status RuleParts::CheckBuffers(const StepBuffers& buffers, const DeviceBuffer& workspace,
                                     int64_t workspace_bytes) const {
  if (buffers.state.size() != state_.size() || buffers.staged_state.size() != state_.size()) {
    return absl::InvalidArgumentError(
        absl::StrCat(buffers.state.size(), " state and ", buffers.staged_state.size(),
                     " staged buffers, but the rule has ", state_.size()));
  }
  for (size_t i = 0; i < state_.size(); ++i) {
    if (!state_[i].elementwise && buffers.staged_state[i] == nullptr) {
      return absl::InvalidArgumentError(
          absl::StrCat("state ", state_[i].name, " has no staged buffer, which it always needs"));
    }
  }
  if (workspace.bytes() < workspace_bytes) {
    return absl::InvalidArgumentError(absl::StrCat("workspace of ", workspace.bytes(),
                                                   " bytes; this matrix needs ", workspace_bytes));
  }
  if (buffers.delta == nullptr && buffers.weights == nullptr) {
    return absl::InvalidArgumentError("neither delta nor weights to write");
  }
  if (buffers.weights == nullptr &&
      (buffers.staged_weights != nullptr || buffers.weights_payload != nullptr)) {
    return absl::InvalidArgumentError("new weights asked for, but no weights given");
  }
  if (NeedsWeights(rule_) && (buffers.weights == nullptr || buffers.partner_weights == nullptr ||
                              buffers.partner_state.size() != state_.size())) {
    return absl::InvalidArgumentError(
        absl::StrCat(rule_.preset,
                     " reads the weights of both factors, which are not given: it needs WEIGHTS "
                     "mode and both factors on one server"));
  }
  return absl::OkStatus();
}

ElementPass RuleParts::Pass(const GradientPlan& plan, const StepArgs& args) const {
  ElementPass pass;
  pass.gradient = &plan;
  pass.rows = rows_;
  pass.clip_scale = static_cast<float>(args.clip_scale);
  pass.coefficients = CoefficientsOf(rule_, args);
  return pass;
}

}  // namespace stiefel
