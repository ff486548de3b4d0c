// How a parameter of any shape becomes matrices. Nothing is guessed from sizes: where a shape has
// more than two dimensions, the user says which of them count matrices.
//
// The first `stack_dims` axes enumerate matrices, the next one is the rows (outputs), and the rest
// together are the columns:
//
//   [out, in]                           one matrix out x in
//   [E, out, in]       stack_dims 1     E matrices out x in: "w[0]", "w[1]", ...
//   [L, E, out, in]    stack_dims 2     L E matrices: "w[0,0]", "w[0,1]", ...
//   [out, in, kh, kw]  stack_dims 0     a convolution: one matrix out x (in kh kw)
//   [n]                                 a 1 x n matrix, for element-wise rules
//
// In the stacked view, which blocks of a parameter are rectangles of, the matrices stand one below
// the other.
#ifndef STIEFEL_PLAN_SHAPE_H_
#define STIEFEL_PLAN_SHAPE_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "plan/rule.h"

namespace stiefel {

struct StackedMatrix {
  std::string name;
  int64_t rows = 0, cols = 0;
  int64_t first_row = 0;  // in the stacked view
  Rule rule;  // the parameter's; of a polora stack, with the partner of this very matrix
};

struct ParameterShape {
  std::vector<StackedMatrix> matrices;  // at least one, all of one shape
  int64_t rows = 0, cols = 0;           // of the stacked view
  int dimensions = 0;  // of one matrix as the user shaped it: what ValidateRule asks
};

// Most matrices of one parameter.
inline constexpr int64_t kMaxStackedMatrices = 1 << 16;

// The matrices of a parameter, checked against the rule it is for, with ValidateRule of each.
// Element-wise rules take any shape; without stack_dims they see shape[0] x the rest.
//
// INVALID_ARGUMENT, with the name, the shape and what to do: a size that is not positive; sizes
// whose product passes 2^58; stack_dims out of range; too many matrices; and for rules that
// orthogonalise (spectral and polora): more than two dimensions without stack_dims; one dimension
// (after the stack); a depthwise convolution, [out, 1, kh, ...] after the stack, whose rows do not
// mix; what ValidateRule refuses.
absl::StatusOr<ParameterShape> ShapeOfParameter(absl::string_view name,
                                                const std::vector<int64_t>& shape,
                                                std::optional<int64_t> stack_dims,
                                                const Rule& rule);

}  // namespace stiefel

#endif  // STIEFEL_PLAN_SHAPE_H_
