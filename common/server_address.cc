#include "common/server_address.h"

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"

namespace stiefel {

absl::Status CheckServerAddress(const std::string& address) {
  int port = 0;
  const size_t colon = address.rfind(':');
  if (colon != 0 && colon != std::string::npos &&
      absl::SimpleAtoi(address.substr(colon + 1), &port) && port >= 1 && port <= 65535) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(
      absl::StrCat("server \"", address, "\" is not host:port with a port of 1..65535"));
}

}  // namespace stiefel
