// State of shards that moves from its owner to the server that gains it (Peer.FetchState).
#ifndef STIEFEL_SERVER_PEER_STATE_H_
#define STIEFEL_SERVER_PEER_STATE_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "common/clock.h"
#include "common/mutex.h"
#include "server/matrix_store.h"
#include "server/peer_transport.h"

namespace stiefel {

// Bytes of state that one call sends at most: the caller asks again for the rest, so that a slow
// one never makes them pile up here.
inline constexpr int64_t kStateCallBytes = int64_t{8} << 20;
inline constexpr int64_t kStateChunkBytes = int64_t{1} << 20;

// Answers a call that asks for the image from `offset` on. OUT_OF_RANGE: it ends before.
void SendState(const StateImage& image, int64_t offset, PeerReply* reply);

// Fetches the state of some shards, a few at a time, until all of it is there; what breaks or is
// damaged on the way is asked for again, from where it stopped. Thread-safe.
class StateFetcher {
 public:
  struct Shard {
    int32_t shard = 0;
    std::string address;           // of its owner
    MatrixStore* store = nullptr;  // takes it in; nobody else uses it meanwhile
  };
  struct Request {
    v1::PeerSender sender;
    int64_t after_step = 0;
    std::vector<Shard> shards;
  };
  // OK: all is there. Else what asking again cannot mend, with shard and server.
  using Done = std::function<void(const absl::Status&)>;

  // Both outlive the fetcher.
  StateFetcher(PeerTransport* transport, const Clock* clock)
      : transport_(transport), clock_(clock) {}
  // Cancels; `done` does not run any more once it returns. REQUIRES: not called from `done`.
  ~StateFetcher();

  // Once. `done` exactly once, on a thread of the transport or of Tick, unless the fetcher is
  // destroyed before.
  void Start(Request request, Done done);
  // About four times a second: calls that are due again.
  void Tick();

 private:
  struct Transfer {
    Shard shard;
    bool begun = false;
    bool complete = false;
    int failures = 0;
    int64_t retry_at = 0;  // 0: a call is under way, or none is needed
    std::unique_ptr<PeerCall> call;
    // Of the call under way; touched by its callbacks alone.
    v1::ShardState state;
    bool described = false;
    bool last = false;
    std::vector<MatrixStore::StateTarget> targets;
    int64_t received = 0;
    absl::Status wrong;
  };

  void Call(Transfer* transfer) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void StartMore() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  static absl::Status Take(const v1::PeerChunk& chunk, Transfer* transfer);
  void OnCallDone(Transfer* transfer, const absl::Status& status);

  PeerTransport* const transport_;
  const Clock* const clock_;
  Mutex mutex_;
  v1::FetchStateRequest request_ ABSL_GUARDED_BY(mutex_);
  std::vector<std::unique_ptr<Transfer>> transfers_ ABSL_GUARDED_BY(mutex_);
  std::vector<std::unique_ptr<PeerCall>> over_ ABSL_GUARDED_BY(mutex_);  // may not go in callbacks
  Done done_ ABSL_GUARDED_BY(mutex_);
  bool stopped_ ABSL_GUARDED_BY(mutex_) = false;
};

}  // namespace stiefel

#endif  // STIEFEL_SERVER_PEER_STATE_H_
