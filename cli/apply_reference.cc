// `stiefelctl apply --backend=reference`: every step in fp64 with plain loops.
#include <cmath>
#include <cstring>
#include <utility>

#include "cli/apply_backend.h"
#include "common/dtype.h"
#include "kernels/reference/reference_rule.h"

namespace stiefel {
namespace {

Dense ToDense(const FileElements& elements, int64_t rows, int64_t cols) {
  Dense dense(rows, cols);
  const int64_t n = rows * cols;
  if (elements.dtype == "F64") {
    std::memcpy(dense.values.data(), elements.data, n * sizeof(double));
    return dense;
  }
  const DType dtype = elements.dtype == "F32"   ? DType::kFp32
                      : elements.dtype == "F16" ? DType::kFp16
                                                : DType::kBf16;
  std::vector<float> floats(n);
  Convert(elements.data, dtype, floats.data(), DType::kFp32, n);
  std::copy(floats.begin(), floats.end(), dense.values.begin());
  return dense;
}

// The largest of its units'.
std::optional<double> Residual(const std::vector<ReferenceUnit>& units) {
  std::optional<double> largest;
  for (const ReferenceUnit& unit : units) {
    const Dense o = unit.o.rows <= unit.o.cols ? unit.o : Transpose(unit.o);
    Dense gram = Multiply(o, Transpose(o));
    for (int64_t i = 0; i < gram.rows; ++i) gram(i, i) -= 1;
    const double residual = FrobeniusNorm(gram) / std::sqrt(static_cast<double>(gram.rows));
    largest = std::max(largest.value_or(0), residual);
  }
  return largest;
}

class ReferenceApply final : public ApplyBackend {
 public:
  ReferenceApply(const std::vector<ApplyParameter>& parameters, bool with_weights, int threads)
      : threads_(threads),
        with_weights_(with_weights),
        matrices_(MatricesOf(parameters)),
        state_(matrices_.size()) {
    for (const ApplyMatrix& m : matrices_) {
      const ApplyParameter& p = *m.parameter;
      rules_.emplace_back(p.rule, p.rows, p.cols);
      state_[rules_.size() - 1] = rules_.back().state();
    }
    deltas_.resize(matrices_.size());
    weights_.resize(matrices_.size());
  }

  std::string_view dtype() const override { return "F64"; }
  std::string Description() const override { return "fp64, plain loops"; }
  std::string Explain(int64_t) const override {
    return "fp64, plain loops, always the standard form: it is the truth that others are measured "
           "against\n";
  }

  void SetWeights(const std::vector<FileElements>& weights) override {
    for (size_t i = 0; i < weights.size(); ++i) {
      weights_[i] = ToDense(weights[i], matrices_[i].parameter->rows, matrices_[i].parameter->cols);
    }
  }

  absl::Status Step(int64_t step, const std::vector<FileElements>& gradients,
                    std::vector<ApplyFigures>* figures) override {
    figures->assign(matrices_.size(), ApplyFigures());
    // Pairs read each other's state and weights as they were before the step: the new ones are
    // kept aside until all matrices are done.
    std::vector<Dense> new_weights(matrices_.size());
    OnThreads(threads_, static_cast<int64_t>(matrices_.size()),
              [&](int64_t i) { new_weights[i] = StepOf(i, step, gradients[i], &(*figures)[i]); });
    if (with_weights_) weights_ = std::move(new_weights);
    for (size_t i = 0; i < rules_.size(); ++i) state_[i] = rules_[i].state();
    return absl::OkStatus();
  }

  const void* Delta(int64_t matrix) const override { return deltas_[matrix].values.data(); }
  const void* State(int64_t matrix, int64_t buffer) const override {
    return state_[matrix][buffer].values.data();
  }
  const void* Weights(int64_t matrix) const override {
    return with_weights_ ? weights_[matrix].values.data() : nullptr;
  }

 private:
  // The weights after the step, where there are any.
  Dense StepOf(int64_t i, int64_t step, const FileElements& gradient, ApplyFigures* figures) {
    const ApplyMatrix& m = matrices_[i];
    const ApplyParameter& p = *m.parameter;
    const StepArgs args = ArgsOfStep(p, step);
    const Dense g = ToDense(gradient, p.rows, p.cols);
    ReferenceStep result;
    if (m.partner >= 0) {
      const ReferencePair pair{weights_[i], weights_[m.partner], state_[m.partner]};
      result = rules_[i].Step(g, args, &pair);
    } else {
      result = rules_[i].Step(g, args);
    }
    figures->residual = Residual(result.units);
    // As the servers report it: without lr and its ratio between refreshes.
    const double lr = args.lr * (args.kind == StepKind::kRefresh ? 1 : p.rule.off_refresh_lr_ratio);
    if (lr > 0) {
      figures->update_rms =
          FrobeniusNorm(result.delta) / lr / std::sqrt(static_cast<double>(m.elements()));
    }
    for (double v : result.delta.values) figures->nonfinite_update += !std::isfinite(v);
    Dense weights = with_weights_ ? ReferenceRule::Apply(weights_[i], result, args) : Dense();
    deltas_[i] = std::move(result.delta);
    return weights;
  }

  const int threads_;
  const bool with_weights_;
  const std::vector<ApplyMatrix> matrices_;
  std::vector<ReferenceRule> rules_;
  std::vector<std::vector<Dense>> state_;  // before the step that runs, or after the last
  std::vector<Dense> deltas_, weights_;
};

}  // namespace

std::unique_ptr<ApplyBackend> CreateReferenceApply(const std::vector<ApplyParameter>& parameters,
                                                   bool with_weights, int threads) {
  return std::make_unique<ReferenceApply>(parameters, with_weights, threads);
}

}  // namespace stiefel
