#include "client/examples/byte_lm/exchange.h"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "client/examples/byte_lm/loopback_socket.h"
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

// Both directions of one call with one peer.
class Transfer {
 public:
  Transfer(int peer, int fd, uint64_t call, const char* out, size_t out_size, char* in,
           size_t in_size)
      : peer_(peer), fd_(fd), out_(out), in_(in), out_size_(out_size), in_size_(in_size) {
    out_header_ = {call, out_size};
  }

  int peer() const { return peer_; }
  int fd() const { return fd_; }
  // What to wait for; 0 when all is done.
  short events() const {
    return static_cast<short>((Unsent() > 0 ? POLLOUT : 0) | (Awaited() > 0 ? POLLIN : 0));
  }

  // Moves what can be moved after poll said `ready`.
  absl::Status Advance(short ready) {
    if (Awaited() > 0 && (ready & (POLLIN | POLLHUP | POLLERR))) {
      STIEFEL_RETURN_IF_ERROR(Receive());
    }
    if (Unsent() > 0 && (ready & (POLLOUT | POLLERR))) STIEFEL_RETURN_IF_ERROR(Send());
    return absl::OkStatus();
  }

 private:
  static constexpr size_t kHead = sizeof(CallHeader);

  size_t Unsent() const { return kHead + out_size_ - sent_; }
  size_t Awaited() const { return kHead + in_size_ - received_; }

  absl::Status Send() {
    const bool in_head = sent_ < kHead;
    const char* from =
        in_head ? reinterpret_cast<const char*>(&out_header_) + sent_ : out_ + (sent_ - kHead);
    const ssize_t sent =
        send(fd_, from, in_head ? kHead - sent_ : Unsent(), MSG_NOSIGNAL | MSG_DONTWAIT);
    if (sent < 0 && errno != EAGAIN && errno != EINTR) {
      return SocketError(absl::StrCat("sending to rank ", peer_));
    }
    sent_ += std::max<ssize_t>(sent, 0);
    return absl::OkStatus();
  }

  absl::Status Receive() {
    const bool in_head = received_ < kHead;
    char* to =
        in_head ? reinterpret_cast<char*>(&in_header_) + received_ : in_ + (received_ - kHead);
    const ssize_t got = recv(fd_, to, in_head ? kHead - received_ : Awaited(), MSG_DONTWAIT);
    if (got == 0) return absl::UnavailableError(absl::StrCat("rank ", peer_, " has left"));
    if (got < 0 && errno != EAGAIN && errno != EINTR) {
      return SocketError(absl::StrCat("receiving from rank ", peer_));
    }
    received_ += std::max<ssize_t>(got, 0);
    if (in_head && received_ == kHead &&
        (in_header_.call != out_header_.call || in_header_.bytes != in_size_)) {
      return absl::DataLossError(absl::StrCat("rank ", peer_, " made call ", in_header_.call,
                                              " with ", in_header_.bytes, " bytes; expected call ",
                                              out_header_.call, " with ", in_size_));
    }
    return absl::OkStatus();
  }

  const int peer_;
  const int fd_;
  const char* const out_;
  char* const in_;
  const size_t out_size_;
  const size_t in_size_;
  CallHeader out_header_{};
  CallHeader in_header_{};
  size_t sent_ = 0;      // header included
  size_t received_ = 0;  // header included
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
      STIEFEL_ASSIGN_OR_RETURN(const uint16_t port, ParseLoopbackAddress(options.address));
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
  STIEFEL_ASSIGN_OR_RETURN(const uint16_t root, ParseLoopbackAddress(options.address));
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
  const int64_t deadline = NowMillis() + timeout_millis_;
  ++calls_;
  std::vector<Transfer> transfers;
  for (int peer = 0; peer < world_size_; ++peer) {
    if (peer == rank_) continue;
    transfers.emplace_back(peer, sockets_[peer], calls_, send_parts[peer].data,
                           send_parts[peer].size, receive_parts[peer].data,
                           receive_parts[peer].size);
  }
  for (;;) {
    std::vector<pollfd> wanted;
    std::string open;
    for (const Transfer& transfer : transfers) {
      const bool done = transfer.events() == 0;
      wanted.push_back({done ? -1 : transfer.fd(), transfer.events(), 0});  // poll passes -1 over
      if (!done) absl::StrAppend(&open, open.empty() ? "" : ", ", transfer.peer());
    }
    if (open.empty()) return absl::OkStatus();
    const int64_t left = std::max<int64_t>(deadline - NowMillis(), 0);
    const int ready = poll(wanted.data(), wanted.size(), static_cast<int>(left));
    if (ready < 0 && errno != EINTR) return SocketError("poll");
    if (ready == 0) {
      return absl::DeadlineExceededError(absl::StrCat(
          "exchange ", calls_, ": no progress with rank ", open, " in ", timeout_millis_, " ms"));
    }
    for (size_t i = 0; i < transfers.size() && ready > 0; ++i) {
      STIEFEL_RETURN_IF_ERROR(transfers[i].Advance(wanted[i].revents));
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
