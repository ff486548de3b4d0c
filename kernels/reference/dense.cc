#include "kernels/reference/dense.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <random>

namespace stiefel {
namespace {

double Dot(const double* a, const double* b, int64_t n) {
  double sums[4] = {0, 0, 0, 0};  // independent, so that additions overlap
  int64_t j = 0;
  for (; j + 4 <= n; j += 4) {
    for (int64_t l = 0; l < 4; ++l) sums[l] += a[j + l] * b[j + l];
  }
  for (; j < n; ++j) sums[0] += a[j] * b[j];
  return (sums[0] + sums[1]) + (sums[2] + sums[3]);
}

// (x, y) <- (c x - s y, s x + c y)
void Rotate(double c, double s, int64_t n, double* x, double* y) {
  for (int64_t j = 0; j < n; ++j) {
    const double old = x[j];
    x[j] = c * old - s * y[j];
    y[j] = s * old + c * y[j];
  }
}

double* Row(Dense* a, int64_t i) { return a->values.data() + i * a->cols; }

// Rotates pairs of rows of w until all are orthogonal, and the rows of q (may be null) alike.
void OrthogonaliseRows(Dense* w, Dense* q) {
  // A row this short is rounding of the others, and has no direction to make orthogonal.
  const double nothing = 1e-30 * Inner(*w, *w);
  for (int sweep = 0; sweep < 60; ++sweep) {
    bool rotated = false;
    for (int64_t i = 0; i < w->rows; ++i) {
      for (int64_t k = i + 1; k < w->rows; ++k) {
        double *x = Row(w, i), *y = Row(w, k);
        const double xx = Dot(x, x, w->cols), yy = Dot(y, y, w->cols), xy = Dot(x, y, w->cols);
        if (std::min(xx, yy) <= nothing || std::fabs(xy) <= 1e-14 * std::sqrt(xx) * std::sqrt(yy))
          continue;
        rotated = true;
        const double tau = (yy - xx) / (2 * xy);
        const double t = (tau >= 0 ? 1 : -1) / (std::fabs(tau) + std::sqrt(1 + tau * tau));
        const double c = 1 / std::sqrt(1 + t * t), s = c * t;
        Rotate(c, s, w->cols, x, y);
        if (q != nullptr) Rotate(c, s, q->cols, Row(q, i), Row(q, k));
      }
    }
    if (!rotated) return;
  }
}

}  // namespace

Dense Multiply(const Dense& a, const Dense& b) {
  Dense c(a.rows, b.cols);
  const int64_t n = b.cols;
  for (int64_t i = 0; i < a.rows; ++i) {
    double* to = Row(&c, i);
    int64_t k = 0;
    for (; k + 4 <= a.cols; k += 4) {  // four at a time: `to` is read and written less often
      const double a0 = a(i, k), a1 = a(i, k + 1), a2 = a(i, k + 2), a3 = a(i, k + 3);
      const double* from = b.values.data() + k * n;
      for (int64_t j = 0; j < n; ++j) {
        to[j] += (a0 * from[j] + a1 * from[n + j]) + (a2 * from[2 * n + j] + a3 * from[3 * n + j]);
      }
    }
    for (; k < a.cols; ++k) {
      for (int64_t j = 0; j < n; ++j) to[j] += a(i, k) * b(k, j);
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

Dense Scaled(double alpha, const Dense& a) {
  Dense c = a;
  for (double& v : c.values) v *= alpha;
  return c;
}

double FrobeniusNorm(const Dense& a) { return std::sqrt(Inner(a, a)); }

double Inner(const Dense& a, const Dense& b) {
  return Dot(a.values.data(), b.values.data(), static_cast<int64_t>(a.values.size()));
}

double MaxAbs(const Dense& a) {
  double largest = 0;
  for (double v : a.values) largest = std::max(largest, std::fabs(v));
  return largest;
}

Dense Block(const Dense& a, int64_t row, int64_t col, int64_t rows, int64_t cols) {
  Dense block(rows, cols);
  for (int64_t i = 0; i < std::min(rows, a.rows - row); ++i) {
    for (int64_t j = 0; j < std::min(cols, a.cols - col); ++j) block(i, j) = a(row + i, col + j);
  }
  return block;
}

void SetBlock(const Dense& block, int64_t row, int64_t col, Dense* a) {
  for (int64_t i = 0; i < std::min(block.rows, a->rows - row); ++i) {
    for (int64_t j = 0; j < std::min(block.cols, a->cols - col); ++j)
      (*a)(row + i, col + j) = block(i, j);
  }
}

SingularPairs SingularValueDecomposition(const Dense& a) {
  if (a.rows > a.cols) {
    SingularPairs pairs = SingularValueDecomposition(Transpose(a));
    std::swap(pairs.left, pairs.right);
    return pairs;
  }
  // With q orthogonal and the rows of w = q a orthogonal, a = q^T w: row i of w is values[i] times
  // right_i, and row i of q is left_i.
  Dense w = a, q(a.rows, a.rows);
  for (int64_t i = 0; i < a.rows; ++i) q(i, i) = 1;
  OrthogonaliseRows(&w, &q);
  std::vector<double> norms;
  for (int64_t i = 0; i < w.rows; ++i)
    norms.push_back(std::sqrt(Dot(Row(&w, i), Row(&w, i), w.cols)));
  std::vector<int64_t> order(w.rows);
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(),
                   [&](int64_t i, int64_t k) { return norms[i] > norms[k]; });
  SingularPairs pairs{Dense(q.rows, q.cols), Dense(w.rows, w.cols), {}};
  for (int64_t i = 0; i < w.rows; ++i) {
    const double norm = norms[order[i]];
    pairs.values.push_back(norm);
    SetBlock(Block(q, order[i], 0, 1, q.cols), i, 0, &pairs.left);
    if (norm > 0) SetBlock(Scaled(1 / norm, Block(w, order[i], 0, 1, w.cols)), i, 0, &pairs.right);
  }
  return pairs;
}

std::vector<double> SingularValues(const Dense& a) {
  Dense w = a.rows <= a.cols ? a : Transpose(a);
  OrthogonaliseRows(&w, nullptr);
  std::vector<double> values;
  for (int64_t i = 0; i < w.rows; ++i)
    values.push_back(std::sqrt(Dot(Row(&w, i), Row(&w, i), w.cols)));
  std::sort(values.rbegin(), values.rend());
  return values;
}

double SpectralNorm(const Dense& a) { return SingularValues(a).front(); }

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
        const double dot = Dot(Row(&q, i), Row(&q, k), cols);
        for (int64_t j = 0; j < cols; ++j) q(i, j) -= dot * q(k, j);
      }
    }
    const double norm = std::sqrt(Dot(Row(&q, i), Row(&q, i), cols));
    for (int64_t j = 0; j < cols; ++j) q(i, j) /= norm;
  }
  return q;
}

}  // namespace stiefel
