#include "client/examples/byte_lm/learning_rate.h"

#include "gtest/gtest.h"

namespace stiefel::byte_lm {
namespace {

TEST(LearningRateTest, WarmsUpThenFallsToTheLastStep) {
  EXPECT_DOUBLE_EQ(LearningRateFactor(1, 1000), 1.0 / 20);
  EXPECT_DOUBLE_EQ(LearningRateFactor(20, 1000), 1);
  EXPECT_DOUBLE_EQ(LearningRateFactor(201, 1000), 1);
  EXPECT_DOUBLE_EQ(LearningRateFactor(601, 1000), 0.5);
  EXPECT_DOUBLE_EQ(LearningRateFactor(1000, 1000), 1.0 / 800);
}

TEST(LearningRateTest, EveryStepOfAnyRunMoves) {
  for (int64_t steps : {1, 2, 3, 10, 500}) {
    for (int64_t step = 1; step <= steps; ++step) {
      EXPECT_GT(LearningRateFactor(step, steps), 0) << step << " of " << steps;
      EXPECT_LE(LearningRateFactor(step, steps), 1) << step << " of " << steps;
    }
  }
}

}  // namespace
}  // namespace stiefel::byte_lm
