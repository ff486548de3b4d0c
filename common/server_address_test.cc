#include "common/server_address.h"

#include <gtest/gtest.h>

namespace stiefel {
namespace {

TEST(CheckServerAddress, WantsAHostAndAPort) {
  for (const char* good : {"127.0.0.1:1", "opt0:7770", "[::1]:65535"}) {
    EXPECT_TRUE(CheckServerAddress(good).ok()) << good;
  }
  for (const char* bad : {"", "opt0", ":7770", "opt0:", "opt0:0", "opt0:-1", "opt0:65536",
                          "127.0.0.1:99999", "opt0:http"}) {
    const absl::Status status = CheckServerAddress(bad);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << bad;
  }
}

}  // namespace
}  // namespace stiefel
