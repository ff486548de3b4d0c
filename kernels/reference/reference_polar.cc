#include "kernels/reference/reference_polar.h"

#include <algorithm>
#include <cmath>

namespace stiefel {
namespace {

Dense Identity(int64_t n) {
  Dense identity(n, n);
  for (int64_t i = 0; i < n; ++i) identity(i, i) = 1;
  return identity;
}

// s_i = rsqrt(max(sum_j |A_ij|, 1e-7 max_i sum_j |A_ij|)), A = u u^T. `u` is not zero.
std::vector<double> AolScales(const Dense& u) {
  const Dense a = Multiply(u, Transpose(u));
  std::vector<double> sums(u.rows, 0.0);
  for (int64_t i = 0; i < u.rows; ++i) {
    for (int64_t j = 0; j < u.rows; ++j) sums[i] += std::fabs(a(i, j));
  }
  const double floor = 1e-7 * *std::max_element(sums.begin(), sums.end());
  for (double& s : sums) s = 1 / std::sqrt(std::max(s, floor));
  return sums;
}

// `tile` padded to size x size, through the map, and cropped.
Dense PaddedPolar(const Rule& rule, const Dense& tile, int64_t size) {
  if (tile.rows > tile.cols) return Transpose(PaddedPolar(rule, Transpose(tile), size));
  return Block(ReferencePolar(rule, Block(tile, 0, 0, size, size)), 0, 0, tile.rows, tile.cols);
}

}  // namespace

Dense ReferencePreconditioned(const Rule& rule, const Dense& u) {
  if (MaxAbs(u) == 0) return u;
  if (rule.eps_mode != EpsMode::kNone) {
    const double norm = FrobeniusNorm(u);
    return Scaled(1 / (rule.eps_mode == EpsMode::kAdd ? norm + rule.eps : std::max(norm, rule.eps)),
                  u);
  }
  // The largest entry is in [1, 2) from here on.
  Dense x = Scaled(std::scalbn(1.0, -std::ilogb(MaxAbs(u))), u);
  if (rule.normalise == Normalise::kFrobenius) return Scaled(1 / FrobeniusNorm(x), x);
  const std::vector<double> s = AolScales(x);
  for (int64_t i = 0; i < x.rows; ++i) {
    for (int64_t j = 0; j < x.cols; ++j) x(i, j) *= s[i];
  }
  return x;
}

Dense ReferencePolar(const Rule& rule, const Dense& u) {
  if (u.rows > u.cols) return Transpose(ReferencePolar(rule, Transpose(u)));
  Dense x = ReferencePreconditioned(rule, u);
  for (const Coefficients& k : PolarCoefficients(rule)) {
    const Dense a = Multiply(x, Transpose(x));
    const Dense b = Combine(k.b, a, k.c, Multiply(a, a));
    x = Combine(k.a, x, 1, Multiply(b, x));
  }
  return x;
}

Dense ReferenceGramPolar(const Rule& rule, const Dense& u) {
  if (u.rows > u.cols) return Transpose(ReferenceGramPolar(rule, Transpose(u)));
  const std::vector<Coefficients> coefficients = PolarCoefficients(rule);
  const std::vector<int64_t> restarts = GramRestarts(rule, u.rows, /*low_precision=*/false);
  Dense x = ReferencePreconditioned(rule, u);
  Dense r = Multiply(x, Transpose(x)), q = Identity(x.rows);
  for (int64_t t = 0; t < static_cast<int64_t>(coefficients.size()); ++t) {
    if (std::count(restarts.begin(), restarts.end(), t) > 0) {
      x = Multiply(q, x);
      r = Multiply(x, Transpose(x));
      q = Identity(x.rows);
    }
    const Coefficients& k = coefficients[t];
    const Dense z = Combine(k.b, r, k.c, Multiply(r, r));
    q = Combine(1, Multiply(q, z), k.a, q);
    const Dense rz = Combine(1, Multiply(r, z), k.a, r);
    r = Combine(1, Multiply(z, rz), k.a, rz);
  }
  return Multiply(q, x);
}

std::vector<ReferenceUnit> ReferenceUnits(const Rule& rule, const Dense& u, int64_t tile) {
  if (tile == 0) return {{WholeRect(u.rows, u.cols), u, ReferencePolar(rule, u)}};
  std::vector<ReferenceUnit> units;
  for (int64_t row = 0; row < u.rows; row += tile) {
    for (int64_t col = 0; col < u.cols; col += tile) {
      const Rect rect{row, std::min(row + tile, u.rows), col, std::min(col + tile, u.cols)};
      Dense part = Block(u, row, col, rect.rows(), rect.cols());
      Dense o = PaddedPolar(rule, part, tile);
      units.push_back({rect, std::move(part), std::move(o)});
    }
  }
  return units;
}

}  // namespace stiefel
