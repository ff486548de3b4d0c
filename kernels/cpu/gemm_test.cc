#include "kernels/cpu/gemm.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <random>
#include <vector>

#include "common/dtype.h"
#include "gtest/gtest.h"
#include "kernels/cpu/bf16_matmul.h"

namespace stiefel {
namespace {

std::vector<float> Random(int64_t n, uint32_t seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  std::vector<float> x(n);
  for (float& v : x) v = normal(random);
  return x;
}

MatrixView View(std::vector<float>* values, int64_t rows, int64_t cols, int64_t batch = 1) {
  return {values->data(), DType::kFp32, rows, cols, batch};
}

double Wanted(const GemmArgs& args, int64_t matrix, int64_t i, int64_t j) {
  const auto at = [&](const MatrixView& view, int64_t row, int64_t col) {
    return static_cast<double>(
        static_cast<const float*>(view.data)[(matrix * view.rows + row) * view.cols + col]);
  };
  double sum = 0;
  for (int64_t k = 0; k < args.a.cols; ++k) {
    sum += at(args.a, i, k) * (args.transpose_b ? at(args.b, j, k) : at(args.b, k, j));
  }
  return args.alpha * sum + (args.beta == 0 ? 0 : args.beta * at(args.d, i, j));
}

TEST(CpuGemmTest, ProductsOfEveryKindAgreeWithPlainLoops) {
  ThreadPool pool(2);
  for (const auto& [m, k, n, batch] : {std::tuple<int64_t, int64_t, int64_t, int64_t>{1, 1, 1, 1},
                                       {3, 5, 7, 2},
                                       {200, 33, 520, 1},
                                       {385, 20, 1, 1}}) {
    std::vector<float> a = Random(batch * m * k, 1), b = Random(batch * k * n, 2),
                       d = Random(batch * m * n, 3);
    std::vector<float> c(batch * m * n);
    for (bool transpose : {false, true}) {
      GemmArgs args;
      args.a = View(&a, m, k, batch);
      args.b = transpose ? View(&b, n, k, batch) : View(&b, k, n, batch);
      args.c = View(&c, m, n, batch);
      args.d = View(&d, m, n, batch);
      args.transpose_b = transpose;
      args.alpha = 0.5f;
      for (float beta : {0.0f, -1.5f}) {
        args.beta = beta;
        ASSERT_TRUE(CpuGemm(&pool, args).ok());
        for (int64_t matrix = 0; matrix < batch; ++matrix) {
          for (int64_t i = 0; i < m; i += 7) {
            for (int64_t j = 0; j < n; j += 3) {
              EXPECT_NEAR(c[(matrix * m + i) * n + j], Wanted(args, matrix, i, j), 1e-4)
                  << m << " " << n << " " << beta;
            }
          }
        }
      }
    }
  }
}

TEST(CpuGemmTest, SymmetricProductsAreSymmetricToTheBitAndTheSameOnAnyThreads) {
  for (int64_t m : {5, 128, 129, 192, 193, 450}) {
    std::vector<float> x = Random(m * 77, 4), one(m * m), three(m * m);
    GemmArgs args;
    args.a = args.b = View(&x, m, 77);
    args.transpose_b = true;
    args.symmetric = true;
    args.c = View(&one, m, m);
    ThreadPool alone(1), pool(3);
    ASSERT_TRUE(CpuGemm(&alone, args).ok());
    args.c = View(&three, m, m);
    ASSERT_TRUE(CpuGemm(&pool, args).ok());
    EXPECT_EQ(std::memcmp(one.data(), three.data(), one.size() * sizeof(float)), 0) << m;
    for (int64_t i = 0; i < m; ++i) {
      for (int64_t j = 0; j < i; ++j) ASSERT_EQ(one[i * m + j], one[j * m + i]);
      EXPECT_NEAR(one[i * m + m - 1], Wanted(args, 0, i, m - 1), 1e-4);
    }
  }
}

TEST(CpuGemmTest, Bf16OperandsGiveTheRoundedProduct) {
  if (!CpuHasBf16()) GTEST_SKIP() << "no bf16 on this processor";
  ThreadPool pool(2);
  const int64_t m = 150, k = 40;
  std::vector<float> exact = Random(m * k, 5), d = Random(m * m, 6);
  std::vector<uint16_t> x(m * k), symmetric(m * m), c(m * m);
  for (int64_t i = 0; i < m * k; ++i) {
    x[i] = FloatToBf16(exact[i]);
    exact[i] = Bf16ToFloat(x[i]);
  }
  for (int64_t i = 0; i < m; ++i) {
    for (int64_t j = 0; j < m; ++j) {
      symmetric[i * m + j] = FloatToBf16(d[std::max(i, j) * m + std::min(i, j)]);
      d[i * m + j] = Bf16ToFloat(symmetric[i * m + j]);
    }
  }
  for (bool half : {false, true}) {
    GemmArgs args;
    args.a = args.b = {x.data(), DType::kBf16, m, k, 1};
    args.c = {c.data(), DType::kBf16, m, m, 1};
    args.d = {symmetric.data(), DType::kBf16, m, m, 1};
    args.transpose_b = true;
    args.symmetric = half;
    args.alpha = 2;
    args.beta = -1.5f;
    ASSERT_TRUE(CpuGemm(&pool, args).ok());
    GemmArgs wanted = args;
    wanted.a = wanted.b = View(&exact, m, k);
    wanted.d = View(&d, m, m);
    for (int64_t i = 0; i < m; ++i) {
      for (int64_t j = 0; j < m; ++j) {
        const double want = Wanted(wanted, 0, i, j);
        ASSERT_NEAR(Bf16ToFloat(c[i * m + j]), want, 0x1p-8 * std::fabs(want) + 1e-4);
      }
    }
  }
}

TEST(CpuGemmTest, ResidualOfKnownMatrices) {
  ThreadPool pool(2);
  double residual = -1;
  std::vector<float> identity(300 * 300);
  for (int64_t i = 0; i < 300; ++i) identity[i * 300 + i] = 1;
  ASSERT_TRUE(CpuResidual(&pool, View(&identity, 300, 300), &residual).ok());
  EXPECT_EQ(residual, 0);
  for (int64_t i = 0; i < 300; ++i) identity[i * 300 + i] = 2;  // X X^T - I = 3 I
  ASSERT_TRUE(CpuResidual(&pool, View(&identity, 300, 300), &residual).ok());
  EXPECT_NEAR(residual, 3, 1e-6);
}

// From R = X X^T and P a polynomial of it, the residual of P X, of which all rows or some are
// sampled.
TEST(CpuGemmTest, ResidualFromGramMatrixAndPolynomialIsThatOfTheProduct) {
  ThreadPool pool(2);
  for (const int64_t m : {1, 13, 200, 300}) {
    const int64_t n = m + 50;
    std::vector<float> x = Random(m * n, 7), r(m * m), p(m * m), product(m * n);
    for (float& v : x) v /= std::sqrt(static_cast<float>(m * n));
    const auto multiply = [&](const MatrixView& a, const MatrixView& b, bool transpose,
                              const MatrixView& c) {
      GemmArgs args;
      args.a = a;
      args.b = b;
      args.c = c;
      args.transpose_b = transpose;
      ASSERT_TRUE(CpuGemm(&pool, args).ok());
    };
    multiply(View(&x, m, n), View(&x, m, n), true, View(&r, m, m));
    for (int64_t i = 0; i < m * m; ++i) p[i] = -4 * r[i] + (i % (m + 1) == 0 ? 3.0f : 0.0f);
    multiply(View(&p, m, m), View(&x, m, n), false, View(&product, m, n));
    double want = -1, residual = -1;
    ASSERT_TRUE(CpuResidual(&pool, View(&product, m, n), &want).ok());
    ASSERT_TRUE(CpuResidual(&pool, View(&r, m, m), View(&p, m, m), &residual).ok());
    EXPECT_NEAR(residual, want, 1e-5 * want) << m;
  }
}

// CASES F13.
TEST(Bf16MatmulTest, AThousandShapesLeaveABoundedNumberOfPrimitives) {
  if (!CpuHasBf16()) GTEST_SKIP() << "no bf16 on this processor";
  std::vector<uint16_t> a(4000, 0x3F80), b(4000, 0x3F80);  // ones
  std::vector<float> c(4000);
  for (int64_t i = 1; i <= 1000; ++i) {
    ASSERT_TRUE(
        Bf16Matmul({1, i % 3 + 1, i, i, i % 3 + 1, false}, a.data(), b.data(), c.data()).ok());
    EXPECT_EQ(c[0], static_cast<float>(i));
    ASSERT_LE(CachedPrimitives(), kMaxPrimitives);
  }
}

}  // namespace
}  // namespace stiefel
