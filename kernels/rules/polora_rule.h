#ifndef STIEFEL_KERNELS_RULES_POLORA_RULE_H_
#define STIEFEL_KERNELS_RULES_POLORA_RULE_H_

#include <cstdint>
#include <memory>
#include <utility>

#include "absl/status/statusor.h"
#include "kernels/rules/matrix_rule.h"

namespace stiefel {

// The rule of one factor of a low-rank product c B A, A (r x d_in), B (d_out x r) (PoLoRA,
// docs/mathematics.md section 4); the other factor, its partner, is a matrix of the shape
// `partner`. For A, with C = C_B, and with G, M and q its own; for B the same transposed, with C_A
// and p:
//
//   M <- b1 M + (1-b1) G;   Mh = b1 M + (1-b1) G
//   C = B^T diag(p / |p|_inf + delta) B, damped
//   D = C^-1/2 msign(C^-1/2 Mh Q^-1/2) Q^-1/2,   Q = diag(q / |q|_inf + delta)
//   A <- A - eta / (c (|A|_2 + |B|_2)) D / |D|_2
//   q <- b2 q + (1-b2) diag(G^T C^-1 G) / r
//
// so that c |B dA + dB A|_2 <= eta, the learning rate. The partner's weights and variance are those
// before the step. In fp32, with C, its root and the norms in fp64. Where C or D is zero A and q
// stay as they are.
//
// INVALID_ARGUMENT where the two shapes do not share a rank; and as MakePolarPlan. REQUIRES: a
// valid polora rule; the backend outlives the rule.
absl::StatusOr<std::unique_ptr<MatrixRule>> MakePoloraRule(const Rule& rule, int64_t rows,
                                                           int64_t cols,
                                                           std::pair<int64_t, int64_t> partner,
                                                           Backend* backend);

}  // namespace stiefel

#endif  // STIEFEL_KERNELS_RULES_POLORA_RULE_H_
