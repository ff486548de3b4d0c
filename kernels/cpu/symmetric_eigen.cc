#include "kernels/cpu/symmetric_eigen.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

namespace stiefel {
namespace {

// Iterations for one eigenvalue; two are usual. What is left after these is below any use.
constexpr int kMaxIterations = 60;

void AddScaled(double c, const double* x, double* sum, int64_t n) {
  for (int64_t i = 0; i < n; ++i) sum[i] += c * x[i];
}

// x <- c x - s y,  y <- s x + c y
void Rotate(double c, double s, double* x, double* y, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    const double t = y[i];
    y[i] = s * x[i] + c * t;
    x[i] = c * x[i] - s * t;
  }
}

// Symmetric tridiagonal: diagonal[i], and off[i] between i and i + 1 (off[n - 1] = 0).
struct Tridiagonal {
  explicit Tridiagonal(int64_t n) : diagonal(n), off(n), tau(n) {}
  std::vector<double> diagonal, off;
  std::vector<double> tau;  // reflector k is I - tau[k] v v^T, v left in row k of a, from k + 1 on
};

// A <- H A H for the reflector that leaves one entry off the diagonal in row k. Both halves of the
// symmetric matrix are kept, so that every loop runs along rows.
void Reflect(double* a, int64_t n, int64_t k, std::vector<double>* work, Tridiagonal* t) {
  const int64_t m = n - k - 1;
  double* v = a + k * n + k + 1;
  const double tail = Dot(v + 1, v + 1, m - 1);
  if (tail == 0) {
    t->off[k] = v[0];
    t->tau[k] = 0;
    return;
  }
  const double norm = std::sqrt(v[0] * v[0] + tail);
  t->off[k] = v[0] > 0 ? -norm : norm;
  v[0] -= t->off[k];
  t->tau[k] = 2 / (v[0] * v[0] + tail);

  // w = tau A v - (tau^2 / 2) (v^T A v) v;  A <- A - v w^T - w v^T
  double* w = work->data();
  std::fill_n(w, m, 0.0);
  for (int64_t i = 0; i < m; ++i) AddScaled(t->tau[k] * v[i], a + (k + 1 + i) * n + k + 1, w, m);
  AddScaled(-t->tau[k] / 2 * Dot(w, v, m), v, w, m);
  for (int64_t i = 0; i < m; ++i) {
    double* row = a + (k + 1 + i) * n + k + 1;
    const double vi = v[i], wi = w[i];
    for (int64_t j = 0; j < m; ++j) row[j] -= vi * w[j] + wi * v[j];
  }
}

Tridiagonal Tridiagonalise(double* a, int64_t n) {
  Tridiagonal t(n);
  std::vector<double> work(n);
  for (int64_t k = 0; k + 2 < n; ++k) Reflect(a, n, k, &work, &t);
  if (n > 1) t.off[n - 2] = a[(n - 2) * n + n - 1];
  for (int64_t i = 0; i < n; ++i) t.diagonal[i] = a[i * n + i];
  return t;
}

// One implicit QL sweep over the unreduced block l..m, with Wilkinson's shift; the rotations go
// into the rows of `vectors`.
void Sweep(Tridiagonal* t, int64_t l, int64_t m, double* vectors, int64_t n) {
  std::vector<double>&d = t->diagonal, &e = t->off;
  const double half = (d[l + 1] - d[l]) / (2 * e[l]);
  double g = d[m] - d[l] + e[l] / (half + std::copysign(std::hypot(half, 1.0), half));
  double s = 1, c = 1, p = 0;
  for (int64_t i = m - 1; i >= l; --i) {
    const double f = s * e[i], b = c * e[i], r = std::hypot(f, g);
    e[i + 1] = r;
    if (r == 0) {  // split by underflow
      d[i + 1] -= p;
      e[m] = 0;
      return;
    }
    s = f / r;
    c = g / r;
    const double shifted = d[i + 1] - p, q = (d[i] - shifted) * s + 2 * c * b;
    p = s * q;
    d[i + 1] = shifted + p;
    g = c * q - b;
    if (vectors != nullptr) Rotate(c, s, vectors + i * n, vectors + (i + 1) * n, n);
  }
  d[l] -= p;
  e[l] = g;
  e[m] = 0;
}

void Diagonalise(Tridiagonal* t, int64_t n, double* vectors) {
  const std::vector<double>&d = t->diagonal, &e = t->off;
  for (int64_t l = 0; l < n; ++l) {
    for (int iteration = 0; iteration < kMaxIterations; ++iteration) {
      int64_t m = l;
      while (m + 1 < n && std::fabs(e[m]) > std::numeric_limits<double>::epsilon() *
                                                (std::fabs(d[m]) + std::fabs(d[m + 1]))) {
        ++m;
      }
      if (m == l) break;
      Sweep(t, l, m, vectors, n);
    }
  }
}

// Eigenvectors of the tridiagonal matrix into those of A: the reflectors, last first.
void TransformBack(const double* a, const Tridiagonal& t, int64_t n, double* vectors) {
  for (int64_t i = 0; i < n; ++i) {
    for (int64_t k = n - 3; k >= 0; --k) {
      if (t.tau[k] == 0) continue;
      const double* v = a + k * n + k + 1;
      double* tail = vectors + i * n + k + 1;
      AddScaled(-t.tau[k] * Dot(v, tail, n - k - 1), v, tail, n - k - 1);
    }
  }
}

void SortDescending(int64_t n, double* values, double* vectors) {
  for (int64_t i = 0; i < n; ++i) {
    const int64_t largest = std::max_element(values + i, values + n) - values;
    if (largest == i) continue;
    std::swap(values[i], values[largest]);
    if (vectors != nullptr) {
      std::swap_ranges(vectors + i * n, vectors + (i + 1) * n, vectors + largest * n);
    }
  }
}

}  // namespace

double Dot(const double* x, const double* y, int64_t n) {
  constexpr int kLanes = 8;
  double lanes[kLanes] = {};
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    for (int lane = 0; lane < kLanes; ++lane) lanes[lane] += x[i + lane] * y[i + lane];
  }
  for (; i < n; ++i) lanes[0] += x[i] * y[i];
  for (int width = kLanes / 2; width > 0; width /= 2) {
    for (int lane = 0; lane < width; ++lane) lanes[lane] += lanes[lane + width];
  }
  return lanes[0];
}

bool SymmetricEigen(double* a, int64_t n, double* values, double* vectors) {
  for (int64_t i = 0; i < n * n; ++i) {
    if (!std::isfinite(a[i])) return false;
  }
  Tridiagonal t = Tridiagonalise(a, n);
  if (vectors != nullptr) {
    std::fill_n(vectors, n * n, 0.0);
    for (int64_t i = 0; i < n; ++i) vectors[i * n + i] = 1;
  }
  Diagonalise(&t, n, vectors);
  if (vectors != nullptr) TransformBack(a, t, n, vectors);
  std::copy(t.diagonal.begin(), t.diagonal.end(), values);
  SortDescending(n, values, vectors);
  return true;
}

}  // namespace stiefel
