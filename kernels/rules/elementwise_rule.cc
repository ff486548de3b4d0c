#include "kernels/rules/elementwise_rule.h"

#include "absl/strings/str_cat.h"

namespace stiefel {

ElementwiseRule::ElementwiseRule(const Rule& rule, int64_t rows, int64_t cols)
    : RuleBase(rule, rows, cols, "element-wise fp32") {}

std::string ElementwiseRule::Explain() const {
  return absl::StrCat(rows_, " x ", cols_, ": ", rule_.preset,
                      ", one pass over gradient and state in fp32\n");
}

Measured ElementwiseRule::Enqueue(Stream* stream, RuleStep* step) {
  SetScale(step, 1);
  step->pass.deliver = true;
  stream->Run(step->pass);
  return {};
}

}  // namespace stiefel
