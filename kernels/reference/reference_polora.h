// PoLoRA's coupled pair in fp64, docs/mathematics.md section 4.
#ifndef STIEFEL_KERNELS_REFERENCE_REFERENCE_POLORA_H_
#define STIEFEL_KERNELS_REFERENCE_REFERENCE_POLORA_H_

#include "kernels/reference/dense.h"
#include "plan/rule.h"

namespace stiefel {

// One factor's step, given as the factor A (r x d_in). B's is the same with everything transposed:
// with A' = B^T, B' = A^T and q' = p the formulas of D_B and p become those of D_A and q.
struct PoloraStep {
  Dense a, b;              // weights before the step: this factor and the other
  Dense gradient;          // of a, clipped
  Dense momentum;          // M after it took the gradient in
  Dense variance;          // q, 1 x cols of a; an entry of 0 stands for 1e-12
  Dense partner_variance;  // p, 1 x rows of b; likewise
  double beta1 = 0;        // in force in this step
};

// D / (c (|A|_2 + |B|_2) |D|_2), which times -eta is the step; 0 where C_B or D is 0. `variance` is
// updated unless the step is 0.
Dense ReferencePolora(const Rule& rule, PoloraStep* step);

}  // namespace stiefel

#endif  // STIEFEL_KERNELS_REFERENCE_REFERENCE_POLORA_H_
