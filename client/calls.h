// Unary calls to all servers at once, with bounded retries.
#ifndef STIEFEL_CLIENT_CALLS_H_
#define STIEFEL_CLIENT_CALLS_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/transport.h"
#include "google/protobuf/message.h"

namespace stiefel {

// How long to wait before attempt `failures` + 1: 50 ms doubling to 2 s.
int64_t BackoffMicros(int failures);

// The status with the server's address in front of the message.
absl::Status AtServer(const std::string& address, const absl::Status& status);

// The same status in memory of its own. A copied absl::Status shares a counted message with the
// thread that made it, and the counting is in a library that ThreadSanitizer does not see.
inline absl::Status OwnCopy(const absl::Status& status) {
  return absl::Status(status.code(), status.message());
}

struct Servers {
  std::vector<std::string> addresses;
  std::vector<std::shared_ptr<ServerConnection>> connections;

  bool empty() const { return connections.empty(); }
};

// Calls `method` on all servers at the same time, each until it succeeds, `retry` says that its
// status is final, or the deadline (RealClock) has come; then the last status counts. `request`
// makes the request for a server when it is (again) called, given the microseconds left; the
// server has `grace_micros` more to answer. Returns
// the responses, serialized, or the first final status with the address of its server; the other
// calls are then cancelled. Blocks.
absl::StatusOr<std::vector<std::string>> CallAll(
    const Servers& servers, const std::string& method,
    const std::function<std::string(int server, int64_t left_micros)>& request,
    const std::function<bool(const absl::Status&)>& retry, int64_t deadline_micros,
    int64_t grace_micros = 0);

// Calls `method` once on every server at the same time, whatever the others answer. Returns the
// responses, serialized. Blocks, at most `timeout_micros`.
std::vector<absl::StatusOr<std::string>> CallEach(const Servers& servers, const std::string& method,
                                                  const std::string& request,
                                                  int64_t timeout_micros);

// CallAll for one type of response. DATA_LOSS: a response does not parse.
template <typename Response>
absl::StatusOr<std::vector<Response>> CallAllAs(
    const Servers& servers, const std::string& method,
    const std::function<std::string(int server, int64_t left_micros)>& request,
    const std::function<bool(const absl::Status&)>& retry, int64_t deadline_micros,
    int64_t grace_micros = 0) {
  absl::StatusOr<std::vector<std::string>> bytes =
      CallAll(servers, method, request, retry, deadline_micros, grace_micros);
  if (!bytes.ok()) return bytes.status();
  std::vector<Response> responses(bytes->size());
  for (size_t i = 0; i < responses.size(); ++i) {
    if (!responses[i].ParseFromString((*bytes)[i])) {
      return AtServer(servers.addresses[i],
                      absl::DataLossError("the response to " + method + " does not parse"));
    }
  }
  return responses;
}

}  // namespace stiefel

#endif  // STIEFEL_CLIENT_CALLS_H_
