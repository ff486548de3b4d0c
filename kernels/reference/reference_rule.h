// Every rule in fp64 with plain loops, in the order of docs/RULES.md: what the backends must agree
// with.
#ifndef STIEFEL_KERNELS_REFERENCE_REFERENCE_RULE_H_
#define STIEFEL_KERNELS_REFERENCE_REFERENCE_RULE_H_

#include <cstdint>
#include <vector>

#include "kernels/gradient.h"
#include "kernels/reference/dense.h"
#include "kernels/rules/matrix_rule.h"
#include "plan/rule.h"

namespace stiefel {

// The gradient of a view. REQUIRES: a valid view; data readable by the host.
Dense ReferenceGradient(const GradientView& view, int64_t rows, int64_t cols);

// u / |u|_F, with the rule's eps, through its Newton-Schulz iterations in the standard form.
Dense ReferencePolar(const Rule& rule, const Dense& u);

// The same in the Gram form with the rule's restarts for fp32.
Dense ReferenceGramPolar(const Rule& rule, const Dense& u);

struct ReferenceStep {
  Dense direction;  // U
  Dense update;     // O: orthogonalised, row-normalised or element-wise; before scale and lr
  Dense delta;      // -lr s O
};

class ReferenceRule {
 public:
  // REQUIRES: ValidateRule(rule, rows, cols).
  ReferenceRule(const Rule& rule, int64_t rows, int64_t cols);

  // One committed step with the gradient after grad_scale, before clipping.
  ReferenceStep Step(const Dense& gradient, const StepArgs& args);

  // W' = (1 - lr wd) W + delta
  static Dense Apply(const Dense& weights, const ReferenceStep& step, const StepArgs& args);

  const std::vector<Dense>& state() const { return state_; }

 private:
  Dense Momentum(const Dense& g, const StepArgs& args);
  Dense Adamw(const Dense& g, const StepArgs& args);
  Dense Lion(const Dense& g, const StepArgs& args);
  Dense RowWise(const Dense& u) const;

  const Rule rule_;
  const int64_t rows_, cols_;
  std::vector<Dense> state_;
};

}  // namespace stiefel

#endif  // STIEFEL_KERNELS_REFERENCE_REFERENCE_RULE_H_
