#include "tests/bench/delay_proxy.h"

#include <poll.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <deque>
#include <list>
#include <vector>

#include "common/clock.h"
#include "tests/bench/tcp.h"

namespace stiefel {
namespace {

constexpr size_t kReadBytes = 256 << 10;
// What one direction of a connection may hold: some times rate x delay at 10 Gb/s.
constexpr size_t kHeldBytes = 1 << 20;
constexpr int64_t kNever = int64_t{1} << 62;

int64_t Now() { return RealClock().NowMicros(); }

// One direction of a connection.
class Flow {
 public:
  Flow(int from, int to) : from_(from), to_(to) {}

  int from() const { return from_; }
  int to() const { return to_; }
  bool WantsInput() const { return !ended_ && held_ < kHeldBytes; }
  bool WantsOutput() const { return blocked_; }
  bool Finished() const { return ended_ && queue_.empty(); }
  // When the next bytes may pass; kNever: nothing waits, or the receiver does not take more.
  int64_t Due() const { return queue_.empty() || blocked_ ? kNever : queue_.front().due; }

  // False: the connection is broken.
  bool Read(int64_t delay_micros) {
    Piece piece;
    piece.bytes.resize(kReadBytes);
    const ssize_t count = recv(from_, piece.bytes.data(), piece.bytes.size(), 0);
    if (count < 0) return errno == EAGAIN || errno == EINTR;
    ended_ = count == 0;  // passes like bytes: an empty piece
    piece.bytes.resize(static_cast<size_t>(count));
    piece.due = Now() + delay_micros;
    held_ += piece.bytes.size();
    queue_.push_back(std::move(piece));
    return true;
  }

  bool WriteDue() {
    blocked_ = false;
    while (!queue_.empty() && queue_.front().due <= Now()) {
      Piece& piece = queue_.front();
      if (piece.bytes.empty()) shutdown(to_, SHUT_WR);
      while (piece.sent < piece.bytes.size()) {
        const ssize_t count = send(to_, piece.bytes.data() + piece.sent,
                                   piece.bytes.size() - piece.sent, MSG_NOSIGNAL);
        if (count < 0 && errno == EINTR) continue;
        if (count < 0) {
          blocked_ = errno == EAGAIN;
          return blocked_;
        }
        piece.sent += static_cast<size_t>(count);
      }
      held_ -= piece.bytes.size();
      queue_.pop_front();
    }
    return true;
  }

 private:
  struct Piece {
    int64_t due = 0;
    size_t sent = 0;
    std::vector<char> bytes;
  };
  const int from_, to_;
  std::deque<Piece> queue_;
  size_t held_ = 0;
  bool ended_ = false;
  bool blocked_ = false;
};

struct Connection {
  Connection(int near, int far) : flows{Flow(near, far), Flow(far, near)} {}
  ~Connection() {
    close(flows[0].from());
    close(flows[0].to());
  }
  Flow flows[2];
};

void Accept(int listener, const std::string& target, std::list<Connection>* connections) {
  const int near = accept4(listener, nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK);
  if (near < 0) return;
  const int far = ConnectTcp(target);
  if (far < 0) {
    close(near);
    return;
  }
  SetNonblocking(far);
  SetNoDelay(near);
  connections->emplace_back(near, far);
}

// Waits for sockets, or until `due`.
void Wait(std::vector<pollfd>* sockets, int64_t due) {
  const int64_t micros = std::clamp<int64_t>(due - Now(), 0, 1000000);
  const timespec timeout{micros / 1000000, micros % 1000000 * 1000};
  ppoll(sockets->data(), sockets->size(), &timeout, nullptr);
}

}  // namespace

int RunDelayProxy(const std::string& target, int64_t delay_micros) {
  prctl(PR_SET_TIMERSLACK, 1000);  // nanoseconds; the default would add a quarter of the delay
  const int listener = ListenTcp();
  if (listener < 0) {
    std::fprintf(stderr, "delay proxy: cannot listen: %s\n", std::strerror(errno));
    return 1;
  }
  std::printf("listening on 0.0.0.0:%d\n", PortOf(listener));
  std::fflush(stdout);
  std::list<Connection> connections;
  for (;;) {
    std::vector<pollfd> sockets = {{listener, POLLIN, 0}};
    int64_t due = kNever;
    for (const Connection& connection : connections) {
      for (int end = 0; end < 2; ++end) {  // the socket that this flow reads and the other writes
        const Flow& flow = connection.flows[end];
        const Flow& back = connection.flows[1 - end];
        const int events = (flow.WantsInput() ? POLLIN : 0) | (back.WantsOutput() ? POLLOUT : 0);
        // A negative descriptor is passed over; a broken one would be reported for ever.
        sockets.push_back({events != 0 ? flow.from() : -1, static_cast<short>(events), 0});
        due = std::min(due, flow.Due());
      }
    }
    Wait(&sockets, due);
    size_t at = 1;
    for (auto connection = connections.begin(); connection != connections.end();) {
      bool alive = true;
      for (Flow& flow : connection->flows) {
        const short events = sockets[at++].revents;
        if ((events & (POLLIN | POLLHUP | POLLERR)) != 0 && flow.WantsInput())
          alive = flow.Read(delay_micros) && alive;
      }
      for (Flow& flow : connection->flows) alive = alive && flow.WriteDue();
      alive = alive && !(connection->flows[0].Finished() && connection->flows[1].Finished());
      connection = alive ? std::next(connection) : connections.erase(connection);
    }
    if ((sockets[0].revents & POLLIN) != 0) Accept(listener, target, &connections);
  }
}

}  // namespace stiefel
