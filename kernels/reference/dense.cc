#include "kernels/reference/dense.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <random>

namespace stiefel {

Dense Multiply(const Dense& a, const Dense& b) {
  Dense c(a.rows, b.cols);
  for (int64_t i = 0; i < a.rows; ++i) {
    for (int64_t k = 0; k < a.cols; ++k) {
      for (int64_t j = 0; j < b.cols; ++j) c(i, j) += a(i, k) * b(k, j);
    }
  }
  return c;
}

Dense Transpose(const Dense& a) {
  Dense t(a.cols, a.rows);
  for (int64_t i = 0; i < a.rows; ++i) {
    for (int64_t j = 0; j < a.cols; ++j) t(j, i) = a(i, j);
  }
  return t;
}

Dense Combine(double alpha, const Dense& a, double beta, const Dense& b) {
  Dense c(a.rows, a.cols);
  for (size_t i = 0; i < c.values.size(); ++i)
    c.values[i] = alpha * a.values[i] + beta * b.values[i];
  return c;
}

double FrobeniusNorm(const Dense& a) { return std::sqrt(Inner(a, a)); }

double Inner(const Dense& a, const Dense& b) {
  double sum = 0;
  for (size_t i = 0; i < a.values.size(); ++i) sum += a.values[i] * b.values[i];
  return sum;
}

double MaxAbs(const Dense& a) {
  double largest = 0;
  for (double v : a.values) largest = std::max(largest, std::fabs(v));
  return largest;
}

std::vector<double> SingularValues(const Dense& a) {
  Dense w = a.rows <= a.cols ? a : Transpose(a);
  // Rotates pairs of rows until all are orthogonal; their lengths are the singular values.
  for (int sweep = 0; sweep < 60; ++sweep) {
    bool rotated = false;
    for (int64_t p = 0; p < w.rows; ++p) {
      for (int64_t q = p + 1; q < w.rows; ++q) {
        double pp = 0, qq = 0, pq = 0;
        for (int64_t j = 0; j < w.cols; ++j) {
          pp += w(p, j) * w(p, j);
          qq += w(q, j) * w(q, j);
          pq += w(p, j) * w(q, j);
        }
        if (std::fabs(pq) <= 1e-14 * std::sqrt(pp * qq)) continue;
        rotated = true;
        const double tau = (qq - pp) / (2 * pq);
        const double t = (tau >= 0 ? 1 : -1) / (std::fabs(tau) + std::sqrt(1 + tau * tau));
        const double c = 1 / std::sqrt(1 + t * t), s = c * t;
        for (int64_t j = 0; j < w.cols; ++j) {
          const double x = w(p, j), y = w(q, j);
          w(p, j) = c * x - s * y;
          w(q, j) = s * x + c * y;
        }
      }
    }
    if (!rotated) break;
  }
  std::vector<double> values;
  for (int64_t i = 0; i < w.rows; ++i) {
    double sum = 0;
    for (int64_t j = 0; j < w.cols; ++j) sum += w(i, j) * w(i, j);
    values.push_back(std::sqrt(sum));
  }
  std::sort(values.begin(), values.end(), std::greater<double>());
  return values;
}

Dense RandomNormal(int64_t rows, int64_t cols, uint64_t seed) {
  std::mt19937_64 random(seed);
  std::normal_distribution<double> normal;
  Dense a(rows, cols);
  for (double& v : a.values) v = normal(random);
  return a;
}

Dense RandomOrthonormalRows(int64_t rows, int64_t cols, uint64_t seed) {
  Dense q = RandomNormal(rows, cols, seed);
  for (int64_t i = 0; i < rows; ++i) {
    // Twice, so that rounding of the first pass is removed too.
    for (int pass = 0; pass < 2; ++pass) {
      for (int64_t k = 0; k < i; ++k) {
        double dot = 0;
        for (int64_t j = 0; j < cols; ++j) dot += q(i, j) * q(k, j);
        for (int64_t j = 0; j < cols; ++j) q(i, j) -= dot * q(k, j);
      }
    }
    double norm = 0;
    for (int64_t j = 0; j < cols; ++j) norm += q(i, j) * q(i, j);
    for (int64_t j = 0; j < cols; ++j) q(i, j) /= std::sqrt(norm);
  }
  return q;
}

}  // namespace stiefel
