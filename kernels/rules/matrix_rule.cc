#include "kernels/rules/matrix_rule.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/status.h"
#include "kernels/polar/newton_schulz.h"
#include "kernels/rules/element_coefficients.h"

namespace stiefel {
namespace {

// One row-wise cycle in this many has its spectral norm measured: a dozen passes over the matrix.
constexpr int64_t kSpectralEvery = 32;

int64_t Aligned(int64_t bytes) { return (bytes + 63) / 64 * 64; }

// What is the same for every family: arguments, state, delivery, figures.
class RuleBase : public MatrixRule {
 public:
  RuleBase(const Rule& rule, int64_t rows, int64_t cols, std::string method)
      : rule_(rule), rows_(rows), cols_(cols), method_(std::move(method)) {
    for (const std::string& name : RuleState(rule)) state_.push_back({name, rows * cols});
  }

  const std::vector<StateSpec>& State() const override { return state_; }
  const std::string& Method() const override { return method_; }

  absl::Status Compute(Stream* stream, const GradientView& gradient, const StepArgs& args,
                       const StepBuffers& buffers, DeviceBuffer* workspace,
                       StepResult* result) override {
    STIEFEL_RETURN_IF_ERROR(CheckArgs(args));
    STIEFEL_RETURN_IF_ERROR(CheckBuffers(buffers, *workspace));
    STIEFEL_ASSIGN_OR_RETURN(const GradientPlan plan, GradientPlan::Make(gradient, rows_, cols_));
    ElementPass pass = Pass(plan, args);
    for (size_t i = 0; i < state_.size(); ++i) {
      pass.state[i] = buffers.state[i];
      pass.new_state[i] = buffers.staged_state.empty() ? nullptr : buffers.staged_state[i];
    }
    pass.delivery = DeliveryOf(args, buffers);
    pass.stats = workspace->as<StepStats>();
    stream->Zero(pass.stats, sizeof(StepStats));
    auto measured = std::make_shared<Measured>();
    Enqueue(stream, pass, args, workspace->as<char>() + Aligned(sizeof(StepStats)), measured.get());
    stream->CopyToHost(&measured->stats, pass.stats, sizeof(StepStats));
    stream->Then([measured, result, elements = static_cast<double>(rows_ * cols_)](
                     const absl::Status&) { Fill(*measured, elements, result); });
    return absl::OkStatus();
  }

  absl::Status Absorb(Stream* stream, const GradientView& gradient, const StepArgs& args,
                      const std::vector<float*>& state) override {
    STIEFEL_RETURN_IF_ERROR(CheckArgs(args));
    if (state.size() != state_.size()) {
      return absl::InvalidArgumentError(absl::StrCat(
          "Absorb: ", state.size(), " state buffers, but the rule has ", state_.size()));
    }
    if (state_.empty()) return absl::OkStatus();
    STIEFEL_ASSIGN_OR_RETURN(const GradientPlan plan, GradientPlan::Make(gradient, rows_, cols_));
    ElementPass pass = Pass(plan, args);
    for (size_t i = 0; i < state.size(); ++i) {
      pass.state[i] = state[i];
      pass.new_state[i] = state[i];
    }
    stream->Run(pass);
    return absl::OkStatus();
  }

 protected:
  // Figures of a step on the host, and what was asked for.
  struct Measured {
    StepStats stats;
    bool residual = false, spectral = false;
    double scale = 1;  // s
  };

  // Enqueues everything between the zeroing of pass.stats and their copy to the host.
  virtual void Enqueue(Stream* stream, ElementPass pass, const StepArgs& args, char* workspace,
                       Measured* measured) = 0;
  // What the update direction is multiplied with besides -lr.
  virtual double StepScale(const StepArgs& args) const = 0;

  const Rule rule_;
  const int64_t rows_, cols_;

 private:
  absl::Status CheckArgs(const StepArgs& args) const {
    const auto bad = [](std::string_view name, double value, std::string_view range) {
      return absl::InvalidArgumentError(absl::StrCat("step argument ", std::string(name), "=",
                                                     value, " is not ", std::string(range)));
    };
    const auto non_negative = [](double v) { return std::isfinite(v) && v >= 0; };
    if (args.step < 1) return bad("step", static_cast<double>(args.step), "at least 1");
    if (args.commits < 0) return bad("commits", static_cast<double>(args.commits), "at least 0");
    if (!non_negative(args.clip_scale))
      return bad("clip_scale", args.clip_scale, "finite and >= 0");
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

  absl::Status CheckBuffers(const StepBuffers& buffers, const DeviceBuffer& workspace) const {
    if (buffers.state.size() != state_.size() ||
        (!buffers.staged_state.empty() && buffers.staged_state.size() != state_.size())) {
      return absl::InvalidArgumentError(
          absl::StrCat(buffers.state.size(), " state and ", buffers.staged_state.size(),
                       " staged buffers, but the rule has ", state_.size()));
    }
    if (workspace.bytes() < WorkspaceBytes()) {
      return absl::InvalidArgumentError(absl::StrCat(
          "workspace of ", workspace.bytes(), " bytes; this matrix needs ", WorkspaceBytes()));
    }
    if (buffers.delta == nullptr && buffers.weights == nullptr) {
      return absl::InvalidArgumentError("neither delta nor weights to write");
    }
    if (buffers.weights == nullptr &&
        (buffers.staged_weights != nullptr || buffers.weights_payload != nullptr)) {
      return absl::InvalidArgumentError("new weights asked for, but no weights given");
    }
    return absl::OkStatus();
  }

  ElementPass Pass(const GradientPlan& plan, const StepArgs& args) const {
    ElementPass pass;
    pass.gradient = &plan;
    pass.clip_scale = static_cast<float>(args.clip_scale);
    pass.coefficients = CoefficientsOf(rule_, args);
    return pass;
  }

  Delivery DeliveryOf(const StepArgs& args, const StepBuffers& buffers) const {
    Delivery delivery;
    delivery.step = static_cast<float>(-args.lr * StepScale(args));
    delivery.delta = buffers.delta;
    delivery.delta_dtype = buffers.delta_dtype;
    delivery.decay = static_cast<float>(1 - args.lr * args.weight_decay);
    delivery.weights = buffers.weights;
    delivery.new_weights = buffers.staged_weights;
    delivery.payload = buffers.weights_payload;
    delivery.payload_dtype = buffers.payload_dtype;
    return delivery;
  }

  static void Fill(const Measured& measured, double elements, StepResult* result) {
    const StepStats& stats = measured.stats;
    *result = StepResult();
    result->sum_squares = stats.gradient_sum_squares;
    result->nonfinite_gradient = stats.nonfinite_gradient;
    result->nonfinite_update = stats.nonfinite_direction + stats.nonfinite_output;
    result->update_rms = measured.scale * std::sqrt(stats.applied_sum_squares / elements);
    result->newton_schulz = measured.residual;
    if (measured.residual) result->residual = stats.residual;
    if (measured.spectral) result->row_wise_spectral = stats.spectral_norm;
  }

  const std::string method_;
  std::vector<StateSpec> state_;
};

class ElementwiseRule final : public RuleBase {
 public:
  ElementwiseRule(const Rule& rule, int64_t rows, int64_t cols)
      : RuleBase(rule, rows, cols, "element-wise fp32") {}

  int64_t WorkspaceBytes() const override { return Aligned(sizeof(StepStats)); }

 private:
  double StepScale(const StepArgs&) const override { return 1; }

  void Enqueue(Stream* stream, ElementPass pass, const StepArgs&, char*, Measured*) override {
    pass.deliver = true;
    stream->Run(pass);
  }
};

// Workspace after the figures: the direction U (fp32), which later is the spare operand of the
// iteration; then the operand X and the square matrices, or the scratch of a row-wise step.
class SpectralRule final : public RuleBase {
 public:
  SpectralRule(const Rule& rule, int64_t rows, int64_t cols, PolarPlan polar)
      : RuleBase(rule, rows, cols, DescribePolar(polar)), polar_(std::move(polar)) {}

  int64_t WorkspaceBytes() const override {
    const int64_t refresh = OperandBytes() + PolarWorkspaceBytes(polar_);
    const int64_t row_wise = RowWiseScratch(rows_, cols_) * static_cast<int64_t>(sizeof(double));
    return Aligned(sizeof(StepStats)) + DirectionBytes() + Aligned(std::max(refresh, row_wise));
  }

 private:
  int64_t DirectionBytes() const { return Aligned(rows_ * cols_ * sizeof(float)); }
  int64_t OperandBytes() const { return Aligned(rows_ * cols_ * DTypeSize(polar_.compute)); }

  double StepScale(const StepArgs& args) const override {
    return ScaleFactor(rule_, rows_, cols_) *
           (args.kind == StepKind::kRefresh ? 1 : rule_.off_refresh_lr_ratio);
  }

  void Enqueue(Stream* stream, ElementPass pass, const StepArgs& args, char* workspace,
               Measured* measured) override {
    measured->scale = ScaleFactor(rule_, rows_, cols_);
    pass.direction = reinterpret_cast<float*>(workspace);
    if (args.kind == StepKind::kRefresh) {
      Refresh(stream, pass, workspace + DirectionBytes(), measured);
    } else {
      RowWise(stream, pass, args, workspace + DirectionBytes(), measured);
    }
  }

  void Refresh(Stream* stream, const ElementPass& pass, char* workspace, Measured* measured) {
    const bool transpose = rows_ > cols_;
    MatrixView x{workspace, polar_.compute, polar_.m, polar_.n, 1};
    MatrixView spare{pass.direction, polar_.compute, polar_.m, polar_.n, 1};
    stream->Run(pass);
    NormalisePass normalise;
    normalise.direction = pass.direction;
    normalise.rows = rows_;
    normalise.cols = cols_;
    normalise.transpose = transpose;
    normalise.eps_add = rule_.eps_mode == EpsMode::kAdd ? rule_.eps : 0;
    normalise.eps_floor = rule_.eps_mode == EpsMode::kClamp ? rule_.eps : 0;
    normalise.x = x;
    normalise.stats = pass.stats;
    stream->Run(normalise);
    const MatrixView o = EnqueuePolar(stream, polar_, x, spare, workspace + OperandBytes());
    stream->Residual(o, pass.stats);
    measured->residual = true;
    stream->Run(DeliverPass{o, rows_, cols_, transpose, pass.delivery, pass.stats});
  }

  void RowWise(Stream* stream, const ElementPass& pass, const StepArgs& args, char* workspace,
               Measured* measured) {
    RowWisePass row_wise;
    row_wise.element = pass;
    row_wise.by_columns = ByColumns();
    row_wise.length = VectorLength(row_wise.by_columns);
    row_wise.measure_spectral = (args.step - 1) / rule_.period % kSpectralEvery == 0;
    row_wise.spectral_max = rule_.row_spectral_max;
    row_wise.scratch = reinterpret_cast<double*>(workspace);
    measured->spectral = row_wise.measure_spectral || row_wise.spectral_max > 0;
    stream->Run(row_wise);
  }

  bool ByColumns() const {
    switch (rule_.row_axis) {
      case RowAxis::kRows:
        return false;
      case RowAxis::kCols:
        return true;
      case RowAxis::kLong:
        return cols_ > rows_;
      case RowAxis::kShort:
        return cols_ < rows_;
    }
    return false;
  }

  // |O_i|_2 of every row (or column) i.
  double VectorLength(bool by_columns) const {
    const double vectors = static_cast<double>(by_columns ? cols_ : rows_);
    const double entries = static_cast<double>(by_columns ? rows_ : cols_);
    switch (rule_.row_scale) {
      case RowScale::kMatchPolarFro:
        return std::sqrt(std::min(vectors, entries) / vectors);
      case RowScale::kUnit:
        return 1;
      case RowScale::kRms:
        return rule_.row_rms * std::sqrt(entries);
    }
    return 1;
  }

  const PolarPlan polar_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<MatrixRule>> MatrixRule::Create(const Rule& rule, int64_t rows,
                                                               int64_t cols, Backend* backend) {
  STIEFEL_RETURN_IF_ERROR(ValidateRule(rule, rows, cols));
  if (rule.family != RuleFamily::kSpectral)
    return std::make_unique<ElementwiseRule>(rule, rows, cols);
  STIEFEL_ASSIGN_OR_RETURN(PolarPlan polar, MakePolarPlan(rule, rows, cols, backend->Info()));
  return std::make_unique<SpectralRule>(rule, rows, cols, std::move(polar));
}

}  // namespace stiefel
