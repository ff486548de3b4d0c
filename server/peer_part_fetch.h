// One byte range that a server wants from a peer, asked for until it comes.
#ifndef STIEFEL_SERVER_PEER_PART_FETCH_H_
#define STIEFEL_SERVER_PEER_PART_FETCH_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "server/peer_transport.h"
#include "stiefel/v1/peer.pb.h"

namespace stiefel {

// The longest that one call waits at the peer for bytes that do not exist yet, and how long its
// answer may take beyond that.
inline constexpr int64_t kPeerPollMicros = 5 * 1000000;
inline constexpr int64_t kPeerSlackMicros = 1000000;

// Whether asking again may help: anything but an answer that says that the question is wrong.
bool PeerMayRetry(const absl::Status& status);

// When to ask again after `failures` failures in a row: 50 ms doubled each time, 2 s at most; at
// once where the bytes merely did not exist within the wait.
int64_t PeerBackoffMicros(const absl::Status& status, int failures);

// Checks and joins the chunks of one call. Used by one thread at a time.
class PeerBytes {
 public:
  // Expects [begin, end) of what is asked for.
  PeerBytes(int64_t begin, int64_t end) : next_(begin), end_(end) {}

  // After the first chunk that does not fit, the rest is ignored.
  void Take(v1::PeerChunk chunk);

  // How the call went, given how it ended: its error, else DATA_LOSS where bytes are wrong or
  // missing. Then bytes() are those asked for.
  absl::Status Ended(const absl::Status& status) const;
  std::string& bytes() { return bytes_; }

 private:
  int64_t next_;
  const int64_t end_;
  std::string bytes_;
  absl::Status wrong_;
};

// Who has something, and what: what a shard contributes, or the finished sum.
struct PartSource {
  int32_t server = 0;
  std::optional<int32_t> shard;
};

// Used by one thread at a time, its owner's strand.
class PartFetch {
 public:
  // What became of one try, once, on any thread.
  using Landed = std::function<void(absl::Status status, std::string bytes)>;

  PartFetch(const PartSource& source, int64_t begin, int64_t end)
      : source_(source), begin_(begin), end_(end) {}

  const PartSource& source() const { return source_; }
  int64_t begin() const { return begin_; }
  int64_t end() const { return end_; }
  bool arrived() const { return arrived_; }
  const std::string& bytes() const { return bytes_; }
  const absl::Status& last_error() const { return last_error_; }

  // Asks, waiting there up to `wait_micros`. `request` has sender and key.
  void Start(PeerTransport* transport, const std::string& address, v1::FetchPartRequest request,
             int64_t wait_micros, Landed landed);

  // Takes what Landed reported. True: it has arrived. False: it is due again later, which helps
  // only if PeerMayRetry(last_error()).
  bool Take(const absl::Status& status, std::string bytes, int64_t now_micros);

  // Not under way, and due to be asked again.
  bool Due(int64_t now_micros) const { return retry_at_ != 0 && now_micros >= retry_at_; }

  // Nothing is asked any more, and the bytes are dropped.
  void Drop();

 private:
  PartSource source_;
  int64_t begin_;
  int64_t end_;
  int failures_ = 0;
  int64_t retry_at_ = 0;  // 0: under way, arrived, or not begun
  bool arrived_ = false;
  std::unique_ptr<PeerCall> call_;
  std::string bytes_;
  absl::Status last_error_;
};

}  // namespace stiefel

#endif  // STIEFEL_SERVER_PEER_PART_FETCH_H_
