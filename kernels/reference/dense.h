// Plain fp64 linear algebra, row-major, written to be read: the truth that fast code is tested
// against.
#ifndef STIEFEL_KERNELS_REFERENCE_DENSE_H_
#define STIEFEL_KERNELS_REFERENCE_DENSE_H_

#include <cstdint>
#include <vector>

namespace stiefel {

struct Dense {
  Dense() = default;
  Dense(int64_t rows, int64_t cols) : rows(rows), cols(cols), values(rows * cols, 0.0) {}
  Dense(int64_t rows, int64_t cols, std::vector<double> values)
      : rows(rows), cols(cols), values(std::move(values)) {}
  double& operator()(int64_t i, int64_t j) { return values[i * cols + j]; }
  double operator()(int64_t i, int64_t j) const { return values[i * cols + j]; }

  int64_t rows = 0, cols = 0;
  std::vector<double> values;
};

Dense Multiply(const Dense& a, const Dense& b);
Dense Transpose(const Dense& a);
// alpha a + beta b
Dense Combine(double alpha, const Dense& a, double beta, const Dense& b);
double FrobeniusNorm(const Dense& a);
// sum_ij a_ij b_ij
double Inner(const Dense& a, const Dense& b);
double MaxAbs(const Dense& a);

// min(rows, cols) of them, descending. One-sided Jacobi.
std::vector<double> SingularValues(const Dense& a);

// rows x cols with orthonormal rows (rows <= cols), pseudo-random from the seed.
Dense RandomOrthonormalRows(int64_t rows, int64_t cols, uint64_t seed);
// Standard normal entries, pseudo-random from the seed.
Dense RandomNormal(int64_t rows, int64_t cols, uint64_t seed);

}  // namespace stiefel

#endif  // STIEFEL_KERNELS_REFERENCE_DENSE_H_
