// The leader's side of the step protocol (rank 0): takes in votes, decides, and finishes what a
// dead predecessor began; and moves the run to another placement. A pure object: events in,
// messages out; copyable, with a canonical byte form. docs/PROTOCOL.md rules 7, 8, 12, 13, 15
// and 16.
//
//   votes of round 0 from all servers --> skip | drop | commit, or Rescale --> votes of round 1 -->
//   skip | drop | commit one decision at a time: sent to all servers, sent again on reconnect,
//   acknowledged by all before the next
//
//   StartMove --> nothing left to decide --> Prepare --> PREPARED of all --> Switch --> SWITCHED of
//   all; or FAILED, or the deadline --> CancelPrepare --> CANCELLED of all in force
//
// Servers are numbered by the host: those of the placement in force first, in its order; during a
// move and a takeover those that come in, or that left, after them.
// Files: leader_machine.cc (votes and decisions), leader_move.cc (placements).
#ifndef STIEFEL_CLIENT_LEADER_MACHINE_H_
#define STIEFEL_CLIENT_LEADER_MACHINE_H_

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "proto/protocol.h"
#include "stiefel/v1/optimizer.pb.h"

namespace stiefel {

// A control message for one server; its Sender is filled in by the host.
struct LeaderSend {
  int32_t server;
  v1::TrainerMessage message;
};
using LeaderSends = std::vector<LeaderSend>;

// How a change of placement ended.
struct MoveEnd {
  int64_t epoch = 0;
  bool switched = false;  // else it was cancelled
  std::string reason;     // of a cancellation
};

class LeaderMachine {
 public:
  // A leader that opened the run itself: may decide from the first vote on.
  static LeaderMachine Opened(int32_t servers, int64_t start_step, ProtocolPolicy policy = {});
  // A leader that takes a run over: decides nothing before OnRecord was called for every server
  // (rule 12): every one that any record names in its placement or its Prepare, unless it holds
  // nothing of the run.
  static LeaderMachine TakingOver(int32_t servers, ProtocolPolicy policy = {});

  // Which shards belong to one matrix: they are skipped together. Without it each is a matrix; a
  // record says it too.
  void KnowShards(const v1::OpenRunRequest& opened);

  // A server's answer to TakeOver.
  void OnRecord(int32_t server, const v1::TakeOverResponse& record, LeaderSends* sends);

  void OnVote(int32_t server, const v1::Vote& vote, LeaderSends* sends);
  void OnDrop(int32_t server, const v1::Drop& drop, LeaderSends* sends);
  void OnDecideAck(int32_t server, const v1::DecideAck& ack, LeaderSends* sends);
  // The control stream to the server is up (again): sends what it has not acknowledged (rule 10).
  void OnServerUp(int32_t server, LeaderSends* sends);

  // ---- change of placement

  // Moves the run to prepare.placement after a step that this rank has applied, and whose successor
  // it has not begun: the host withholds its BeginStep while moving(). next[i]: whether server i
  // takes part in the new placement; it is as long as the union of servers, those that come in
  // last. The host opens these with moves_in and reports what they say like what the others say
  // (OnEpochAck; FAILED where they could not be opened). FAILED_PRECONDITION: a move is under way,
  // the takeover is not finished, or the epoch was used before. INVALID_ARGUMENT: `next` is shorter
  // than the servers in force.
  absl::Status StartMove(const v1::Prepare& prepare, std::vector<bool> next, LeaderSends* sends);
  void OnEpochAck(int32_t server, const v1::EpochAck& ack, LeaderSends* sends);
  // The move took too long: it is cancelled; once Switch was sent it can only be completed, and
  // servers that leave are not waited for any more.
  void OnMoveDeadline(LeaderSends* sends);
  // Until all answered Switch or CancelPrepare.
  // The move waits for nothing but to hear that servers which leave have switched too. They have no
  // part in the run any more, and may be gone: OnMoveDeadline goes on without them.
  bool AwaitsOnlyLeavers() const;
  bool moving() const { return move_.has_value(); }
  // How the last move ended. After a switch the host numbers the servers anew and goes on with
  // Opened(servers of the new placement, after_step + 1).
  const std::optional<MoveEnd>& move_end() const { return move_end_; }
  // The next epoch must be above every one that was ever in force or prepared (rule 15).
  int64_t largest_epoch() const { return largest_epoch_; }
  // Which servers take part in the placement in force.
  const std::vector<bool>& members() const { return members_; }
  // Whether this leader has anything to say to the server: it takes part, or in a move under way.
  // Others, which a takeover found, left earlier: their records count, but they refuse streams of
  // a placement that they never heard of, and are left alone.
  bool Leads(int32_t server) const {
    return members_[server] || (move_ && move_->epochs[server] != 0);
  }
  // Non-OK: what was found cannot be completed, with the server and both epochs.
  const absl::Status& failure() const { return failure_; }

  // All servers accepted this leader and acknowledged what it found to complete: it may rejoin
  // (rule 13).
  bool ready() const { return records_missing_ == 0 && !outstanding_ && !move_ && failure_.ok(); }
  // For messages: what the leader waits for; empty if nothing.
  std::string Awaited() const;
  std::string CanonicalBytes() const;

 private:
  using Key = std::pair<int64_t, int32_t>;  // step, attempt

  struct ServerVotes {
    std::optional<v1::Vote> round0;
    std::optional<v1::Vote> round1;
    std::optional<v1::Drop> drop;
  };
  struct Open {
    std::vector<ServerVotes> servers;
    std::optional<v1::Rescale> rescale;
  };
  struct Outstanding {
    v1::Decide decision;
    std::vector<bool> acknowledged;
  };

  // A change of placement under way. Vectors by server.
  struct Move {
    enum class Phase { kDeciding, kPreparing, kSwitching, kCancelling };
    Phase phase = Phase::kDeciding;
    v1::Prepare prepare;
    std::vector<bool> next;
    std::vector<int64_t> epochs;  // that the server prepared
    std::vector<bool> answered;   // in this phase, or need not
    std::string reason;           // of a cancellation
  };

  LeaderMachine(int32_t servers, ProtocolPolicy policy);

  bool Decided(const Key& key) const { return key <= decided_; }
  Open& OpenAt(const Key& key);
  void CompleteFound(LeaderSends* sends);
  void TryDecide(LeaderSends* sends);
  // The next decision on an attempt, or a Rescale (sent from here); nothing while votes are
  // missing.
  std::optional<v1::Decide> Judge(const Key& key, Open* open, LeaderSends* sends);
  std::optional<v1::Decide> JudgeVotes(const Key& key, const std::vector<const v1::Vote*>& votes,
                                       bool rescaled, Open* open, LeaderSends* sends);
  void SendDecision(LeaderSends* sends);
  void SendRescale(const v1::Rescale& rescale, LeaderSends* sends) const;
  void Settle(const v1::Decide& decision);
  void SetOutstanding(v1::Decide decision);

  // leader_move.cc
  void FindMembers();
  void FindMove(LeaderSends* sends);
  void AdvanceMove(LeaderSends* sends);
  void EnterPhase(Move::Phase phase, LeaderSends* sends);
  void SendPhase(int32_t server, LeaderSends* sends) const;
  void CancelMove(const std::string& reason, LeaderSends* sends);
  void EndMove();
  std::string AwaitedByMove() const;
  void AppendMove(std::string* out) const;

  // The shards of the matrix that `shard` belongs to, as [first, second).
  std::pair<int32_t, int32_t> ShardsBeside(int32_t shard) const;

  ProtocolPolicy policy_;
  std::vector<int32_t> first_shards_;  // of all matrices, ascending; empty: each shard is a matrix
  int32_t records_missing_ = 0;
  std::vector<std::optional<v1::TakeOverResponse>> records_;
  Key decided_;  // everything up to here is decided
  std::optional<Outstanding> outstanding_;
  std::map<Key, Open> open_;

  std::vector<bool> members_;  // by server
  int64_t epoch_ = 0;          // in force, as far as the records say
  int64_t largest_epoch_ = 0;
  std::optional<Move> move_;
  std::optional<MoveEnd> move_end_;
  absl::Status failure_;
};

}  // namespace stiefel

#endif  // STIEFEL_CLIENT_LEADER_MACHINE_H_
