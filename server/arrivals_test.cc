#include "server/arrivals.h"

#include <gtest/gtest.h>

namespace stiefel {
namespace {

absl::StatusOr<PieceVerdict> Piece(RankArrivals* arrivals, int64_t offset, int64_t count,
                                   std::optional<uint32_t> crc = std::nullopt) {
  return arrivals->Reserve(0, 0, 10, offset, count, crc, false);
}

TEST(RankArrivals, PiecesInAnyOrderCompleteAPart) {
  RankArrivals arrivals;
  EXPECT_EQ(*Piece(&arrivals, 6, 4), PieceVerdict::kPlace);
  EXPECT_EQ(*Piece(&arrivals, 0, 6), PieceVerdict::kPlace);
  arrivals.Placed(0, 0, 4);
  EXPECT_FALSE(arrivals.Complete(0, 0, 10));  // accepted, but the copy has not ended
  arrivals.Placed(0, 0, 6);
  EXPECT_TRUE(arrivals.Complete(0, 0, 10));
  EXPECT_FALSE(arrivals.Complete(0, 1, 10));
}

// CASES D27: a piece sent again is recognised and never added.
TEST(RankArrivals, EqualPieceIsADuplicateAndOtherBytesAreAnError) {
  RankArrivals arrivals;
  EXPECT_EQ(*Piece(&arrivals, 0, 5, 7), PieceVerdict::kPlace);
  EXPECT_EQ(*Piece(&arrivals, 0, 5, 7), PieceVerdict::kDuplicate);
  EXPECT_EQ(*Piece(&arrivals, 0, 5), PieceVerdict::kDuplicate);  // no checksum to compare
  const auto other = Piece(&arrivals, 0, 5, 8);
  EXPECT_EQ(other.status().code(), absl::StatusCode::kDataLoss);
  EXPECT_NE(other.status().message().find("crc32c 8, before it was 7"), std::string::npos)
      << other.status();
}

TEST(RankArrivals, OverlapWithOtherBoundsIsRefusedAndChangesNothing) {
  RankArrivals arrivals;
  ASSERT_TRUE(Piece(&arrivals, 2, 3).ok());
  const std::string before = [&] {
    std::string bytes;
    arrivals.AppendCanonical(&bytes);
    return bytes;
  }();
  EXPECT_EQ(Piece(&arrivals, 0, 3).status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(Piece(&arrivals, 4, 3).status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(Piece(&arrivals, 2, 2).status().code(), absl::StatusCode::kInvalidArgument);
  std::string after;
  arrivals.AppendCanonical(&after);
  EXPECT_EQ(before, after);
}

TEST(RankArrivals, BoundsOutsideTheBlockAreOutOfRange) {
  RankArrivals arrivals;
  const int64_t huge = INT64_MAX;
  for (const auto& [offset, count] : std::vector<std::pair<int64_t, int64_t>>{{-1, 2},
                                                                              {0, 0},
                                                                              {0, -1},
                                                                              {0, 11},
                                                                              {10, 1},
                                                                              {9, 2},
                                                                              {huge, 1},
                                                                              {1, huge},
                                                                              {huge, huge}}) {
    EXPECT_EQ(Piece(&arrivals, offset, count).status().code(), absl::StatusCode::kOutOfRange)
        << offset << " " << count;
  }
  EXPECT_TRUE(arrivals.parts().empty());
}

TEST(RankArrivals, AbsentExcludesDataAndDataExcludesAbsent) {
  RankArrivals arrivals;
  EXPECT_EQ(*arrivals.Reserve(0, 0, 10, 0, 0, {}, true), PieceVerdict::kPlace);
  EXPECT_EQ(*arrivals.Reserve(0, 0, 10, 0, 0, {}, true), PieceVerdict::kDuplicate);
  EXPECT_TRUE(arrivals.Complete(0, 0, 10));
  EXPECT_TRUE(arrivals.Absent(0, 0));
  EXPECT_EQ(Piece(&arrivals, 0, 10).status().code(), absl::StatusCode::kInvalidArgument);
  ASSERT_TRUE(arrivals.Reserve(1, 0, 10, 0, 10, {}, false).ok());
  EXPECT_EQ(arrivals.Reserve(1, 0, 10, 0, 0, {}, true).status().code(),
            absl::StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace stiefel
