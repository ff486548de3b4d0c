#ifndef STIEFEL_CLI_SINGULAR_SUMMARY_H_
#define STIEFEL_CLI_SINGULAR_SUMMARY_H_

#include <optional>
#include <vector>

#include "kernels/reference/dense.h"
#include "kernels/rules/matrix_rule.h"
#include "plan/rule.h"

namespace stiefel {

// Singular values of one or more matrices taken together.
struct SingularSummary {
  double min = 0, max = 0;
  std::optional<double> median;  // not where they are estimated
  bool exact = true;  // false: the extremes are estimated, min from above, max from below
};

// Matrices of more than short^2 x long multiplications are estimated instead of decomposed.
inline constexpr double kExactSingularWork = 1 << 25;

// Of the orthogonalised or row-normalised updates O that led to these deltas (-lr s O) of a
// spectral rule: of each split, or tile where tiles are in force, together; without the rows
// (columns) that were not selected. Nothing where O cannot be seen: other families, and lr s = 0.
// REQUIRES: deltas of one shape.
std::optional<SingularSummary> SummariseUpdates(const Rule& rule, const StepArgs& args,
                                                const std::vector<Dense>& deltas);

// Extremes of those that are not 0, by a bidiagonalisation of up to 48 steps from a fixed start:
// exact for matrices of a smaller rank, else estimated. REQUIRES: a matrix that is not zero.
SingularSummary EstimateExtremes(const Dense& a);

}  // namespace stiefel

#endif  // STIEFEL_CLI_SINGULAR_SUMMARY_H_
