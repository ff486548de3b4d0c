#include "kernels/reference/reference_shaping.h"

#include <algorithm>
#include <cmath>

namespace stiefel {

bool ShapesSpectrum(const Rule& rule, int64_t step) {
  return rule.gain != 1 && ShapingWeight(rule, step) != 0;
}

Dense ReferenceShaped(const Rule& rule, const Dense& u, const Dense& o, int64_t step,
                      Dense* leading) {
  const SingularPairs pairs = SingularValueDecomposition(u);
  const int64_t k = ShapedDirections(rule, std::min(u.rows, u.cols));
  const double w = ShapingWeight(rule, step);
  const double gain = 1 + (rule.gain - 1) * w;
  Dense shaped = Scaled(gain, o);
  for (int64_t i = 0; i < k; ++i) {
    const Dense left = Block(pairs.left, i, 0, 1, u.rows);
    const Dense right = Block(pairs.right, i, 0, 1, u.cols);
    const Dense& along_short_side = u.rows <= u.cols ? left : right;
    SetBlock(along_short_side, 0, i * along_short_side.cols, leading);
    if (pairs.values[i] <= 1e-12 * pairs.values[0]) continue;
    const double rank = std::log(static_cast<double>(i + 1)) / std::log(static_cast<double>(k));
    const double length = 1 + (k == 1 ? 0 : (rule.gain - 1) * rank) * w;  // s_i(t)
    const Dense pair = Multiply(Transpose(left), right);
    const double present = rule.deflation == Deflation::kPaper ? 1 : Inner(pair, o);  // d_i
    shaped = Combine(1, shaped, -(gain - length) * present, pair);
  }
  return shaped;
}

Dense ReferenceRowVariance(const Rule& rule, const Dense& o, const std::vector<int64_t>& rows,
                           Dense* variance) {
  const double beta2 = *rule.row_variance_beta2, eps = rule.row_variance_eps;
  Dense normalised = o;
  for (int64_t i = 0; i < o.rows; ++i) {
    const Dense row = Block(o, i, 0, 1, o.cols);
    double& v = variance->values[rows[i]];
    v = beta2 * v + (1 - beta2) * Inner(row, row) / static_cast<double>(o.cols);
    if (MaxAbs(row) > 0) SetBlock(Scaled(1 / (std::sqrt(v) + eps), row), i, 0, &normalised);
  }
  const double norm = std::max(FrobeniusNorm(normalised), eps);
  return norm == 0 ? normalised : Scaled(FrobeniusNorm(o) / norm, normalised);
}

}  // namespace stiefel
