#include "kernels/rules/sharded_rule.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/status.h"
#include "kernels/polar/newton_schulz.h"
#include "kernels/rules/rule_base.h"
#include "kernels/rules/stages.h"
#include "plan/matrix.h"
#include "plan/shards.h"

namespace stiefel {
namespace {

constexpr auto kDouble = static_cast<int64_t>(sizeof(double));

// What a shard tells the others after stage 0, at the beginning of its workspace.
struct ShardFigures {
  StepStats stats;
  int64_t present;  // whether it has a gradient
};
static_assert(sizeof(ShardFigures) <= kFigureBytes);

// Where everything is during one step.
struct Workspace {
  ShardFigures* figures;    // of this shard
  ShardFigures* gathered;   // of all
  DirectionStats* total;    // of the whole direction
  double *sums, *sums_out;  // of a row-wise step across shards: m vectors, and shards present
  char *a, *b;              // the direction, and later the spare of X; X, or scratch
  char* gram;               // the sum
  char* polar;
};

MatrixView Fp32(void* data, int64_t rows, int64_t cols) {
  return {data, DType::kFp32, rows, cols, 1};
}

class SpectralShardRule final : public ShardedRule, private RuleParts {
 public:
  SpectralShardRule(const PlanMatrix& matrix, const ShardOf& shard, PolarPlan plan)
      : RuleParts(matrix, absl::StrCat("sharded ", DescribePolar(plan))),
        full_lr_rule_(WithFullLr(matrix.rule)),
        whole_rows_(shard.rows),
        whole_cols_(shard.cols),
        shard_(shard.shard),
        shards_(static_cast<int64_t>(shard.cuts.size()) + 1),
        cuts_rows_(CutsRows(shard.rows, shard.cols)),
        by_columns_(NormalisesColumns(matrix.rule, shard.rows, shard.cols)),
        plan_(std::move(plan)) {}

  const std::vector<StateBuffer>& State() const override { return state_; }
  const std::string& Method() const override { return method_; }
  double CostUnits(StepKind kind) const override { return CostOf(kind); }
  int64_t WorkspaceBytes() const override;
  int64_t RefreshSums() const override { return PolarGrams(plan_); }
  absl::StatusOr<std::unique_ptr<ShardedStep>> Begin(const GradientView& gradient,
                                                     const StepArgs& args,
                                                     const StepBuffers& buffers,
                                                     DeviceBuffer* workspace,
                                                     StepResult* result) override;
  absl::Status Absorb(Stream* stream, const GradientView& gradient, const StepArgs& args,
                      const std::vector<float*>& state) override {
    return AbsorbBy([stream](RuleStep* step) { stream->Run(step->pass); }, gradient, args, state);
  }

 private:
  friend class SpectralShardStep;

  // Whether the vectors of a row-wise step have parts in several shards.
  bool VectorsCross() const { return by_columns_ == cuts_rows_; }
  int64_t SquareBytes() const { return Aligned(plan_.m * plan_.m * kFloat); }
  int64_t OperandBytes() const { return Aligned(rows_ * cols_ * kFloat); }
  int64_t SumsBytes() const { return VectorsCross() ? Aligned((plan_.m + 1) * kDouble) : 0; }
  int64_t ScratchBytes() const { return by_columns_ ? Aligned(cols_ * kDouble) : 0; }
  Workspace Carve(char* memory) const;
  VectorPass Vectors(float* u, const Workspace& w) const;

  static constexpr auto kFloat = static_cast<int64_t>(sizeof(float));

  const Rule full_lr_rule_;
  const int64_t whole_rows_, whole_cols_;
  const int32_t shard_;
  const int64_t shards_;
  const bool cuts_rows_;   // then X is the shard transposed
  const bool by_columns_;  // what a row-wise step normalises
  const PolarPlan plan_;
};

class SpectralShardStep final : public ShardedStep {
 public:
  SpectralShardStep(const SpectralShardRule& rule, const GradientView& gradient, StepResult* result)
      : rule_(rule),
        gradient_(gradient),
        present_(gradient.pieces.empty() ? 0 : 1),
        result_(result) {}

  absl::Status Prepare(const StepArgs& args, const StepBuffers& buffers, DeviceBuffer* workspace);
  absl::Status RunStage(Stream* stream) override;
  const std::optional<CollectivePart>& next() const override { return next_; }
  int32_t index() const override { return index_; }
  Outcome outcome() const override { return outcome_; }

 private:
  bool Refreshes() const { return step_.args.kind == StepKind::kRefresh; }
  void First(Stream* stream);
  absl::Status JudgeFigures(Stream* stream);
  absl::Status JudgeSums(Stream* stream);
  void Judge(bool finite, bool present);
  void Normalise(Stream* stream);
  void RowWise(Stream* stream);
  void Iterate(Stream* stream);
  void SumGram(Stream* stream);
  void Deliver(Stream* stream, const MatrixView& o, bool transposed);
  void Finish(Stream* stream, const Measured& measured);
  void Exchange(CollectivePart::Kind kind, int64_t count, const void* in, void* out);

  const SpectralShardRule& rule_;
  const GradientView gradient_;
  const int64_t present_;
  StepResult* const result_;
  GradientPlan plan_;  // of gradient_
  RuleStep step_;
  Workspace w_ = {};
  std::optional<PolarIterations> iterations_;
  // What a stage's copies read and write.
  double present_sum_ = 0;
  DirectionStats total_ = {};

  bool begun_ = false;
  int32_t index_ = -1;
  std::optional<CollectivePart> next_;
  Outcome outcome_ = Outcome::kComputed;
};

int64_t SpectralShardRule::WorkspaceBytes() const {
  const int64_t refresh = OperandBytes() + SquareBytes() + PolarWorkspaceBytes(plan_);
  return kFigureBytes + Aligned(shards_ * static_cast<int64_t>(sizeof(ShardFigures))) +
         Aligned(sizeof(DirectionStats)) + 2 * SumsBytes() + OperandBytes() +
         std::max(refresh, ScratchBytes());
}

Workspace SpectralShardRule::Carve(char* memory) const {
  Workspace w;
  const auto take = [&memory](int64_t bytes) { return std::exchange(memory, memory + bytes); };
  w.figures = reinterpret_cast<ShardFigures*>(take(kFigureBytes));
  w.gathered = reinterpret_cast<ShardFigures*>(
      take(Aligned(shards_ * static_cast<int64_t>(sizeof(ShardFigures)))));
  w.total = reinterpret_cast<DirectionStats*>(take(Aligned(sizeof(DirectionStats))));
  w.sums = reinterpret_cast<double*>(take(SumsBytes()));
  w.sums_out = reinterpret_cast<double*>(take(SumsBytes()));
  w.a = take(OperandBytes());
  w.b = take(OperandBytes());
  w.gram = take(SquareBytes());
  w.polar = memory;
  return w;
}

VectorPass SpectralShardRule::Vectors(float* u, const Workspace& w) const {
  VectorPass vectors;
  vectors.u = u;
  vectors.rows = rows_;
  vectors.cols = cols_;
  vectors.by_columns = by_columns_;
  vectors.length = VectorLength(rule_, whole_rows_, whole_cols_, by_columns_);
  vectors.scratch = reinterpret_cast<double*>(w.b);
  return vectors;
}

absl::StatusOr<std::unique_ptr<ShardedStep>> SpectralShardRule::Begin(const GradientView& gradient,
                                                                      const StepArgs& args,
                                                                      const StepBuffers& buffers,
                                                                      DeviceBuffer* workspace,
                                                                      StepResult* result) {
  STIEFEL_RETURN_IF_ERROR(CheckArgs(args));
  STIEFEL_RETURN_IF_ERROR(CheckBuffers(buffers, *workspace, WorkspaceBytes()));
  auto step = std::make_unique<SpectralShardStep>(*this, gradient, result);
  STIEFEL_RETURN_IF_ERROR(step->Prepare(args, buffers, workspace));
  return step;
}

absl::Status SpectralShardStep::Prepare(const StepArgs& args, const StepBuffers& buffers,
                                        DeviceBuffer* workspace) {
  STIEFEL_ASSIGN_OR_RETURN(plan_, GradientPlan::Make(gradient_, rule_.rows_, rule_.cols_));
  step_ = rule_.Prepare(plan_, args, buffers, workspace);
  step_.buffers = nullptr;  // valid during the call only
  w_ = rule_.Carve(workspace->as<char>());
  const double s =
      StepScale(rule_.full_lr_rule_, rule_.whole_rows_, rule_.whole_cols_, args.step, args.kind);
  SetScale(&step_, s, Refreshes() ? 1 : rule_.rule_.off_refresh_lr_ratio);
  return absl::OkStatus();
}

absl::Status SpectralShardStep::RunStage(Stream* stream) {
  next_.reset();
  if (!begun_) {
    begun_ = true;
    First(stream);
  } else if (iterations_.has_value()) {
    Iterate(stream);
  } else {
    STIEFEL_RETURN_IF_ERROR(Refreshes() ? JudgeFigures(stream) : JudgeSums(stream));
    if (outcome_ != Outcome::kComputed) {
      Finish(stream, {});
    } else if (Refreshes()) {
      Normalise(stream);
    } else {
      RowWise(stream);
    }
  }
  return absl::OkStatus();
}

void SpectralShardStep::First(Stream* stream) {
  stream->Zero(w_.figures, sizeof(ShardFigures));
  auto* const u = reinterpret_cast<float*>(w_.a);
  if (!Refreshes() && !rule_.VectorsCross()) {
    if (present_ == 0) {
      outcome_ = Outcome::kAbsent;
    } else {
      stream->Run(RowWisePass{step_.pass, rule_.Vectors(u, w_)});
    }
    return Finish(stream, {});
  }
  step_.pass.direction = u;
  stream->Run(step_.pass);
  if (Refreshes()) {
    stream->CopyToDevice(&w_.figures->present, &present_, sizeof(present_));
    return Exchange(CollectivePart::Kind::kGather, sizeof(ShardFigures), w_.figures, w_.gathered);
  }
  const int64_t m = rule_.plan_.m;
  stream->Run(VectorSumsPass{u, rule_.rows_, rule_.cols_, rule_.by_columns_, w_.sums});
  present_sum_ = static_cast<double>(present_);
  stream->CopyToDevice(w_.sums + m, &present_sum_, sizeof(present_sum_));
  Exchange(CollectivePart::Kind::kSumFp64, m + 1, w_.sums, w_.sums_out);
}

void SpectralShardStep::Judge(bool finite, bool present) {
  if (!finite) {
    outcome_ = Outcome::kNonFinite;
  } else if (!present) {
    outcome_ = Outcome::kAbsent;
  }
}

absl::Status SpectralShardStep::JudgeFigures(Stream* stream) {
  std::vector<ShardFigures> all(rule_.shards_);
  stream->CopyToHost(all.data(), w_.gathered,
                     static_cast<int64_t>(all.size() * sizeof(ShardFigures)));
  STIEFEL_RETURN_IF_ERROR(stream->Synchronize());
  int64_t present = 0;
  for (const ShardFigures& shard : all) {
    const DirectionStats& direction = shard.stats.direction;
    total_.sum_squares += direction.sum_squares;
    total_.max_abs = std::max(total_.max_abs, direction.max_abs);
    total_.nonfinite += direction.nonfinite + shard.stats.nonfinite_gradient;
    present += shard.present;
  }
  Judge(total_.nonfinite == 0, present > 0);
  return absl::OkStatus();
}

// A sum is not finite exactly where an element is not.
absl::Status SpectralShardStep::JudgeSums(Stream* stream) {
  std::vector<double> sums(rule_.plan_.m + 1);
  stream->CopyToHost(sums.data(), w_.sums_out, static_cast<int64_t>(sums.size()) * kDouble);
  STIEFEL_RETURN_IF_ERROR(stream->Synchronize());
  Judge(std::all_of(sums.begin(), sums.end(), [](double v) { return std::isfinite(v); }),
        sums.back() > 0);
  return absl::OkStatus();
}

void SpectralShardStep::Normalise(Stream* stream) {
  const int64_t m = rule_.plan_.m, n = rule_.plan_.n;
  stream->CopyToDevice(w_.total, &total_, sizeof(total_));
  NormalisePass normalise = NormaliseBy(rule_.rule_);
  normalise.u = reinterpret_cast<const float*>(w_.a);
  normalise.rows = rule_.rows_;
  normalise.cols = normalise.stride = rule_.cols_;
  normalise.transpose = rule_.cuts_rows_;
  normalise.x = Fp32(w_.b, m, n);
  normalise.figures = w_.total;
  stream->Run(normalise);
  iterations_.emplace(rule_.plan_, normalise.x, Fp32(w_.a, m, n), w_.polar);
  SumGram(stream);
}

void SpectralShardStep::SumGram(Stream* stream) {
  iterations_->EnqueueGram(stream);
  const int64_t m = rule_.plan_.m;
  Exchange(CollectivePart::Kind::kSumFp32, m * m, iterations_->gram().data, w_.gram);
}

void SpectralShardStep::Iterate(Stream* stream) {
  const int64_t m = rule_.plan_.m;
  if (!iterations_->Advance(stream, Fp32(w_.gram, m, m))) return SumGram(stream);
  iterations_->EnqueueResidual(stream, step_.pass.stats);
  Deliver(stream, iterations_->x(), rule_.cuts_rows_);
  Measured measured;
  measured.polar = true;
  Finish(stream, measured);
}

void SpectralShardStep::RowWise(Stream* stream) {
  VectorPass vectors = rule_.Vectors(step_.pass.direction, w_);
  vectors.sums = w_.sums_out;
  stream->Run(vectors);
  Deliver(stream, Fp32(vectors.u, rule_.rows_, rule_.cols_), /*transposed=*/false);
  Finish(stream, {});
}

void SpectralShardStep::Deliver(Stream* stream, const MatrixView& o, bool transposed) {
  DeliverPass deliver;
  deliver.x = o;
  deliver.transposed = transposed;
  deliver.rows = rule_.rows_;
  deliver.cols = deliver.stride = rule_.cols_;
  deliver.delivery = step_.pass.delivery;
  deliver.stats = step_.pass.stats;
  stream->Run(deliver);
}

void SpectralShardStep::Finish(Stream* stream, const Measured& measured) {
  rule_.Report(stream, step_, measured, result_);
  stream->Then([this](const absl::Status&) {
    if (result_->nonfinite_gradient + result_->nonfinite_update > 0) outcome_ = Outcome::kNonFinite;
  });
}

void SpectralShardStep::Exchange(CollectivePart::Kind kind, int64_t count, const void* in,
                                 void* out) {
  ++index_;
  next_ = CollectivePart{kind, rule_.shard_, count, in, out};
}

}  // namespace

absl::StatusOr<std::unique_ptr<ShardedRule>> ShardedRule::Create(const Rule& rule,
                                                                 const ShardOf& shard, Backend*) {
  STIEFEL_RETURN_IF_ERROR(ValidateRule(rule, shard.rows, shard.cols));
  STIEFEL_RETURN_IF_ERROR(ValidateSharding(rule, shard.rows, shard.cols));
  if (rule.family != RuleFamily::kSpectral) {
    return absl::InvalidArgumentError(
        absl::StrCat(rule.preset, " is element-wise: a shard of it is a matrix, for MatrixRule"));
  }
  STIEFEL_RETURN_IF_ERROR(ValidateCuts(shard.rows, shard.cols, shard.cuts));
  const std::vector<Rect> rects = ShardRects(shard.rows, shard.cols, shard.cuts);
  if (shard.shard < 0 || shard.shard >= static_cast<int64_t>(rects.size())) {
    return absl::InvalidArgumentError(absl::StrCat("shard ", shard.shard, " of a ", shard.rows,
                                                   " x ", shard.cols, " matrix in ", rects.size(),
                                                   " shards"));
  }
  const auto length = [&shard](const Rect& rect) {
    return CutsRows(shard.rows, shard.cols) ? rect.rows() : rect.cols();
  };
  int64_t longest = 0;
  for (const Rect& rect : rects) longest = std::max(longest, length(rect));
  PlanMatrix whole;
  whole.rule = rule;
  whole.rows = shard.rows;
  whole.cols = shard.cols;
  const Rect& rect = rects[shard.shard];
  return std::make_unique<SpectralShardRule>(
      ShardOfMatrix(whole, rect, static_cast<int64_t>(rects.size())), shard,
      MakeShardPolarPlan(rule, shard.rows, shard.cols, length(rect), longest));
}

}  // namespace stiefel
