#include "client/examples/byte_lm/loopback_socket.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>

#include <cerrno>
#include <chrono>
#include <cstring>
#include <thread>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "common/clock.h"
#include "common/status.h"

namespace stiefel::byte_lm {
namespace {

sockaddr_in Loopback(uint16_t port) {
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(port);
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  return address;
}

}  // namespace

int64_t NowMillis() { return RealClock().NowMicros() / 1000; }

absl::Status SocketError(absl::string_view what) {
  return absl::UnavailableError(absl::StrCat(what, ": ", strerror(errno)));
}

absl::Status Await(int fd, short events, int64_t deadline, absl::string_view what) {
  for (;;) {
    pollfd wanted{fd, events, 0};
    const int64_t left = deadline - NowMillis();
    const int ready = left > 0 ? poll(&wanted, 1, static_cast<int>(left)) : 0;
    if (ready > 0) return absl::OkStatus();
    if (ready == 0) return absl::DeadlineExceededError(absl::StrCat(what, ": no answer in time"));
    if (errno != EINTR) return SocketError(what);
  }
}

absl::Status SendAll(int fd, const void* data, size_t size, int64_t deadline,
                     absl::string_view what) {
  const char* at = static_cast<const char*>(data);
  while (size > 0) {
    STIEFEL_RETURN_IF_ERROR(Await(fd, POLLOUT, deadline, what));
    const ssize_t sent = send(fd, at, size, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (sent < 0 && errno != EAGAIN && errno != EINTR) return SocketError(what);
    if (sent > 0) at += sent, size -= sent;
  }
  return absl::OkStatus();
}

absl::Status ReceiveAll(int fd, void* data, size_t size, int64_t deadline, absl::string_view what) {
  char* at = static_cast<char*>(data);
  while (size > 0) {
    STIEFEL_RETURN_IF_ERROR(Await(fd, POLLIN, deadline, what));
    const ssize_t got = recv(fd, at, size, MSG_DONTWAIT);
    if (got == 0) return absl::UnavailableError(absl::StrCat(what, ": closed the connection"));
    if (got < 0 && errno != EAGAIN && errno != EINTR) return SocketError(what);
    if (got > 0) at += got, size -= got;
  }
  return absl::OkStatus();
}

absl::StatusOr<int> Listen(uint16_t port) {
  const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (fd < 0) return SocketError("socket");
  const int on = 1;
  setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
  const sockaddr_in address = Loopback(port);
  if (bind(fd, reinterpret_cast<const sockaddr*>(&address), sizeof(address)) != 0 ||
      listen(fd, SOMAXCONN) != 0) {
    const absl::Status status = SocketError(absl::StrCat("listening on 127.0.0.1:", port));
    close(fd);
    return status;
  }
  return fd;
}

absl::StatusOr<uint16_t> PortOf(int listener) {
  sockaddr_in address{};
  socklen_t size = sizeof(address);
  if (getsockname(listener, reinterpret_cast<sockaddr*>(&address), &size) != 0) {
    return SocketError("getsockname");
  }
  return ntohs(address.sin_port);
}

absl::StatusOr<int> ConnectTo(uint16_t port, int64_t deadline) {
  const sockaddr_in address = Loopback(port);
  for (;;) {
    const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (fd < 0) return SocketError("socket");
    if (connect(fd, reinterpret_cast<const sockaddr*>(&address), sizeof(address)) == 0) return fd;
    const absl::Status status = SocketError(absl::StrCat("connecting to 127.0.0.1:", port));
    close(fd);
    if (NowMillis() >= deadline) return status;
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  }
}

absl::StatusOr<uint16_t> ParseLoopbackAddress(absl::string_view address) {
  absl::string_view rest = address;
  uint32_t port = 0;
  if (!absl::ConsumePrefix(&rest, "127.0.0.1:") || !absl::SimpleAtoi(rest, &port) || port == 0 ||
      port > 65535) {
    return absl::InvalidArgumentError(
        absl::StrCat("address ", address, ": expected 127.0.0.1:port with a port of 1 to 65535"));
  }
  return static_cast<uint16_t>(port);
}

}  // namespace stiefel::byte_lm
