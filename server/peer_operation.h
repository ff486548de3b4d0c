// One collective under way: what one server does for one key. PeerCollective has many and gives
// each a strand.
//
//   1. Local shards start it, one by one. With the first, this server asks its peers for all that
//      it needs (long polls), piece by piece, a few at once.
//   2. Sum: a piece of this server's own segment is added when all local shards are there and all
//      foreign contributions to it have come. It goes to the outputs of the local shards and to
//      memory from which peers fetch it. A piece of a foreign segment goes to the outputs as it
//      comes. An output may be the shard's contribution: whatever is overwritten is a piece that is
//      finished, so whoever adds it has all contributions.
//      Gather: what every shard sends lies together in memory of its own, and is copied out at the
//      end.
//   3. Peers' questions that cannot be answered yet wait.
//   4. When all pieces are there every local shard hears OK, and its memory is not touched any
//      more. The finished segment (gather: the contributions) stays for peers that are behind.
#ifndef STIEFEL_SERVER_PEER_OPERATION_H_
#define STIEFEL_SERVER_PEER_OPERATION_H_

#include <atomic>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "common/clock.h"
#include "kernels/collective.h"
#include "server/peer_part_fetch.h"
#include "server/peer_transport.h"
#include "server/peer_workers.h"

namespace stiefel {

// The servers of a run under one placement.
struct PeerGroup {
  uint64_t run_uid = 0;
  int64_t placement_epoch = 0;
  int32_t self = 0;                          // this server
  std::vector<std::string> servers;          // addresses
  std::vector<std::vector<int32_t>> owners;  // [matrix][shard]: server
};

// Payload of one answer.
inline constexpr int64_t kPeerChunkBytes = 1 << 20;

std::string DescribeKey(const CollectiveKey& key);  // "collective 2 of matrix 5, step 7, ..."
bool operator<(const CollectiveKey& a, const CollectiveKey& b);  // matrix first, then time

// Used by one thread at a time: everything happens on the strand, or after it was closed.
class PeerOperation : public std::enable_shared_from_this<PeerOperation> {
 public:
  struct Context {
    const PeerGroup* group;
    PeerTransport* transport;
    PeerExecutor* executor;  // for `done`
    const Clock* clock;
    int64_t timeout_micros;
    std::atomic<int64_t>* sum_bytes_sent;
    std::atomic<int64_t>* gather_bytes_sent;
    std::atomic<int64_t>* waiting;  // answers, over all operations
    // Everything is there and every shard, wherever it lives, has started this one: those before
    // it are of no use to anybody.
    std::function<void(const CollectiveKey&)> completed;
  };

  // REQUIRES: this server owns a shard of the matrix.
  PeerOperation(const Context* context, const CollectiveKey& key,
                const std::shared_ptr<PeerStrand>& strand);
  ~PeerOperation();

  // REQUIRES: this server owns the shard, count >= 0.
  void Start(const CollectivePart& part, Collective::Done done);
  // REQUIRES: a request that PeerCollective admitted.
  void Ask(const v1::FetchPartRequest& request, std::unique_ptr<PeerReply> reply);
  void Tick(int64_t now_micros);
  // Late ticks move the deadline.
  void Extend(int64_t micros) { deadline_ += micros; }
  // It is over, with this status where it was not finished. Afterwards Start and Ask are refused.
  void End(const absl::Status& status);

  // No local shard has started it and nobody waits for it: it may be forgotten.
  bool unused() const { return unused_.load(); }

 private:
  enum class State { kWaits, kRuns, kDone, kFailed };
  enum class Role { kAdd, kPull, kGather };
  struct LocalPart {
    CollectivePart part;
    Collective::Done done;
  };
  // A byte range, and what it needs from peers.
  struct Piece {
    size_t lane;
    int64_t begin, end;
    std::vector<PartFetch> fetches;
    size_t missing;
    bool landed = false;
  };
  // Pieces that are fetched in order, `limit` at once.
  struct Lane {
    Role role;
    int limit;
    std::vector<size_t> pieces;
    size_t next = 0;
    int flying = 0;
  };
  struct Waiting {
    v1::FetchPartRequest request;
    std::unique_ptr<PeerReply> reply;
    int64_t expires_at;
  };

  const std::vector<int32_t>& owners() const { return context_->group->owners[key_.matrix]; }
  int32_t self() const { return context_->group->self; }
  bool AllStarted() const { return started_ == local_shards_; }

  void Begin(const CollectivePart& part);
  void PlanSum();
  void PlanGather();
  void PlanPieces(Role role, int limit, int64_t begin, int64_t end, int64_t piece_bytes,
                  const std::vector<PartSource>& from);
  void LaunchMore();
  void Launch(size_t piece, size_t fetch);
  void OnLanded(size_t piece, size_t fetch, const absl::Status& status, std::string bytes);
  void Progress();
  void Land(Piece* piece);
  void Add(const Piece& piece);
  void Complete();
  void Fail(const absl::Status& status);
  void Release();
  absl::Status Missing() const;
  std::string NameOf(int32_t server) const;
  void Deliver(Collective::Done done, const absl::Status& status);

  bool TryAnswer(const v1::FetchPartRequest& request, PeerReply* reply);
  bool AnswerSum(const v1::FetchPartRequest& request, PeerReply* reply);
  void Send(const char* from, const v1::FetchPartRequest& request, PeerReply* reply);
  void AnswerWaiting();
  void RefuseWaiting();
  void SetWaiting(std::vector<Waiting> waiting);

  // Constant after construction.
  const Context* const context_;
  const CollectiveKey key_;
  const std::weak_ptr<PeerStrand> strand_;
  std::vector<int32_t> servers_;  // the distinct owners, ascending
  size_t local_shards_ = 0;

  State state_ = State::kWaits;
  absl::Status status_;                          // of kFailed
  std::vector<std::optional<LocalPart>> parts_;  // by shard
  size_t started_ = 0;

  // From the first start on.
  CollectivePart::Kind kind_ = CollectivePart::Kind::kGather;
  int64_t count_ = 0;
  int64_t bytes_ = 0;  // of one contribution
  int64_t deadline_ = 0;
  std::vector<Piece> pieces_;
  std::vector<Lane> lanes_;
  std::deque<size_t> ready_;                     // pieces that have all they need from peers
  size_t left_ = 0;                              // pieces that have not landed
  int64_t segment_begin_ = 0, segment_end_ = 0;  // bytes
  int64_t add_piece_bytes_ = 0;
  size_t add_pieces_at_ = 0;  // the first one
  // What peers fetch: the finished segment, or all contributions to a gather.
  std::unique_ptr<char[]> kept_;

  std::vector<Waiting> waiting_;
  std::atomic<bool> unused_{true};
};

}  // namespace stiefel

#endif  // STIEFEL_SERVER_PEER_OPERATION_H_
