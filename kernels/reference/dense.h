// Plain fp64 linear algebra, row-major, written to be read: the truth that fast code is tested
// against.
#ifndef STIEFEL_KERNELS_REFERENCE_DENSE_H_
#define STIEFEL_KERNELS_REFERENCE_DENSE_H_

#include <cstdint>
#include <utility>
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
Dense Scaled(double alpha, const Dense& a);
double FrobeniusNorm(const Dense& a);
// sum_ij a_ij b_ij
double Inner(const Dense& a, const Dense& b);
double MaxAbs(const Dense& a);

// The rows x cols block whose first element is (row, col); what lies beyond `a` is 0.
Dense Block(const Dense& a, int64_t row, int64_t col, int64_t rows, int64_t cols);
// Writes `block` into `a` from (row, col) on; what lies beyond `a` is left out.
void SetBlock(const Dense& block, int64_t row, int64_t col, Dense* a);

// a = sum_i values[i] left_i right_i^T, where left_i and right_i are row i of `left` (d x rows) and
// of `right` (d x cols), d = min(rows, cols); values descend. The vectors of the short side are
// orthonormal; those of the long side are 0 where the singular value is 0.
struct SingularPairs {
  Dense left, right;
  std::vector<double> values;
};
// One-sided Jacobi: exact to rounding, and singular values above 1e-15 |a|_F to high relative
// accuracy.
SingularPairs SingularValueDecomposition(const Dense& a);
// Its values alone.
std::vector<double> SingularValues(const Dense& a);
// The largest of them; 0 for a matrix of zeros.
double SpectralNorm(const Dense& a);

// rows x cols with orthonormal rows (rows <= cols), pseudo-random from the seed.
Dense RandomOrthonormalRows(int64_t rows, int64_t cols, uint64_t seed);
// Standard normal entries, pseudo-random from the seed.
Dense RandomNormal(int64_t rows, int64_t cols, uint64_t seed);

}  // namespace stiefel

#endif  // STIEFEL_KERNELS_REFERENCE_DENSE_H_
