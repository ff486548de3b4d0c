#include "common/checked_math.h"

#include <gtest/gtest.h>

#include <limits>

namespace stiefel {
namespace {

constexpr int64_t kMax = std::numeric_limits<int64_t>::max();
constexpr int64_t kMin = std::numeric_limits<int64_t>::min();

TEST(CheckedMath, RefusesExactlyWhatOverflows) {
  int64_t r = 0;
  EXPECT_TRUE(CheckedAdd(kMax - 1, 1, &r));
  EXPECT_EQ(r, kMax);
  EXPECT_FALSE(CheckedAdd(kMax, 1, &r));
  EXPECT_FALSE(CheckedAdd(kMin, -1, &r));
  EXPECT_TRUE(CheckedMul(int64_t{1} << 31, int64_t{1} << 31, &r));
  EXPECT_EQ(r, int64_t{1} << 62);
  EXPECT_FALSE(CheckedMul(int64_t{1} << 32, int64_t{1} << 31, &r));
  EXPECT_FALSE(CheckedMul(kMin, -1, &r));

  r = kMax - 6;
  EXPECT_TRUE(CheckedMulAdd(2, 3, &r));
  EXPECT_EQ(r, kMax);
  EXPECT_FALSE(CheckedMulAdd(1, 1, &r));
}

TEST(CheckedMath, SaturatingStopsAtTheLargest) {
  EXPECT_EQ(SaturatingAdd(kMax - 1, 1), kMax);
  EXPECT_EQ(SaturatingAdd(kMax, 1), kMax);
  EXPECT_EQ(SaturatingMul(3, 5), 15);
  EXPECT_EQ(SaturatingMul(int64_t{1} << 32, int64_t{1} << 32), kMax);
}

TEST(CheckedMath, MatrixBytes) {
  int64_t bytes = 0;
  EXPECT_TRUE(CheckedMatrixBytes(30000, 30000, 4, &bytes));  // CASES E3
  EXPECT_EQ(bytes, 3600000000);
  EXPECT_FALSE(CheckedMatrixBytes(int64_t{1} << 31, int64_t{1} << 30, 4, &bytes));
  EXPECT_FALSE(CheckedMatrixBytes(0, 5, 4, &bytes));
  EXPECT_FALSE(CheckedMatrixBytes(-3, -5, 4, &bytes));
}

}  // namespace
}  // namespace stiefel
