#ifndef STIEFEL_CLIENT_EXAMPLES_BYTE_LM_LOOPBACK_SOCKET_H_
#define STIEFEL_CLIENT_EXAMPLES_BYTE_LM_LOOPBACK_SOCKET_H_

#include <unistd.h>

#include <cstddef>
#include <cstdint>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

// TCP on 127.0.0.1 with deadlines. Deadlines are on NowMillis(); `what` says in errors what was
// going on. UNAVAILABLE for socket errors, DEADLINE_EXCEEDED when the time is over.
namespace stiefel::byte_lm {

// Milliseconds of the machine's monotonic clock.
int64_t NowMillis();

// UNAVAILABLE with the text of errno.
absl::Status SocketError(absl::string_view what);

// Waits until `fd` is ready for `events` (of poll).
absl::Status Await(int fd, short events, int64_t deadline, absl::string_view what);

absl::Status SendAll(int fd, const void* data, size_t size, int64_t deadline,
                     absl::string_view what);
absl::Status ReceiveAll(int fd, void* data, size_t size, int64_t deadline, absl::string_view what);

// A socket that listens on a loopback port; port 0: one that the system picks. The caller closes
// it.
absl::StatusOr<int> Listen(uint16_t port);
absl::StatusOr<uint16_t> PortOf(int listener);

// Connects, again and again while nobody listens there yet. The caller closes the socket.
absl::StatusOr<int> ConnectTo(uint16_t port, int64_t deadline);

// The port of "127.0.0.1:port"; INVALID_ARGUMENT for anything else.
absl::StatusOr<uint16_t> ParseLoopbackAddress(absl::string_view address);

// Closes a socket at the end of its scope.
class ScopedFd {
 public:
  explicit ScopedFd(int fd) : fd_(fd) {}
  ~ScopedFd() { close(fd_); }
  ScopedFd(const ScopedFd&) = delete;
  ScopedFd& operator=(const ScopedFd&) = delete;
  int get() const { return fd_; }

 private:
  const int fd_;
};

}  // namespace stiefel::byte_lm

#endif  // STIEFEL_CLIENT_EXAMPLES_BYTE_LM_LOOPBACK_SOCKET_H_
