#include "common/interval_set.h"

#include <gtest/gtest.h>

#include <limits>
#include <random>
#include <vector>

namespace stiefel {
namespace {

using Pairs = std::vector<std::pair<int64_t, int64_t>>;

Pairs Intervals(const IntervalSet& set) { return Pairs(set.begin(), set.end()); }

TEST(IntervalSet, TouchingIntervalsMerge) {
  IntervalSet set;
  set.Add(10, 20);
  set.Add(30, 40);
  set.Add(5, 5);
  set.Add(9, 3);
  EXPECT_EQ(Intervals(set), (Pairs{{10, 20}, {30, 40}}));
  set.Add(20, 30);
  EXPECT_EQ(Intervals(set), (Pairs{{10, 40}}));
  set.Clear();
  EXPECT_TRUE(set.empty());
  EXPECT_EQ(set.Total(), 0);
}

TEST(IntervalSet, EndsOfInt64) {
  constexpr int64_t kMax = std::numeric_limits<int64_t>::max();
  IntervalSet set;
  set.Add(kMax - 1, kMax);
  set.Add(0, 1);
  EXPECT_EQ(set.Gaps(0, kMax), (Pairs{{1, kMax - 1}}));
  EXPECT_TRUE(set.Contains(kMax - 1, kMax));
}

// Random operations against a bitmap.
TEST(IntervalSet, AgreesWithABitmap) {
  constexpr int64_t kSize = 60;
  std::mt19937 random(1);
  for (int round = 0; round < 200; ++round) {
    IntervalSet set;
    std::vector<bool> bits(kSize, false);
    for (int step = 0; step < 25; ++step) {
      const int64_t begin = random() % kSize, end = begin + random() % 9;
      set.Add(begin, std::min(end, kSize));
      for (int64_t i = begin; i < std::min(end, kSize); ++i) bits[i] = true;

      Pairs expected_gaps;
      int64_t total = 0;
      const int64_t from = random() % kSize, to = from + random() % (kSize - from + 1);
      bool all = true, any = false;
      for (int64_t i = 0; i < kSize; ++i) total += bits[i];
      for (int64_t i = from; i < to; ++i) {
        all &= bits[i];
        any |= bits[i];
        if (bits[i]) continue;
        if (!expected_gaps.empty() && expected_gaps.back().second == i) {
          ++expected_gaps.back().second;
        } else {
          expected_gaps.emplace_back(i, i + 1);
        }
      }
      ASSERT_EQ(set.Gaps(from, to), expected_gaps);
      ASSERT_EQ(set.Contains(from, to), all);
      ASSERT_EQ(set.Intersects(from, to), any);
      ASSERT_EQ(set.Total(), total);
    }
    // The same set built the other way round is equal; one more element makes it unequal.
    IntervalSet other;
    for (int64_t i = kSize; i-- > 0;) {
      if (bits[i]) other.Add(i, i + 1);
    }
    ASSERT_EQ(set, other);
    other.Add(kSize + 1, kSize + 2);
    ASSERT_NE(set, other);
  }
}

}  // namespace
}  // namespace stiefel
