#ifndef STIEFEL_KERNELS_RULES_ELEMENT_COEFFICIENTS_H_
#define STIEFEL_KERNELS_RULES_ELEMENT_COEFFICIENTS_H_

#include "kernels/backend.h"
#include "kernels/rules/matrix_rule.h"

namespace stiefel {

// Stages 1 and 2 of the pipeline (momentum and look-ahead), and the element-wise rules, as
// coefficients of one step. Computed in fp64 and rounded once.
ElementCoefficients CoefficientsOf(const Rule& rule, const StepArgs& args);

}  // namespace stiefel

#endif  // STIEFEL_KERNELS_RULES_ELEMENT_COEFFICIENTS_H_
