#include "tests/bench/quality_study/small_matrix.h"

#include <cmath>

namespace stiefel::quality {

SmallMatrix RandomNormal(int64_t rows, int64_t cols, double deviation, std::mt19937_64* random) {
  std::normal_distribution<double> normal(0, deviation);
  SmallMatrix a(rows, cols);
  for (float& value : a.values) value = static_cast<float>(normal(*random));
  return a;
}

SmallMatrix RandomOrthonormal(int64_t rows, int64_t cols, std::mt19937_64* random) {
  SmallMatrix q = RandomNormal(cols, rows, 1, random);  // its rows are made orthonormal
  for (int64_t i = 0; i < cols; ++i) {
    for (int64_t j = 0; j < 2 * i; ++j) {  // twice, for the digits
      const float* other = q.row(j % i);
      double inner = 0;
      for (int64_t k = 0; k < rows; ++k) inner += static_cast<double>(other[k]) * q.row(i)[k];
      for (int64_t k = 0; k < rows; ++k) q.row(i)[k] -= static_cast<float>(inner * other[k]);
    }
    double squares = 0;
    for (int64_t k = 0; k < rows; ++k) squares += static_cast<double>(q.row(i)[k]) * q.row(i)[k];
    for (int64_t k = 0; k < rows; ++k)
      q.row(i)[k] = static_cast<float>(q.row(i)[k] / std::sqrt(squares));
  }
  return Transposed(q);
}

SmallMatrix Transposed(const SmallMatrix& a) {
  SmallMatrix t(a.cols, a.rows);
  for (int64_t i = 0; i < a.rows; ++i) {
    for (int64_t j = 0; j < a.cols; ++j) t.row(j)[i] = a.row(i)[j];
  }
  return t;
}

SmallMatrix Multiply(const SmallMatrix& a, const SmallMatrix& b) {
  SmallMatrix c(a.rows, b.cols);
  for (int64_t i = 0; i < a.rows; ++i) {
    for (int64_t k = 0; k < a.cols; ++k) {
      const float factor = a.row(i)[k];
      const float* from = b.row(k);
      float* to = c.row(i);
      for (int64_t j = 0; j < b.cols; ++j) to[j] += factor * from[j];
    }
  }
  return c;
}

SmallMatrix MultiplyTransposed(const SmallMatrix& a, const SmallMatrix& b) {
  return Multiply(a, Transposed(b));
}

SmallMatrix TransposedMultiply(const SmallMatrix& a, const SmallMatrix& b) {
  return Multiply(Transposed(a), b);
}

SmallMatrix Difference(const SmallMatrix& a, const SmallMatrix& b) {
  SmallMatrix c = a;
  for (size_t i = 0; i < c.values.size(); ++i) c.values[i] -= b.values[i];
  return c;
}

SmallMatrix ScaleColumns(SmallMatrix a, const std::vector<double>& factors) {
  for (int64_t i = 0; i < a.rows; ++i) {
    for (int64_t j = 0; j < a.cols; ++j) a.row(i)[j] *= static_cast<float>(factors[j]);
  }
  return a;
}

double SumSquares(const SmallMatrix& a) {
  double sum = 0;
  for (float value : a.values) sum += static_cast<double>(value) * value;
  return sum;
}

std::vector<double> Geometric(int64_t count, double last) {
  std::vector<double> values(count, 1.0);
  for (int64_t i = 1; i < count; ++i) {
    values[i] = std::pow(last, static_cast<double>(i) / static_cast<double>(count - 1));
  }
  return values;
}

}  // namespace stiefel::quality
