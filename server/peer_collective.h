// Collectives over peers: sums and gathers over the shards of a matrix whose owners are servers.
//
// Segment j of a sum (peer_sum.h) belongs to the server that is j-th among the distinct owners of
// the matrix's shards, in ascending order of server index. It fetches every foreign shard's
// contribution to the segment and adds in shard order; shards of one server are not added before.
// Then every owner fetches the finished segments of the others. Contributions to a gather are
// fetched by every owner. All calls are long polls and are made again after a broken connection,
// until the collective's deadline.
//
// Sent over all servers for one sum of n values: each segment's contributions of the shards that
// its adder does not own, and each finished segment to all other owners. With one shard on each of
// p servers: 2 (p - 1) n values.
//
// Memory beside `in` and `out`: a server's segment of the last sum of each matrix and of the one
// under way; up to 16 MiB of contributions and 2 MiB of finished pieces a peer for each under way.
#ifndef STIEFEL_SERVER_PEER_COLLECTIVE_H_
#define STIEFEL_SERVER_PEER_COLLECTIVE_H_

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "common/clock.h"
#include "common/mutex.h"
#include "kernels/collective.h"
#include "server/peer_operation.h"
#include "server/peer_transport.h"
#include "server/peer_workers.h"

namespace stiefel {

// Of one run at one placement; the matrices are the group's. Thread-safe. A step that is over must
// be given to Cancel, whatever its outcome: what peers may still ask for is kept until then.
class PeerCollective final : public Collective {
 public:
  // All outlive the collective.
  struct Environment {
    PeerTransport* transport = nullptr;
    PeerExecutor* executor = nullptr;
    const Clock* clock = nullptr;
    int64_t timeout_micros = 0;  // from a collective's first start here to its end
  };
  // Payload bytes given to peers; what is asked for twice counts twice.
  struct Sent {
    int64_t sums = 0;
    int64_t gathers = 0;
  };

  // INVALID_ARGUMENT: an index outside the group, a matrix without shards, a timeout below 1 ms.
  static absl::StatusOr<std::unique_ptr<PeerCollective>> Create(PeerGroup group,
                                                                const Environment& environment);
  // Cancels everything.
  ~PeerCollective() override;

  // `done` also: INVALID_ARGUMENT (a part that is not this server's, is started twice or does not
  // agree with the other shards'), FAILED_PRECONDITION (a peer is past this attempt, or its part
  // failed). `in` and `out` are not touched once `done` is called.
  void Start(const CollectiveKey& key, const CollectivePart& part, Done done) override;

  // Also ends every earlier attempt and step: they are over too.
  void Cancel(int64_t step, int32_t attempt) override;

  // Answers a peer. FAILED_PRECONDITION: another run, an older placement, an attempt that is over
  // (both values are named); UNAVAILABLE: a newer placement than this one, too many questions;
  // INVALID_ARGUMENT, OUT_OF_RANGE: could never be answered; DEADLINE_EXCEEDED: not within
  // wait_seconds (60 at most).
  void OnFetchPart(const v1::FetchPartRequest& request, std::unique_ptr<PeerReply> reply);

  // About four times a second: deadlines, calls that are due again, waits that are over. A late
  // call (the process was frozen) first moves the deadlines by the gap.
  void Tick();

  // Collectives that are under way, asked for, or kept for peers that are behind.
  int64_t operations() const;

  Sent sent() const { return {sum_bytes_sent_.load(), gather_bytes_sent_.load()}; }

 private:
  using Attempt = std::pair<int64_t, int32_t>;  // step, attempt
  struct Entry {
    std::shared_ptr<PeerStrand> strand;
    std::shared_ptr<PeerOperation> operation;
  };

  PeerCollective(PeerGroup group, const Environment& environment);
  absl::Status CheckPart(const CollectiveKey& key, const CollectivePart& part) const;
  absl::Status CheckSender(const v1::PeerSender& sender, const CollectiveKey& key) const;
  absl::Status CheckRequest(const v1::FetchPartRequest& request, const CollectiveKey& key) const;
  bool Owns(int32_t server, int32_t matrix) const;
  absl::Status CheckLive(const CollectiveKey& key) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  Entry& Find(const CollectiveKey& key) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void OnCompleted(const CollectiveKey& key);
  static void End(const std::vector<Entry>& entries, const absl::Status& status);

  // Constant after construction.
  const PeerGroup group_;
  const Environment environment_;
  PeerOperation::Context context_;

  std::atomic<int64_t> sum_bytes_sent_{0};
  std::atomic<int64_t> gather_bytes_sent_{0};
  std::atomic<int64_t> waiting_{0};

  // Held while a task is posted to a strand; never while one runs.
  mutable Mutex mutex_;
  std::map<CollectiveKey, Entry> entries_ ABSL_GUARDED_BY(mutex_);
  std::optional<Attempt> over_ ABSL_GUARDED_BY(mutex_);  // it, and all before it
  // By matrix: the last key that all shards have started.
  std::map<int32_t, CollectiveKey> completed_ ABSL_GUARDED_BY(mutex_);
  int64_t last_tick_ ABSL_GUARDED_BY(mutex_) = 0;
};

}  // namespace stiefel

#endif  // STIEFEL_SERVER_PEER_COLLECTIVE_H_
