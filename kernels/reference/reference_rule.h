// Every rule in fp64 with plain loops, in the order of docs/mathematics.md: what the backends must
// agree with. Not thread-safe: one ReferenceRule is one matrix.
#ifndef STIEFEL_KERNELS_REFERENCE_REFERENCE_RULE_H_
#define STIEFEL_KERNELS_REFERENCE_REFERENCE_RULE_H_

#include <cstdint>
#include <string_view>
#include <vector>

#include "kernels/reference/dense.h"
#include "kernels/reference/reference_gradient.h"
#include "kernels/reference/reference_polar.h"
#include "kernels/rules/matrix_rule.h"
#include "plan/rule.h"

namespace stiefel {

struct ReferenceStep {
  Dense direction;  // U, all rows
  // O after stage 6 (normalised rows in a row-wise step, the direction of element-wise rules,
  // D / (c (|A|_2 + |B|_2) |D|_2) of polora): before scale and lr. 0 where rows are not selected.
  Dense update;
  Dense delta;                       // -lr s O
  std::vector<ReferenceUnit> units;  // stage 4, in steps that ran the polar map
};

// What a polora step reads besides its own state, as it was before the step of either factor.
struct ReferencePair {
  const Dense& weights;
  const Dense& partner_weights;
  const std::vector<Dense>& partner_state;
};

class ReferenceRule {
 public:
  // REQUIRES: ValidateRule(rule, rows, cols).
  ReferenceRule(const Rule& rule, int64_t rows, int64_t cols);

  // One committed step with the gradient after grad_scale, before clipping. REQUIRES: `pair` for
  // polora, and for no other family.
  ReferenceStep Step(const Dense& gradient, const StepArgs& args,
                     const ReferencePair* pair = nullptr);

  // W' = (1 - lr wd) W + delta
  static Dense Apply(const Dense& weights, const ReferenceStep& step, const StepArgs& args);

  // In the order of RuleState(). leading_directions are the exact ones, each with an arbitrary
  // sign.
  std::vector<Dense> state() const;

 private:
  ReferenceStep StepOfSplits(const Dense& gradient, const StepArgs& args);
  ReferenceStep SpectralStep(const Dense& g, const StepArgs& args);
  ReferenceStep PoloraFactorStep(const Dense& g, const StepArgs& args, const ReferencePair& pair);
  Dense Momentum(const Dense& g, const StepArgs& args);
  std::vector<int64_t> Select(const Dense& u);
  Dense Orthogonalised(const Dense& u, const std::vector<int64_t>& rows, const StepArgs& args,
                       std::vector<ReferenceUnit>* units);
  Dense Adamw(const Dense& g, const StepArgs& args);
  Dense Lion(const Dense& g, const StepArgs& args);
  Dense* State(std::string_view name);  // null: the rule keeps none

  const Rule rule_;
  const int64_t rows_, cols_;
  // A matrix of several splits is these, one below the other, and has no state of its own.
  std::vector<ReferenceRule> splits_;
  std::vector<StateBuffer> specs_;
  std::vector<Dense> state_;
};

}  // namespace stiefel

#endif  // STIEFEL_KERNELS_REFERENCE_REFERENCE_RULE_H_
