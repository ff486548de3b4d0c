#include "server/need_order.h"

#include <limits>

#include "gtest/gtest.h"

namespace stiefel {
namespace {

RankState Pulls(const std::vector<int32_t>& matrices) {
  RankState rank;
  for (const int32_t matrix : matrices) rank.pull.push_back({matrix, WholeRect(2, 2)});
  return rank;
}

TEST(NeedOrderTest, IsThatOfThePullBlocks) {
  EXPECT_EQ(NeedOrder({Pulls({0, 1, 2})}, 3), (std::vector<int64_t>{0, 1, 2}));
  EXPECT_EQ(NeedOrder({Pulls({2, 0, 0, 1})}, 3), (std::vector<int64_t>{1, 3, 0}));
}

TEST(NeedOrderTest, WhatIsFirstForSomeRankIsFirst) {
  // A pipeline: each rank holds layers of its own, and all of them begin at once.
  EXPECT_EQ(NeedOrder({Pulls({0, 1}), Pulls({2, 3})}, 4), (std::vector<int64_t>{0, 1, 0, 1}));
}

TEST(NeedOrderTest, WhatNobodyPullsIsLast) {
  EXPECT_EQ(NeedOrder({Pulls({1}), Pulls({})}, 2),
            (std::vector<int64_t>{std::numeric_limits<int64_t>::max(), 0}));
}

}  // namespace
}  // namespace stiefel
