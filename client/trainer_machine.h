// A trainer's side of the step protocol (every rank): a pure object. Events in, control messages
// out; which pieces may be sent under which credit; which updates to keep; when a step is done.
// Copyable, with a canonical byte form. No threads, no RPC, no gradient data.
//
// The walk: Joined (all servers) -> Begin -> Push* -> EndPush -> [updates] + Decided -> done ->
// Applied -> Begin of the next step. Updates are received for one step only, the one after the last
// applied: before Begin too, since a step that a predecessor of this rank began may still be
// decided.
#ifndef STIEFEL_CLIENT_TRAINER_MACHINE_H_
#define STIEFEL_CLIENT_TRAINER_MACHINE_H_

#include <cstdint>
#include <deque>
#include <map>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/interval_set.h"
#include "proto/protocol.h"
#include "stiefel/v1/optimizer.pb.h"

namespace stiefel {

// A control message for one server; its Sender is filled in by the host.
struct TrainerSend {
  int32_t server;
  v1::TrainerMessage message;
};
using TrainerSends = std::vector<TrainerSend>;

// A block of this rank as the protocol sees it.
struct TrainerBlock {
  int32_t matrix = 0;
  int32_t server = 0;  // owner
  int64_t elements = 0;
  int32_t element_bytes = 4;
  int32_t parts = 1;
  int64_t piece_elements =
      0;  // pieces are cut at multiples of this, so that a piece sent again has equal bounds
};

// A piece to send now, or one that arrived.
struct PieceRef {
  int32_t block = 0;
  int32_t part = 0;
  int64_t offset = 0;
  int64_t count = 0;
  bool absent = false;
};

enum class UpdateVerdict {
  kPlace,      // copy it, then report OnUpdatePlaced
  kDuplicate,  // held already
  kDiscard,    // of another step, or of an older attempt or round
};

// How a step ended for this trainer.
struct StepEnd {
  int64_t step = 0;
  int32_t attempt = 0;
  int32_t round = 0;
  v1::Outcome outcome = v1::OUTCOME_UNSPECIFIED;
  double grad_norm = 0;
  std::vector<int32_t> skipped_matrices;
  std::string reason;
};

class TrainerMachine {
 public:
  TrainerMachine(int32_t servers, std::vector<TrainerBlock> push, std::vector<TrainerBlock> pull,
                 ProtocolPolicy policy = {});

  // ---- joining. `applied`: the last step fully applied, unset if this trainer holds no weights
  // (WEIGHTS mode). `consumed`: what the server's JoinRun answered. REQUIRES: once per server and
  // life.
  void OnJoined(int32_t server, std::optional<int64_t> applied, int64_t consumed);

  // The placement changed (Moved): the servers and owners are others, and nothing is known of them.
  // What the user did in the step that is begun stays, and is sent to the new owners, as attempt 0.
  // OnJoined follows for each server.
  void Rejoin(int32_t servers, std::vector<TrainerBlock> push, std::vector<TrainerBlock> pull);

  // ---- the user's calls
  // Begins step applied()+1, in the attempt that is due. FAILED_PRECONDITION: another step, already
  // begun, not joined, fenced.
  absl::Status Begin(int64_t step, v1::BeginStep fields, TrainerSends* sends);
  // A part of a push block is ready in memory (or absent in this step). FAILED_PRECONDITION: no
  // step begun, pushed before, after EndPush; INVALID_ARGUMENT: no such block.
  absl::Status Push(int32_t block, int32_t part, bool absent);
  // FAILED_PRECONDITION names the first block that was not pushed.
  absl::Status EndPush(v1::EndPush fields, TrainerSends* sends);
  // The outcome of the step was taken in by the user: commit or skip applied, so that the next
  // Begin may assert it; a drop acknowledged.
  absl::Status Applied(TrainerSends* sends);

  // ---- servers
  // Control stream to the server is up (again): sends BeginStep, EndPush and the query after what
  // arrived.
  void OnServerUp(int32_t server, TrainerSends* sends);
  // A stream to the server broke: nothing is sent until the server said what arrived.
  void OnServerDown(int32_t server);
  void OnCredit(int32_t server, const v1::Credit& credit);
  void OnArrived(int32_t server, const v1::Arrived& arrived);
  void OnDecided(int32_t server, const v1::Decided& decided);
  void OnRefused(int32_t server, const v1::Refused& refused);
  void OnAwaiting(int32_t server, const v1::Awaiting& awaiting);

  // Up to `max_pieces` pieces for this server, at most `max_bytes` of payload together, under its
  // credit. Empty: nothing to send now.
  std::vector<PieceRef> NextPieces(int32_t server, int64_t max_bytes, int max_pieces);

  // ---- updates
  UpdateVerdict OnUpdate(int32_t server, const v1::ChunkHeader& header, const v1::Piece& piece);
  void OnUpdatePlaced(const v1::ChunkHeader& header, const v1::Piece& piece);

  // ---- state
  // The step that is being received; applied() + 1.
  int64_t target() const { return applied_ + 1; }
  int64_t applied() const { return applied_; }
  bool begun() const { return begun_.has_value(); }
  int32_t attempt() const { return begun_ ? begun_->attempt() : next_attempt_; }
  // Weights of a trainer that joined with none are complete.
  bool has_weights() const { return !fresh_; }
  // Everything of the target step is here: decided, and all deltas that this rank pulls complete.
  // Or the begun attempt was dropped.
  std::optional<StepEnd> End() const;
  // All of this pull block has arrived, of some version of the step.
  bool Complete(int32_t block) const {
    return received_[block].absent || received_[block].placed >= pull_[block].elements;
  }
  // The deltas of this pull block are complete for the decided outcome.
  bool BlockReady(int32_t pull_block) const;
  // Non-OK: this process must stop (fenced), or the begun step cannot succeed (refused).
  const absl::Status& fatal() const { return fatal_; }
  const absl::Status& step_error() const { return step_error_; }
  // The last Awaiting of the current attempt; empty if none.
  const std::string& awaiting() const { return awaiting_; }
  // For messages: which servers have not delivered, in words.
  std::vector<int32_t> UnfinishedServers() const;
  bool AllSent(int32_t server) const;
  // The first (block, part) that EndPush of the begun step would miss.
  std::optional<std::pair<int32_t, int32_t>> FirstUnpushed() const;
  std::string CanonicalBytes() const;

 private:
  struct Version {
    int64_t step = -1;  // below all others: weights may be those of step 0
    int32_t attempt = 0;
    int32_t round = 0;
    friend bool operator==(const Version& a, const Version& b) {
      return a.step == b.step && a.attempt == b.attempt && a.round == b.round;
    }
    friend bool operator<(const Version& a, const Version& b) {
      return std::tie(a.step, a.attempt, a.round) < std::tie(b.step, b.attempt, b.round);
    }
  };
  struct Received {  // of one pull block
    Version version;
    IntervalSet reserved;
    int64_t placed = 0;
    bool absent = false;
  };
  struct ServerState {
    bool joined = false;
    bool up = false;
    bool knows_arrived = true;  // false between a break and its Arrived
    int64_t consumed = 0;       // at join
    v1::Credit credit;
    int64_t sent_bytes = 0;  // of the current attempt
    bool discarded_ahead = false;
    std::deque<PieceRef> queue;
  };

  bool SendsBegun(int32_t server) const;
  void Queue(int32_t block, int32_t part, bool absent, const IntervalSet* arrived);
  void QueueEverything(int32_t server, const v1::Arrived& arrived);
  bool DeliveredFor(int32_t block, const v1::Decided& decided) const;
  bool AllDeliveredFor(const v1::Decided& decided) const;
  const v1::Decided* DecidedAt(int64_t step) const;
  std::optional<StepEnd> FreshEnd() const;
  bool FreshDelivered(int32_t block) const;
  void ClearAttempt();
  void SendBegun(int32_t server, TrainerSends* sends) const;
  void MoveApplied(int64_t applied);
  void MoveFreshTarget();

  ProtocolPolicy policy_;
  std::vector<TrainerBlock> push_;
  std::vector<TrainerBlock> pull_;
  std::vector<ServerState> servers_;
  bool fresh_ = false;
  int64_t applied_ = 0;
  int32_t next_attempt_ = 0;

  std::optional<v1::BeginStep> begun_;
  std::optional<v1::EndPush> ended_;
  std::map<std::pair<int32_t, int32_t>, bool> pushed_;  // (block, part) -> absent
  std::vector<Received> received_;                      // by pull block
  std::map<int64_t, v1::Decided>
      decided_;                         // commit or skip, by step; only of steps not yet applied
  std::optional<v1::Decided> dropped_;  // the last drop of the target step
  bool dropped_before_move_ = false;    // the begun attempt ended under the placement before
  // How many pull blocks, from the first, were found delivered for this decision; not state.
  mutable Version scanned_;
  mutable int32_t delivered_ = 0;
  absl::Status fatal_;
  absl::Status step_error_;
  std::string awaiting_;
};

}  // namespace stiefel

#endif  // STIEFEL_CLIENT_TRAINER_MACHINE_H_
