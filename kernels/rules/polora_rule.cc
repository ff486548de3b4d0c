#include "kernels/rules/polora_rule.h"

#include <algorithm>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/status.h"
#include "kernels/rules/rule_base.h"
#include "kernels/rules/unit.h"
#include "kernels/spectral_passes.h"

namespace stiefel {
namespace {

int64_t Floats(int64_t count) { return Aligned(count * static_cast<int64_t>(sizeof(float))); }

// Where everything is during one step.
struct Workspace {
  StepStats* gradient_stats;  // of the second reading of the gradient; nobody asks
  DirectionStats* figures;    // of what is orthogonalised
  PoloraNorms* norms;
  float* root;   // r x r: C^-1/2 without its scale
  void* gram;    // scratch
  float* u;      // the look-ahead, rows x cols; later r x width
  float* g;      // the gradient, rows x cols
  float* wide;   // the partner, r x its width; later r x width, with a second one after it
  float* wide2;  // the second
  void* polar;
};

MatrixView View(float* data, int64_t rows, int64_t cols) {
  return {data, DType::kFp32, rows, cols, 1};
}

class PoloraRule final : public RuleBase {
 public:
  PoloraRule(const Rule& rule, int64_t rows, int64_t cols, bool transposed, int64_t partner_width,
             PolarUnit unit)
      : RuleBase(rule, rows, cols, absl::StrCat("polora, ", DescribePolar(unit.plan()))),
        transposed_(transposed),
        rank_(transposed ? cols : rows),
        width_(transposed ? rows : cols),
        partner_width_(partner_width),
        unit_(std::move(unit)),
        variance_(StateIndex("factor_variance")) {}

  std::string Explain() const override {
    return absl::StrCat("factor ", transposed_ ? "b" : "a", " of rank ", rank_, ", ", width_,
                        " wide, its partner ", partner_width_, " wide; metric and norms in fp64\n",
                        ExplainPolar(unit_.plan()));
  }

 private:
  int64_t StepWorkspaceBytes() const override {
    return Aligned(sizeof(StepStats)) + Aligned(sizeof(DirectionStats)) +
           Aligned(sizeof(PoloraNorms)) + Floats(rank_ * rank_) + GramScratch(rank_) +
           2 * Floats(rows_ * cols_) + WideBytes() + Aligned(unit_.WorkspaceBytes());
  }

  Measured Enqueue(Stream* stream, RuleStep* step) override {
    const Workspace w = Carve(step->workspace);
    SetScale(step, 1);
    step->pass.direction = w.u;
    stream->Run(step->pass);
    ReadGradient(stream, *step, w);
    MeasureFactors(stream, *step, w);
    FormStep(stream, *step, w);
    ApplyRoot(stream, Wide(stream, w.g, transposed_, width_, w.wide2), w, w.u);

    PoloraPass finish;
    finish.d = w.wide;
    finish.h = w.u;
    finish.rows = rank_;
    finish.cols = width_;
    finish.norms = w.norms;
    finish.product_scale = rule_.product_scale;
    finish.variance = step->state[variance_];
    finish.new_variance = step->staged[variance_];
    finish.keep = rule_.beta2;
    stream->Run(finish);

    DeliverPass deliver;
    deliver.x = View(w.wide, rank_, width_);
    deliver.rows = rows_;
    deliver.cols = cols_;
    deliver.transposed = transposed_;
    deliver.stride = cols_;
    deliver.delivery = step->pass.delivery;
    deliver.stats = step->pass.stats;
    stream->Run(deliver);
    Measured measured;
    measured.polar = true;
    return measured;
  }

  int64_t WideBytes() const {
    return std::max(Floats(rank_ * partner_width_), 2 * Floats(rank_ * width_));
  }

  Workspace Carve(char* memory) const {
    const auto take = [&memory](int64_t bytes) {
      return std::exchange(memory, memory + Aligned(bytes));
    };
    Workspace w;
    w.gradient_stats = reinterpret_cast<StepStats*>(take(sizeof(StepStats)));
    w.figures = reinterpret_cast<DirectionStats*>(take(sizeof(DirectionStats)));
    w.norms = reinterpret_cast<PoloraNorms*>(take(sizeof(PoloraNorms)));
    w.root = reinterpret_cast<float*>(take(Floats(rank_ * rank_)));
    w.gram = take(GramScratch(rank_));
    w.u = reinterpret_cast<float*>(take(Floats(rows_ * cols_)));
    w.g = reinterpret_cast<float*>(take(Floats(rows_ * cols_)));
    char* const wide = take(WideBytes());
    w.wide = reinterpret_cast<float*>(wide);
    w.wide2 = reinterpret_cast<float*>(wide + Floats(rank_ * width_));
    w.polar = take(unit_.WorkspaceBytes());
    return w;
  }

  // G itself, which the element pass takes into M and Mh only.
  void ReadGradient(Stream* stream, const RuleStep& step, const Workspace& w) const {
    ElementPass pass = step.pass;
    pass.coefficients = ElementCoefficients();
    std::fill_n(pass.state, kMaxStates, nullptr);
    std::fill_n(pass.new_state, kMaxStates, nullptr);
    pass.direction = w.g;
    pass.stats = w.gradient_stats;
    stream->Run(pass);
  }

  // |A|_2 and |B|_2; C and its root, from the partner.
  void MeasureFactors(Stream* stream, const RuleStep& step, const Workspace& w) const {
    const StepBuffers& buffers = *step.buffers;
    MeasureNorm(stream, Wide(stream, buffers.weights, transposed_, width_, w.wide), width_, w,
                &w.norms->own);
    MeasureNorm(stream, Wide(stream, buffers.partner_weights, !transposed_, partner_width_, w.wide),
                partner_width_, w, &w.norms->partner);
    MetricPass metric =
        Transposition(buffers.partner_weights, !transposed_, partner_width_, w.wide);
    metric.variance = buffers.partner_state[variance_];
    metric.power = 0.5;
    metric.floor = rule_.delta;
    stream->Run(metric);
    MeasureNorm(stream, w.wide, partner_width_, w, &w.norms->partner_metric, w.root);
  }

  // D, into w.wide, and its norm.
  void FormStep(Stream* stream, const RuleStep& step, const Workspace& w) const {
    MetricPass metric = Transposition(w.u, transposed_, width_, w.wide);
    metric.variance = step.state[variance_];
    metric.power = -0.5;
    metric.floor = rule_.delta;
    stream->Run(metric);
    ApplyRoot(stream, w.wide, w, w.wide2);

    MeasurePass measure;
    measure.u = w.wide2;
    measure.rows = rank_;
    measure.cols = measure.stride = width_;
    measure.figures = w.figures;
    stream->Run(measure);
    const UnitUpdate sign = unit_.Enqueue(stream, w.wide2, width_, w.figures, w.wide, w.wide2,
                                          w.polar, step.pass.stats);

    metric.x = static_cast<const float*>(sign.o.data);
    metric.rows = sign.o.rows;
    metric.cols = sign.o.cols;
    metric.transpose = sign.transposed;
    metric.out = w.u;
    stream->Run(metric);
    ApplyRoot(stream, w.u, w, w.wide);
    MeasureNorm(stream, w.wide, width_, w, &w.norms->step);
  }

  // Of x, which is width x r where `transpose` and r x width otherwise.
  MetricPass Transposition(const float* x, bool transpose, int64_t width, float* out) const {
    MetricPass pass;
    pass.x = x;
    pass.rows = transpose ? width : rank_;
    pass.cols = transpose ? rank_ : width;
    pass.transpose = transpose;
    pass.out = out;
    return pass;
  }

  // x as r x width: x itself, or its transpose in `out`.
  const float* Wide(Stream* stream, const float* x, bool transpose, int64_t width,
                    float* out) const {
    if (!transpose) return x;
    stream->Run(Transposition(x, true, width, out));
    return out;
  }

  void MeasureNorm(Stream* stream, const float* x, int64_t width, const Workspace& w,
                   double* squared, float* inverse_root = nullptr) const {
    GramPass pass;
    pass.x = x;
    pass.rows = rank_;
    pass.cols = width;
    pass.largest = squared;
    pass.inverse_root = inverse_root;
    pass.damping = rule_.delta;
    pass.scratch = w.gram;
    stream->Run(pass);
  }

  // out = C^-1/2 x
  void ApplyRoot(Stream* stream, const float* x, const Workspace& w, float* out) const {
    GemmArgs args;
    args.a = View(w.root, rank_, rank_);
    args.b = View(const_cast<float*>(x), rank_, width_);
    args.c = View(out, rank_, width_);
    stream->Gemm(args);
  }

  const bool transposed_;  // this is B
  const int64_t rank_, width_, partner_width_;
  const PolarUnit unit_;
  const int variance_;  // place in the state
};

}  // namespace

absl::StatusOr<std::unique_ptr<MatrixRule>> MakePoloraRule(const Rule& rule, int64_t rows,
                                                           int64_t cols,
                                                           std::pair<int64_t, int64_t> partner,
                                                           Backend* backend) {
  STIEFEL_ASSIGN_OR_RETURN(const PoloraFactor factor, FactorOf(rule, rows, cols));
  const bool transposed = factor == PoloraFactor::kB;
  const int64_t rank = transposed ? cols : rows, width = transposed ? rows : cols;
  const int64_t partner_rank = transposed ? partner.first : partner.second;
  const int64_t partner_width = transposed ? partner.second : partner.first;
  if (partner_rank != rank || partner_width < 1) {
    return absl::InvalidArgumentError(absl::StrCat(
        "polora: factor ", transposed ? "b" : "a", " is ", rows, " x ", cols, ", of rank ", rank,
        "; the other factor, ", partner.first, " x ", partner.second, ", must be ",
        transposed ? absl::StrCat(rank, " x d_in") : absl::StrCat("d_out x ", rank)));
  }
  Rule fp32 = rule;
  fp32.compute = ComputeType::kFp32;
  STIEFEL_ASSIGN_OR_RETURN(PolarUnit unit, PolarUnit::Make(fp32, rank, width, backend->Info()));
  return std::make_unique<PoloraRule>(rule, rows, cols, transposed, partner_width, std::move(unit));
}

}  // namespace stiefel
