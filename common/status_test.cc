#include "common/status.h"

#include <gtest/gtest.h>

#include <memory>
#include <string>

namespace stiefel {
namespace {

absl::Status Twice(const absl::Status& status, int* evaluations) {
  STIEFEL_RETURN_IF_ERROR((++*evaluations, status));
  STIEFEL_RETURN_IF_ERROR((++*evaluations, absl::OkStatus()));
  return absl::OkStatus();
}

TEST(StatusMacros, ReturnIfErrorStopsAtTheFirstErrorAndEvaluatesOnce) {
  int evaluations = 0;
  EXPECT_TRUE(Twice(absl::OkStatus(), &evaluations).ok());
  EXPECT_EQ(evaluations, 2);
  evaluations = 0;
  EXPECT_EQ(Twice(absl::AbortedError("x"), &evaluations), absl::AbortedError("x"));
  EXPECT_EQ(evaluations, 1);
}

absl::StatusOr<std::unique_ptr<int>> Box(int value) {
  if (value < 0) return absl::OutOfRangeError("negative");
  return std::make_unique<int>(value);
}

absl::StatusOr<int> Sum(int a, int b) {
  STIEFEL_ASSIGN_OR_RETURN(std::unique_ptr<int> first, Box(a));
  STIEFEL_ASSIGN_OR_RETURN(const std::unique_ptr<int> second, Box(b));
  STIEFEL_ASSIGN_OR_RETURN(first, Box(*first + *second));
  return *first;
}

TEST(StatusMacros, AssignOrReturnMovesTheValueOrReturnsTheError) {
  EXPECT_EQ(*Sum(2, 3), 5);
  EXPECT_EQ(Sum(2, -3).status(), absl::OutOfRangeError("negative"));
  EXPECT_EQ(Sum(-2, 3).status(), absl::OutOfRangeError("negative"));
}

}  // namespace
}  // namespace stiefel
