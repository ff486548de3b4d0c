#include "kernels/cpu/symmetric_eigen.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "gtest/gtest.h"

namespace stiefel {
namespace {

using Matrix = std::vector<double>;  // n x n

Matrix RandomSymmetric(int64_t n, uint32_t seed) {
  std::mt19937 random(seed);
  std::normal_distribution<double> normal;
  Matrix a(n * n);
  for (int64_t i = 0; i < n; ++i) {
    for (int64_t j = 0; j <= i; ++j) a[i * n + j] = a[j * n + i] = normal(random);
  }
  return a;
}

// V^T diag(values) V
Matrix Compose(int64_t n, const std::vector<double>& values, const Matrix& vectors) {
  Matrix a(n * n);
  for (int64_t i = 0; i < n; ++i) {
    for (int64_t j = 0; j <= i; ++j) {
      double sum = 0;
      for (int64_t k = 0; k < n; ++k) sum += vectors[k * n + i] * values[k] * vectors[k * n + j];
      a[i * n + j] = a[j * n + i] = sum;
    }
  }
  return a;
}

double Largest(const Matrix& a) {
  double largest = 0;
  for (double v : a) largest = std::max(largest, std::fabs(v));
  return largest;
}

// Decomposes `a` and expects orthonormal vectors, descending values, and A back.
std::vector<double> Check(int64_t n, const Matrix& a) {
  Matrix work = a, vectors(n * n);
  std::vector<double> values(n), alone(n);
  EXPECT_TRUE(SymmetricEigen(work.data(), n, values.data(), vectors.data()));
  EXPECT_TRUE(std::is_sorted(values.rbegin(), values.rend())) << n;
  const double bound = 1e-14 * static_cast<double>(n + 10);
  for (int64_t i = 0; i < n; ++i) {
    for (int64_t j = 0; j <= i; ++j) {
      EXPECT_NEAR(Dot(&vectors[i * n], &vectors[j * n], n), i == j ? 1 : 0, bound) << n;
    }
  }
  const Matrix back = Compose(n, values, vectors);
  for (int64_t i = 0; i < n * n; ++i) EXPECT_NEAR(back[i], a[i], bound * Largest(a)) << n;

  work = a;
  EXPECT_TRUE(SymmetricEigen(work.data(), n, alone.data(), nullptr));
  for (int64_t i = 0; i < n; ++i) EXPECT_NEAR(alone[i], values[i], bound * Largest(a)) << n;
  return values;
}

TEST(SymmetricEigenTest, RandomMatricesComeBackFromTheirPairs) {
  for (int64_t n : {1, 2, 3, 4, 7, 16, 33, 80}) Check(n, RandomSymmetric(n, 10 + n));
}

TEST(SymmetricEigenTest, KnownEigenvaluesOverTwelveDecadesWithEqualOnesAndZeros) {
  const int64_t n = 24;
  Matrix work = RandomSymmetric(n, 3), vectors(n * n);
  std::vector<double> values(n);
  ASSERT_TRUE(SymmetricEigen(work.data(), n, values.data(), vectors.data()));
  for (int64_t i = 0; i < n; ++i) {
    values[i] = i < 5 ? 1 : i < 17 ? std::pow(10.0, -static_cast<double>(i - 4)) : 0;
  }
  const std::vector<double> found = Check(n, Compose(n, values, vectors));
  for (int64_t i = 0; i < n; ++i) EXPECT_NEAR(found[i], values[i], 1e-14) << i;
}

TEST(SymmetricEigenTest, ZeroDiagonalAndRankOne) {
  EXPECT_EQ(Check(5, Matrix(25, 0.0)), std::vector<double>(5, 0.0));
  Matrix diagonal(16, 0.0);
  for (int i = 0; i < 4; ++i) diagonal[i * 5] = i - 1;
  EXPECT_EQ(Check(4, diagonal), (std::vector<double>{2, 1, 0, -1}));
  EXPECT_NEAR(Check(9, Matrix(81, 1.0))[0], 9, 1e-13);
}

TEST(SymmetricEigenTest, TinyAndHugeEntriesKeepTheirScale) {
  const Matrix a = RandomSymmetric(12, 5);
  for (double scale : {1e-90, 1e76}) {
    Matrix scaled = a;
    for (double& v : scaled) v *= scale;
    Check(12, scaled);
  }
}

TEST(SymmetricEigenTest, EntriesThatAreNotFiniteAreRefused) {
  for (double bad : {std::nan(""), std::numeric_limits<double>::infinity()}) {
    Matrix a = RandomSymmetric(6, 6), vectors(36);
    a[3 * 6 + 2] = a[2 * 6 + 3] = bad;
    std::vector<double> values(6);
    EXPECT_FALSE(SymmetricEigen(a.data(), 6, values.data(), vectors.data()));
  }
}

}  // namespace
}  // namespace stiefel
