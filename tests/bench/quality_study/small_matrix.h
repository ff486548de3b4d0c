// Plain products of small row-major fp32 matrices, enough for the problems of the quality study.
#ifndef STIEFEL_TESTS_BENCH_QUALITY_STUDY_SMALL_MATRIX_H_
#define STIEFEL_TESTS_BENCH_QUALITY_STUDY_SMALL_MATRIX_H_

#include <cstdint>
#include <random>
#include <vector>

namespace stiefel::quality {

struct SmallMatrix {
  int64_t rows = 0, cols = 0;
  std::vector<float> values;

  SmallMatrix() = default;
  SmallMatrix(int64_t rows, int64_t cols) : rows(rows), cols(cols), values(rows * cols) {}
  float* row(int64_t i) { return values.data() + i * cols; }
  const float* row(int64_t i) const { return values.data() + i * cols; }
};

SmallMatrix RandomNormal(int64_t rows, int64_t cols, double deviation, std::mt19937_64* random);
// Orthonormal columns; REQUIRES: rows >= cols.
SmallMatrix RandomOrthonormal(int64_t rows, int64_t cols, std::mt19937_64* random);
SmallMatrix Transposed(const SmallMatrix& a);
// a b;  a b^T;  a^T b
SmallMatrix Multiply(const SmallMatrix& a, const SmallMatrix& b);
SmallMatrix MultiplyTransposed(const SmallMatrix& a, const SmallMatrix& b);
SmallMatrix TransposedMultiply(const SmallMatrix& a, const SmallMatrix& b);
// a - b
SmallMatrix Difference(const SmallMatrix& a, const SmallMatrix& b);
// a with column j multiplied by factors[j].
SmallMatrix ScaleColumns(SmallMatrix a, const std::vector<double>& factors);
double SumSquares(const SmallMatrix& a);
// count values from 1 down to `last`, each the same multiple of the one before.
std::vector<double> Geometric(int64_t count, double last);

}  // namespace stiefel::quality

#endif  // STIEFEL_TESTS_BENCH_QUALITY_STUDY_SMALL_MATRIX_H_
