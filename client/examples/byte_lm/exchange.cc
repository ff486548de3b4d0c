#include "client/examples/byte_lm/exchange.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <thread>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "common/clock.h"
#include "common/status.h"

namespace stiefel::byte_lm {
namespace {

constexpr uint32_t kMagic = 0x424C4D31;  // "BLM1"

// First message on a connection: who calls and, towards rank 0, where it listens.
struct Greeting {
  uint32_t magic = kMagic;
  uint16_t rank = 0;
  uint16_t world_size = 0;
  uint16_t port = 0;
};

// Precedes the payload of every call.
struct CallHeader {
  uint64_t call;
  uint64_t bytes;
};

int64_t NowMillis() { return RealClock().NowMicros() / 1000; }

absl::Status SocketError(absl::string_view what) {
  return absl::UnavailableError(absl::StrCat(what, ": ", strerror(errno)));
}

// Waits until `fd` is ready for `events`.
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

sockaddr_in Loopback(uint16_t port) {
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(port);
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  return address;
}

// Listens on a loopback port; port 0: one that the system picks.
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

// Connects, again and again while nobody listens there yet.
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

absl::StatusOr<uint16_t> ParseAddress(absl::string_view address) {
  absl::string_view rest = address;
  uint32_t port = 0;
  if (!absl::ConsumePrefix(&rest, "127.0.0.1:") || !absl::SimpleAtoi(rest, &port) || port == 0 ||
      port > 65535) {
    return absl::InvalidArgumentError(absl::StrCat(
        "--exchange=", address, ": expected 127.0.0.1:port with a port of 1 to 65535"));
  }
  return static_cast<uint16_t>(port);
}

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

}  // namespace

Exchange::Exchange(int rank, int world_size, int64_t timeout_millis)
    : rank_(rank),
      world_size_(world_size),
      timeout_millis_(timeout_millis),
      sockets_(world_size, -1) {}

Exchange::~Exchange() {
  for (int fd : sockets_) {
    if (fd >= 0) close(fd);
  }
}

absl::StatusOr<std::unique_ptr<Exchange>> Exchange::Connect(const ExchangeOptions& options) {
  if (options.world_size < 1 || options.world_size > 1024 || options.rank < 0 ||
      options.rank >= options.world_size) {
    return absl::InvalidArgumentError(absl::StrCat("rank ", options.rank, " of ",
                                                   options.world_size,
                                                   ": expected 0 <= rank < world size <= 1024"));
  }
  std::unique_ptr<Exchange> exchange(
      new Exchange(options.rank, options.world_size, options.timeout_millis));
  STIEFEL_RETURN_IF_ERROR(exchange->ConnectAll(options));
  return exchange;
}

// Every rank but 0 opens a listener of its own and tells rank 0, which answers with everybody's
// ports when all have called; then each rank calls the lower ones.
absl::Status Exchange::ConnectAll(const ExchangeOptions& options) {
  if (world_size_ == 1) {
    if (options.listen_fd >= 0) close(options.listen_fd);
    return absl::OkStatus();
  }
  const int64_t deadline = NowMillis() + timeout_millis_;
  if (rank_ == 0) {
    int listener = options.listen_fd;
    if (listener < 0) {
      STIEFEL_ASSIGN_OR_RETURN(const uint16_t port, ParseAddress(options.address));
      STIEFEL_ASSIGN_OR_RETURN(listener, Listen(port));
    }
    const ScopedFd owned(listener);
    std::vector<uint16_t> ports(world_size_, 0);
    STIEFEL_RETURN_IF_ERROR(AcceptRanks(listener, 1, deadline, &ports));
    for (int peer = 1; peer < world_size_; ++peer) {
      STIEFEL_RETURN_IF_ERROR(SendAll(sockets_[peer], ports.data(), ports.size() * sizeof(uint16_t),
                                      deadline, absl::StrCat("ports to rank ", peer)));
    }
  } else {
    STIEFEL_RETURN_IF_ERROR(MeetRankZero(options, deadline));
  }
  const int on = 1;
  for (int fd : sockets_) {
    if (fd >= 0) setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
  }
  return absl::OkStatus();
}

absl::Status Exchange::MeetRankZero(const ExchangeOptions& options, int64_t deadline) {
  STIEFEL_ASSIGN_OR_RETURN(const uint16_t root, ParseAddress(options.address));
  STIEFEL_ASSIGN_OR_RETURN(const int listener, Listen(0));
  const ScopedFd owned(listener);
  Greeting greeting;
  greeting.rank = static_cast<uint16_t>(rank_);
  greeting.world_size = static_cast<uint16_t>(world_size_);
  STIEFEL_ASSIGN_OR_RETURN(greeting.port, PortOf(listener));
  STIEFEL_ASSIGN_OR_RETURN(sockets_[0], ConnectTo(root, deadline));
  STIEFEL_RETURN_IF_ERROR(
      SendAll(sockets_[0], &greeting, sizeof(greeting), deadline, "greeting rank 0"));
  std::vector<uint16_t> ports(world_size_);
  STIEFEL_RETURN_IF_ERROR(ReceiveAll(sockets_[0], ports.data(), ports.size() * sizeof(uint16_t),
                                     deadline, "ports from rank 0"));
  for (int peer = 1; peer < rank_; ++peer) {
    STIEFEL_ASSIGN_OR_RETURN(sockets_[peer], ConnectTo(ports[peer], deadline));
    STIEFEL_RETURN_IF_ERROR(SendAll(sockets_[peer], &greeting, sizeof(greeting), deadline,
                                    absl::StrCat("greeting rank ", peer)));
  }
  return AcceptRanks(listener, rank_ + 1, deadline, &ports);
}

// Accepts one connection from each of the ranks first .. world_size - 1, in any order.
absl::Status Exchange::AcceptRanks(int listener, int first, int64_t deadline,
                                   std::vector<uint16_t>* ports) {
  const auto missing = [&] {
    std::string list;
    for (int peer = first; peer < world_size_; ++peer) {
      if (sockets_[peer] < 0) absl::StrAppend(&list, list.empty() ? "" : ", ", peer);
    }
    return list;
  };
  for (int accepted = first; accepted < world_size_; ++accepted) {
    STIEFEL_RETURN_IF_ERROR(Await(listener, POLLIN, deadline,
                                  absl::StrCat("waiting for trainers of rank ", missing())));
    const int fd = accept4(listener, nullptr, nullptr, SOCK_CLOEXEC);
    if (fd < 0) return SocketError("accept");
    Greeting greeting;
    absl::Status status = ReceiveAll(fd, &greeting, sizeof(greeting), deadline, "greeting");
    if (status.ok() &&
        (greeting.magic != kMagic || greeting.world_size != world_size_ || greeting.rank < first ||
         greeting.rank >= world_size_ || sockets_[greeting.rank] >= 0)) {
      status = absl::InvalidArgumentError(
          absl::StrCat("rank ", greeting.rank, " of ", greeting.world_size,
                       " called; expected one of ", missing(), " of ", world_size_));
    }
    if (!status.ok()) {
      close(fd);
      return status;
    }
    sockets_[greeting.rank] = fd;
    (*ports)[greeting.rank] = greeting.port;
  }
  return absl::OkStatus();
}

absl::Status Exchange::Swap(const std::vector<Outgoing>& send_parts,
                            const std::vector<Incoming>& receive_parts) {
  struct Progress {
    CallHeader out, in;
    size_t sent = 0, received = 0;
  };
  const int64_t deadline = NowMillis() + timeout_millis_;
  const size_t head = sizeof(CallHeader);
  ++calls_;
  std::vector<Progress> progress(world_size_);
  for (int peer = 0; peer < world_size_; ++peer) {
    progress[peer].out = {calls_, send_parts[peer].size};
  }
  const auto unsent = [&](int peer) { return head + send_parts[peer].size - progress[peer].sent; };
  const auto awaited = [&](int peer) {
    return head + receive_parts[peer].size - progress[peer].received;
  };

  const auto push = [&](int peer) -> absl::Status {
    Progress& p = progress[peer];
    const bool in_head = p.sent < head;
    const char* from = in_head ? reinterpret_cast<const char*>(&p.out) + p.sent
                               : send_parts[peer].data + (p.sent - head);
    const ssize_t sent = send(sockets_[peer], from, in_head ? head - p.sent : unsent(peer),
                              MSG_NOSIGNAL | MSG_DONTWAIT);
    if (sent < 0 && errno != EAGAIN && errno != EINTR) {
      return SocketError(absl::StrCat("sending to rank ", peer));
    }
    p.sent += std::max<ssize_t>(sent, 0);
    return absl::OkStatus();
  };
  const auto pull = [&](int peer) -> absl::Status {
    Progress& p = progress[peer];
    const bool in_head = p.received < head;
    char* to = in_head ? reinterpret_cast<char*>(&p.in) + p.received
                       : receive_parts[peer].data + (p.received - head);
    const ssize_t got =
        recv(sockets_[peer], to, in_head ? head - p.received : awaited(peer), MSG_DONTWAIT);
    if (got == 0) return absl::UnavailableError(absl::StrCat("rank ", peer, " has left"));
    if (got < 0 && errno != EAGAIN && errno != EINTR) {
      return SocketError(absl::StrCat("receiving from rank ", peer));
    }
    p.received += std::max<ssize_t>(got, 0);
    if (in_head && p.received == head &&
        (p.in.call != calls_ || p.in.bytes != receive_parts[peer].size)) {
      return absl::DataLossError(absl::StrCat("rank ", peer, " made call ", p.in.call, " with ",
                                              p.in.bytes, " bytes; expected call ", calls_,
                                              " with ", receive_parts[peer].size));
    }
    return absl::OkStatus();
  };

  for (;;) {
    std::vector<pollfd> wanted;
    std::vector<int> peers;
    std::string names;
    for (int peer = 0; peer < world_size_; ++peer) {
      if (peer == rank_) continue;
      const short events = (unsent(peer) > 0 ? POLLOUT : 0) | (awaited(peer) > 0 ? POLLIN : 0);
      if (events == 0) continue;
      wanted.push_back({sockets_[peer], events, 0});
      peers.push_back(peer);
      absl::StrAppend(&names, names.empty() ? "" : ", ", peer);
    }
    if (wanted.empty()) return absl::OkStatus();
    const int64_t left = std::max<int64_t>(deadline - NowMillis(), 0);
    const int ready = poll(wanted.data(), wanted.size(), static_cast<int>(left));
    if (ready < 0 && errno != EINTR) return SocketError("poll");
    if (ready == 0) {
      return absl::DeadlineExceededError(absl::StrCat(
          "exchange ", calls_, ": no progress with rank ", names, " in ", timeout_millis_, " ms"));
    }
    for (size_t i = 0; i < wanted.size() && ready > 0; ++i) {
      const short got = wanted[i].revents;
      if (awaited(peers[i]) > 0 && (got & (POLLIN | POLLHUP | POLLERR))) {
        STIEFEL_RETURN_IF_ERROR(pull(peers[i]));
      }
      if (unsent(peers[i]) > 0 && (got & (POLLOUT | POLLERR))) {
        STIEFEL_RETURN_IF_ERROR(push(peers[i]));
      }
    }
  }
}

absl::Status Exchange::ReduceScatterMean(int64_t unit, std::vector<float>* values) {
  if (world_size_ == 1) return absl::OkStatus();
  const int64_t units = static_cast<int64_t>(values->size()) / unit;
  const Share own = ShareOf(units, rank_, world_size_);
  const int64_t count = (own.end - own.begin) * unit;
  float* mine = values->data() + own.begin * unit;
  received_.resize(count * world_size_);
  std::vector<Outgoing> send_parts(world_size_);
  std::vector<Incoming> receive_parts(world_size_);
  for (int peer = 0; peer < world_size_; ++peer) {
    if (peer == rank_) continue;
    const Share share = ShareOf(units, peer, world_size_);
    send_parts[peer] = {reinterpret_cast<const char*>(values->data() + share.begin * unit),
                        (share.end - share.begin) * unit * sizeof(float)};
    receive_parts[peer] = {reinterpret_cast<char*>(received_.data() + peer * count),
                           count * sizeof(float)};
  }
  STIEFEL_RETURN_IF_ERROR(Swap(send_parts, receive_parts));
  std::copy(mine, mine + count, received_.data() + rank_ * count);
  std::fill(mine, mine + count, 0.0f);
  for (int peer = 0; peer < world_size_; ++peer) {
    const float* part = received_.data() + peer * count;
    for (int64_t i = 0; i < count; ++i) mine[i] += part[i];
  }
  const float scale = 1.0f / static_cast<float>(world_size_);
  for (int64_t i = 0; i < count; ++i) mine[i] *= scale;
  return absl::OkStatus();
}

absl::StatusOr<std::vector<uint64_t>> Exchange::AllGather(uint64_t value) {
  std::vector<uint64_t> all(world_size_, value);
  std::vector<Outgoing> send_parts(world_size_);
  std::vector<Incoming> receive_parts(world_size_);
  for (int peer = 0; peer < world_size_; ++peer) {
    if (peer == rank_) continue;
    send_parts[peer] = {reinterpret_cast<const char*>(&value), sizeof(value)};
    receive_parts[peer] = {reinterpret_cast<char*>(&all[peer]), sizeof(value)};
  }
  STIEFEL_RETURN_IF_ERROR(Swap(send_parts, receive_parts));
  return all;
}

absl::StatusOr<std::vector<double>> Exchange::AllGather(double value) {
  uint64_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  STIEFEL_ASSIGN_OR_RETURN(const std::vector<uint64_t> all, AllGather(bits));
  std::vector<double> values(all.size());
  std::memcpy(values.data(), all.data(), all.size() * sizeof(double));
  return values;
}

}  // namespace stiefel::byte_lm
