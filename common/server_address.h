#ifndef STIEFEL_COMMON_SERVER_ADDRESS_H_
#define STIEFEL_COMMON_SERVER_ADDRESS_H_

#include <string>

#include "absl/status/status.h"

namespace stiefel {

// INVALID_ARGUMENT unless `address` is HOST:PORT with a port of 1..65535. gRPC itself would take a
// missing port as 443, and another one modulo 65536.
absl::Status CheckServerAddress(const std::string& address);

}  // namespace stiefel

#endif  // STIEFEL_COMMON_SERVER_ADDRESS_H_
