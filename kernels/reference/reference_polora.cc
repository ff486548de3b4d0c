#include "kernels/reference/reference_polora.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>
#include <vector>

#include "kernels/reference/reference_polar.h"

namespace stiefel {
namespace {

constexpr double kStart = 1e-12;                             // of p and q
constexpr double kTiny = std::numeric_limits<float>::min();  // least damping of C

double Started(double variance) { return variance == 0 ? kStart : variance; }

// The diagonal of diag(v / |v|_inf + delta), to the power -1/2 or 1.
std::vector<double> Metric(const Dense& v, double delta, double power) {
  double largest = 0;
  for (double x : v.values) largest = std::max(largest, Started(x));
  std::vector<double> diagonal;
  for (double x : v.values) diagonal.push_back(std::pow(Started(x) / largest + delta, power));
  return diagonal;
}

Dense WithColumnsScaled(Dense a, const std::vector<double>& scales) {
  for (int64_t i = 0; i < a.rows; ++i) {
    for (int64_t j = 0; j < a.cols; ++j) a(i, j) *= scales[j];
  }
  return a;
}

// (C + max(delta lambda_max, tiny) I) to `power`, from the eigenvectors of C = V diag(lambda) V^T:
// for a symmetric positive semi-definite C these are its singular vectors.
Dense DampedPower(const SingularPairs& eigen, double delta, double power) {
  const double damping = std::max(delta * eigen.values[0], kTiny);
  std::vector<double> powers;
  for (double lambda : eigen.values) powers.push_back(std::pow(lambda + damping, power));
  return Multiply(WithColumnsScaled(Transpose(eigen.left), powers), eigen.left);
}

}  // namespace

Dense ReferencePolora(const Rule& rule, PoloraStep* step) {
  const Dense& a = step->a;
  const Dense& b = step->b;
  const Dense none(a.rows, a.cols);
  // C_B = B^T P B
  const Dense b_transposed = Transpose(b);
  const std::vector<double> p = Metric(step->partner_variance, rule.delta, 1);
  const SingularPairs c_b =
      SingularValueDecomposition(Multiply(WithColumnsScaled(b_transposed, p), b));
  if (c_b.values[0] == 0) return none;
  const Dense c_b_rsqrt = DampedPower(c_b, rule.delta, -0.5);

  // D = C_B^-1/2 msign(C_B^-1/2 Mh Q^-1/2) Q^-1/2
  const std::vector<double> q_rsqrt = Metric(step->variance, rule.delta, -0.5);
  const Dense look_ahead = Combine(step->beta1, step->momentum, 1 - step->beta1, step->gradient);
  const Dense sign =
      ReferencePolar(rule, WithColumnsScaled(Multiply(c_b_rsqrt, look_ahead), q_rsqrt));
  const Dense d = WithColumnsScaled(Multiply(c_b_rsqrt, sign), q_rsqrt);
  if (MaxAbs(d) == 0) return none;

  // q <- b2 q + (1 - b2) diag(G^T C_B^-1 G) / r
  const Dense c_b_inverse_g = Multiply(DampedPower(c_b, rule.delta, -1), step->gradient);
  for (int64_t j = 0; j < a.cols; ++j) {
    double sum = 0;
    for (int64_t i = 0; i < a.rows; ++i) sum += step->gradient(i, j) * c_b_inverse_g(i, j);
    double& q = step->variance.values[j];
    q = rule.beta2 * Started(q) + (1 - rule.beta2) * sum / static_cast<double>(a.rows);
  }
  const double lengths = SpectralNorm(a) + SpectralNorm(b);
  return Scaled(1 / (rule.product_scale * lengths * SpectralNorm(d)), d);
}

}  // namespace stiefel
