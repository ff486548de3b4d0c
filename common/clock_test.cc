#include "common/clock.h"

#include <gtest/gtest.h>

namespace stiefel {
namespace {

TEST(Clock, RealTimeNeverDecreases) {
  int64_t last = RealClock().NowMicros();
  const int64_t first = last;
  // Ends because time passes; a clock that stands still would spin until the test's time limit.
  while (last < first + 100) {
    const int64_t now = RealClock().NowMicros();
    ASSERT_GE(now, last);
    last = now;
  }
}

TEST(Clock, FakeTimeMovesOnlyWhenTold) {
  FakeClock clock(5);
  EXPECT_EQ(clock.NowMicros(), 5);
  EXPECT_EQ(clock.NowMicros(), 5);
  clock.Advance(37);
  EXPECT_EQ(clock.NowMicros(), 42);
}

}  // namespace
}  // namespace stiefel
