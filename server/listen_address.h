#ifndef STIEFEL_SERVER_LISTEN_ADDRESS_H_
#define STIEFEL_SERVER_LISTEN_ADDRESS_H_

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"

namespace stiefel {

// HOST:PORT or [IPv6]:PORT, resolved.
struct ListenAddress {
  std::string host;       // as given, without brackets
  int port = 0;           // 0: any free one
  std::string numeric;    // the first address that the host resolves to: "127.0.0.1", "[::1]"
  bool loopback = false;  // every address that the host resolves to
};

// INVALID_ARGUMENT: not of that form, port out of range; NOT_FOUND: the host does not resolve.
absl::StatusOr<ListenAddress> ResolveListenAddress(const std::string& text);

// Says why nothing can listen there, with the system's reason: UNAVAILABLE. OK if something can.
absl::Status ProbeListen(const ListenAddress& address);

}  // namespace stiefel

#endif  // STIEFEL_SERVER_LISTEN_ADDRESS_H_
