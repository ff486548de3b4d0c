#include "client/examples/byte_lm/gemm.h"

#include <cmath>
#include <random>

#include "gtest/gtest.h"

namespace stiefel::byte_lm {
namespace {

std::vector<float> Random(int64_t count, std::mt19937* rng) {
  std::normal_distribution<float> normal;
  std::vector<float> values(count);
  for (float& value : values) value = normal(*rng);
  return values;
}

struct Shape {
  int64_t m, n, k;
};

class GemmTest : public ::testing::TestWithParam<Shape> {};

// Each operand plain and transposed, with and without accumulation, against a plain fp64 loop. The
// bound is k ulp of the sum of magnitudes, the worst that any order of summation can do.
TEST_P(GemmTest, AgreesWithPlainLoops) {
  const auto [m, n, k] = GetParam();
  std::mt19937 rng(7);
  const std::vector<float> a = Random(m * k, &rng), b = Random(k * n, &rng);
  const std::vector<float> before = Random(m * n, &rng);
  Gemm gemm;
  for (int variant = 0; variant < 8; ++variant) {
    const MatrixView left =
        variant & 1 ? RowMajor(a.data(), m).Transposed() : RowMajor(a.data(), k);
    const MatrixView right =
        variant & 2 ? RowMajor(b.data(), k).Transposed() : RowMajor(b.data(), n);
    const bool accumulate = variant & 4;
    std::vector<float> c = before;
    gemm.Multiply(m, n, k, left, right, accumulate, c.data());
    for (int64_t i = 0; i < m; ++i) {
      for (int64_t j = 0; j < n; ++j) {
        double sum = accumulate ? before[i * n + j] : 0, magnitude = std::fabs(sum);
        for (int64_t p = 0; p < k; ++p) {
          const double term =
              static_cast<double>(left.data[i * left.row_stride + p * left.col_stride]) *
              right.data[p * right.row_stride + j * right.col_stride];
          sum += term;
          magnitude += std::fabs(term);
        }
        ASSERT_NEAR(c[i * n + j], sum, magnitude * (k + 2) * 6e-8)
            << "variant " << variant << " at " << i << ", " << j;
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Shapes, GemmTest,
                         ::testing::Values(Shape{1, 1, 1}, Shape{12, 32, 256}, Shape{24, 64, 512},
                                           Shape{13, 33, 257}, Shape{5, 70, 3},
                                           Shape{100, 7, 300}));

}  // namespace
}  // namespace stiefel::byte_lm
