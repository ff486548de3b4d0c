#include "common/rect.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <ostream>
#include <random>
#include <vector>

namespace stiefel {

void PrintTo(const Rect& rect, std::ostream* out) { *out << rect.DebugString(); }

namespace {

constexpr int64_t kRows = 13, kCols = 11;

std::vector<std::vector<int>> Bitmap(const std::vector<Rect>& rects) {
  std::vector<std::vector<int>> counts(kRows, std::vector<int>(kCols, 0));
  for (const Rect& rect : rects) {
    for (int64_t r = std::max<int64_t>(0, rect.row_begin); r < std::min(kRows, rect.row_end); ++r) {
      for (int64_t c = std::max<int64_t>(0, rect.col_begin); c < std::min(kCols, rect.col_end);
           ++c) {
        ++counts[r][c];
      }
    }
  }
  return counts;
}

// May reach outside the matrix and may be empty.
Rect RandomRect(std::mt19937* random) {
  const auto r = static_cast<int64_t>((*random)() % (kRows + 2)) - 1;
  const auto c = static_cast<int64_t>((*random)() % (kCols + 2)) - 1;
  return Rect{r, r + static_cast<int64_t>((*random)() % 6), c,
              c + static_cast<int64_t>((*random)() % 6)};
}

TEST(Gaps, AgreeWithABitmap) {
  std::mt19937 random(1);
  for (int round = 0; round < 3000; ++round) {
    std::vector<Rect> cover(random() % 30);
    for (Rect& rect : cover) rect = RandomRect(&random);
    const auto covered = Bitmap(cover);
    const std::vector<Rect> gaps = Gaps(WholeRect(kRows, kCols), cover);
    const auto missing = Bitmap(gaps);
    for (int64_t r = 0; r < kRows; ++r) {
      for (int64_t c = 0; c < kCols; ++c) {
        // Covered, or in exactly one gap.
        ASSERT_EQ(missing[r][c], covered[r][c] > 0 ? 0 : 1) << round << " " << r << " " << c;
      }
    }
    for (size_t i = 0; i < gaps.size(); ++i) {
      ASSERT_TRUE(ValidateRect(gaps[i], kRows, kCols).ok());
      for (size_t j = 0; j < gaps.size(); ++j) {
        // As wide as possible: no two of the same rows touch sideways, none continues another
        // below.
        ASSERT_FALSE(gaps[i].row_begin == gaps[j].row_begin && gaps[i].row_end == gaps[j].row_end &&
                     gaps[i].col_end == gaps[j].col_begin);
        ASSERT_FALSE(gaps[i].col_begin == gaps[j].col_begin && gaps[i].col_end == gaps[j].col_end &&
                     gaps[i].row_end == gaps[j].row_begin);
      }
    }
    // With a limit: no more than that, and each of them truly uncovered.
    const std::vector<Rect> few = Gaps(WholeRect(kRows, kCols), cover, 2);
    ASSERT_EQ(few.size(), std::min<size_t>(2, gaps.size()));
    for (const Rect& rect : few) {
      for (int64_t r = rect.row_begin; r < rect.row_end; ++r) {
        for (int64_t c = rect.col_begin; c < rect.col_end; ++c) ASSERT_EQ(covered[r][c], 0);
      }
    }
  }
}

TEST(Gaps, Simple) {
  EXPECT_EQ(Gaps(WholeRect(4, 6), {}), (std::vector<Rect>{{0, 4, 0, 6}}));
  EXPECT_EQ(Gaps(WholeRect(4, 6), {{0, 4, 0, 6}}), std::vector<Rect>());
  EXPECT_EQ(Gaps(WholeRect(4, 6), {{0, 2, 0, 6}, {2, 4, 0, 3}}), (std::vector<Rect>{{2, 4, 3, 6}}));
}

TEST(Overlaps, AgreeWithAllPairs) {
  std::mt19937 random(2);
  for (int round = 0; round < 3000; ++round) {
    std::vector<Rect> rects(random() % 20);
    for (Rect& rect : rects) rect = RandomRect(&random);
    std::vector<Overlap> expected;
    for (size_t i = 0; i < rects.size(); ++i) {
      for (size_t j = i + 1; j < rects.size(); ++j) {
        const Rect common = Intersect(rects[i], rects[j]);
        if (!common.empty()) {
          expected.push_back({static_cast<int64_t>(i), static_cast<int64_t>(j), common});
        }
      }
    }
    ASSERT_EQ(Overlaps(rects), expected) << round;
    ASSERT_EQ(Overlaps(rects, 1).size(), std::min<size_t>(1, expected.size()));
  }
}

TEST(Subtract, LeavesExactlyTheRest) {
  std::mt19937 random(3);
  for (int round = 0; round < 3000; ++round) {
    const Rect a = RandomRect(&random), b = RandomRect(&random);
    const auto in_a = Bitmap({a}), in_b = Bitmap({b}), rest = Bitmap(Subtract(a, b));
    for (int64_t r = 0; r < kRows; ++r) {
      for (int64_t c = 0; c < kCols; ++c) {
        ASSERT_EQ(rest[r][c], in_a[r][c] && !in_b[r][c] ? 1 : 0);
      }
    }
  }
}

TEST(ValidateRect, RefusesWithTheNumbers) {
  EXPECT_TRUE(ValidateRect({0, 3, 0, 5}, 3, 5).ok());
  for (const Rect& bad :
       {Rect{0, 4, 0, 5}, Rect{0, 3, -1, 5}, Rect{2, 2, 0, 5}, Rect{2, 1, 0, 5}}) {
    const absl::Status status = ValidateRect(bad, 3, 5);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_NE(status.message().find(bad.DebugString()), absl::string_view::npos) << status;
  }
  // CASES A21: sizes that are not positive, or whose product overflows.
  EXPECT_FALSE(ValidateRect({0, 1, 0, 1}, 0, 5).ok());
  EXPECT_FALSE(ValidateRect({0, 1, 0, 1}, int64_t{1} << 40, int64_t{1} << 40).ok());
}

// 10^5 blocks of a matrix of 10^12 elements, in the arrangements that are worst for a sweep: the
// work must stay that of the input. Quadratic code takes minutes here.
TEST(Sweep, LargeInputs) {
  constexpr int64_t kCount = 100000, kSide = 1000000;
  const Rect whole = WholeRect(kSide, kSide);
  std::vector<Rect> stairs, columns, nested;
  for (int64_t i = 0; i < kCount; ++i) {
    stairs.push_back({i * 10, kSide, i * 10, i * 10 + 10});          // Every row opens a column.
    columns.push_back({0, kSide, i * 10, i * 10 + 10});              // Side by side.
    nested.push_back({i * 5, kSide - i * 5, i * 5, kSide - i * 5});  // Each inside the one before.
  }
  EXPECT_EQ(Gaps(whole, columns), std::vector<Rect>());
  EXPECT_EQ(Overlaps(columns), std::vector<Overlap>());
  EXPECT_EQ(Overlaps(stairs), std::vector<Overlap>());
  const std::vector<Rect> steps = Gaps(whole, stairs);
  EXPECT_EQ(steps.size(), kCount - 1);
  EXPECT_EQ(Gaps(whole, nested).size(), 0u);
  EXPECT_EQ(Overlaps(nested, 100).size(), 100u);

  // Crossing bars leave a quadratic number of holes; a caller who reports asks for a few.
  std::vector<Rect> bars;
  for (int64_t i = 0; i < kCount / 2; ++i) {
    bars.push_back({i * 20, i * 20 + 10, 0, kSide});
    bars.push_back({0, kSide, i * 20, i * 20 + 10});
  }
  EXPECT_EQ(Gaps(whole, bars, 10).size(), 10u);
}

}  // namespace
}  // namespace stiefel
