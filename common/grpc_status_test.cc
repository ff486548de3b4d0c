#include "common/grpc_status.h"

#include <gtest/gtest.h>

#include <string>

namespace stiefel {
namespace {

TEST(GrpcStatus, EveryCodeSurvivesTheRoundTrip) {
  for (int code = 0; code <= 16; ++code) {
    const absl::Status status(static_cast<absl::StatusCode>(code), code == 0 ? "" : "why");
    EXPECT_EQ(ToGrpcStatus(status).error_code(), code);
    EXPECT_EQ(FromGrpcStatus(ToGrpcStatus(status)), status);
  }
}

TEST(GrpcStatus, CodesOutOfRangeBecomeUnknown) {
  for (int code : {-1, 17, 1000}) {
    EXPECT_EQ(ToGrpcStatus(absl::Status(static_cast<absl::StatusCode>(code), "x")).error_code(),
              grpc::StatusCode::UNKNOWN);
  }
  // gRPC's enumeration has no fixed type: values beyond its bits are undefined in the test itself.
  for (int code : {-1, 17, 31}) {
    EXPECT_EQ(FromGrpcStatus(grpc::Status(static_cast<grpc::StatusCode>(code), "x")),
              absl::UnknownError("x"));
  }
}

TEST(GrpcStatus, LongMessagesAreCut) {
  const std::string exact(kMaxStatusMessageBytes, 'a');
  EXPECT_EQ(ToGrpcStatus(absl::InternalError(exact)).error_message(), exact);

  const std::string cut = ToGrpcStatus(absl::InternalError(exact + "b")).error_message();
  EXPECT_EQ(cut, std::string(kMaxStatusMessageBytes - 3, 'a') + "...");
}

TEST(GrpcStatus, NoCharacterIsCutInHalf) {
  for (int lead = 0; lead < 3; ++lead) {
    std::string message(lead, 'a');
    while (message.size() <= kMaxStatusMessageBytes) message += "\xE2\x82\xAC";  // Euro sign.
    const std::string cut = ToGrpcStatus(absl::InternalError(message)).error_message();
    ASSERT_LE(cut.size(), kMaxStatusMessageBytes);
    EXPECT_EQ((cut.size() - 3 - lead) % 3, 0) << "lead " << lead;
  }
}

}  // namespace
}  // namespace stiefel
