#include "common/errors.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

namespace stiefel {
namespace {

using ::testing::HasSubstr;

void ExpectError(const absl::Status& status, absl::StatusCode code,
                 std::initializer_list<const char*> parts) {
  EXPECT_EQ(status.code(), code) << status;
  for (const char* part : parts) EXPECT_THAT(std::string(status.message()), HasSubstr(part));
}

TEST(Errors, CarryTheirNumbers) {
  ExpectError(StepMismatch("matrix h.3.w", 7, 6), absl::StatusCode::kFailedPrecondition,
              {"step 7", "h.3.w", "expected 6"});
  ExpectError(AttemptMismatch("Chunk", 7, 1, 2), absl::StatusCode::kFailedPrecondition,
              {"attempt 1", "step 7", "attempt 2"});
  ExpectError(PlacementEpochMismatch("Chunk", 3, 4), absl::StatusCode::kFailedPrecondition,
              {"placement_epoch 3", "expected 4"});
  ExpectError(StaleIncarnation(2, 5, 0xABC, 6, 0xDEF), absl::StatusCode::kFailedPrecondition,
              {"rank 2", "(5, 0000000000000abc)", "(6, 0000000000000def)"});
  ExpectError(RunMismatch("OpenRun", "a/1", "b/2"), absl::StatusCode::kFailedPrecondition,
              {"a/1", "b/2"});
  ExpectError(UnknownName("preset", "adam"), absl::StatusCode::kNotFound, {"preset", "'adam'"});
  ExpectError(DuplicateName("parameter", "w"), absl::StatusCode::kInvalidArgument, {"'w'"});
  ExpectError(SizeMismatch("chunk of w", 10, 12, "bytes"), absl::StatusCode::kInvalidArgument,
              {"10 bytes", "expected 12"});
  ExpectError(IndexOutOfRange("rank", 4, 4), absl::StatusCode::kInvalidArgument,
              {"index 4", "[0, 4)"});
  ExpectError(ChecksumMismatch("chunk", 1, 0xE3069283), absl::StatusCode::kDataLoss,
              {"00000001", "e3069283"});
  ExpectError(DoesNotFit("server 1", 10995116277760, 1 << 30), absl::StatusCode::kResourceExhausted,
              {"10995116277760", "1073741824"});
}

TEST(Errors, BadShapeSaysWhetherTheSizeIsTooSmallOrTooLarge) {
  ExpectError(BadShape("w", 0, 4), absl::StatusCode::kInvalidArgument, {"0 x 4", "not positive"});
  ExpectError(BadShape("w", int64_t{1} << 40, int64_t{1} << 40), absl::StatusCode::kInvalidArgument,
              {"1099511627776", "overflow"});
}

}  // namespace
}  // namespace stiefel
