#ifndef STIEFEL_KERNELS_RULES_ELEMENTWISE_RULE_H_
#define STIEFEL_KERNELS_RULES_ELEMENTWISE_RULE_H_

#include <string>

#include "kernels/rules/rule_base.h"

namespace stiefel {

// adamw, lion and sgd: one pass from the gradient to the delivered update.
class ElementwiseRule final : public RuleBase {
 public:
  // REQUIRES: a rule of an element-wise family, valid for the shape.
  ElementwiseRule(const Rule& rule, int64_t rows, int64_t cols);

  std::string Explain() const override;

 private:
  int64_t StepWorkspaceBytes() const override { return 0; }
  Measured Enqueue(Stream* stream, RuleStep* step) override;
};

}  // namespace stiefel

#endif  // STIEFEL_KERNELS_RULES_ELEMENTWISE_RULE_H_
