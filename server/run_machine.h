// The server's side of the step protocol for one run: a pure object. Events in, actions out; time
// is an argument; no threads, no RPC, no matrix data. Copyable, with a canonical byte form, so that
// a model test can explore its states. docs/PROTOCOL.md has the rules, cited as "rule n".
//
// The walk of a step (DESIGN section 4):
//   1. BeginStep of every rank           -> common fields agree, else Drop; deltas of the last step
//   are freed; credits
//   2. pieces of every block             -> a complete matrix is computed (Compute), its update
//   published (Publish)
//   3. EndPush of all, all computed      -> Vote: sealed (rule 6)
//   4. Rescale of the leader             -> everything is computed again as round 1, and voted
//   again
//   5. Decide of the leader              -> recorded (rule 8), taken in (Finish), told to all ranks
//   (Decided)
//   6. OnSettled                         -> credits of the next attempt may be granted
// The walk of a change of placement (rules 15 and 16):
//   1. Prepare of the leader (or a run opened with moves_in) -> FetchState
//   2. OnPrepared, the step before decided, nothing sealed, every other rank has applied it ->
//   EpochAck{PREPARED}; from here on nothing is sealed and joins wait
//   3. Switch of the leader -> Moved to all ranks, SwitchPlacement; all ranks join again. Or
//   CancelPrepare -> DropPrepared, and the run goes on
// Files: run_machine.cc (life of the run, records), run_machine_join.cc (joins, takeover),
// run_machine_time.cc (leases, deadlines), run_machine_step.cc (1, 2 and 6 of the walk),
// run_machine_decide.cc (3 to 5), run_machine_move.cc (changes of placement).
#ifndef STIEFEL_SERVER_RUN_MACHINE_H_
#define STIEFEL_SERVER_RUN_MACHINE_H_

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "proto/protocol.h"
#include "server/actions.h"
#include "server/arrivals.h"
#include "server/run_spec.h"
#include "stiefel/v1/optimizer.pb.h"

namespace stiefel {

// One rank's part in the open attempt.
struct AttemptRank {
  bool begun = false;
  bool ended = false;       // EndPush
  Incarnation incarnation;  // whose gradients are summed
  v1::BeginStep begin;
  v1::EndPush end;
  RankArrivals arrivals;
};

struct MatrixProgress {
  enum class State { kWaiting, kComputing, kDone };
  State state = State::kWaiting;
  v1::Vote::Matrix result;
};

// The attempt that is open, or comes next.
struct Attempt {
  int64_t step = 0;
  int32_t attempt = 0;
  int32_t round = 0;
  double scale = 1;
  int64_t deadline = 0;  // 0: nobody has begun
  std::vector<AttemptRank> ranks;
  std::vector<MatrixProgress> matrices;  // by matrix; only owned ones move
  std::optional<v1::Vote> vote0;
  std::optional<v1::Vote> vote1;
  std::optional<v1::Rescale> rescale;
  std::optional<v1::Drop> drop;

  bool AllBegun() const;
  bool sealed() const { return vote0.has_value() || drop.has_value(); }
};

struct RankState {
  bool joined = false;
  bool closed = false;      // left by CloseRun
  Incarnation incarnation;  // the largest accepted
  bool control_up = false;
  bool streams_closed = false;  // it had a control stream and lost it
  int64_t lease_end = 0;
  int64_t applied = 0;         // last step fully applied, as this incarnation says
  bool needs_weights = false;  // joined with nothing; wants the weights of the consumed step
  int64_t begun_step = 0;      // largest step this incarnation has begun here
  std::vector<BlockSpec> push;
  std::vector<BlockSpec> pull;
  std::optional<v1::BeginStep> held_begin;  // ahead of this server's record (rule 11)
  std::optional<v1::EndPush> held_end;
};

// Counts and explanations for status.
struct RunCounters {
  int64_t committed_steps = 0;
  int64_t skipped_steps = 0;
  int64_t dropped_attempts = 0;
  int64_t duplicate_pieces = 0;
  int64_t stale_pieces = 0;
  std::string last_skip_reason;
  std::string last_drop_reason;
};

class RunMachine {
 public:
  // The run is open and nobody has joined. `now` in microseconds of any monotonic clock, as
  // everywhere here.
  RunMachine(std::shared_ptr<const RunSpec> spec, int64_t now, ProtocolPolicy policy = {});

  // Asked once all ranks have joined and cover everything, before any join is answered: whether the
  // host can take the declared blocks. Its refusal is every join's answer.
  using Admission = std::function<absl::Status(const std::vector<RankState>& ranks)>;
  void set_admission(Admission admission) { admission_ = std::move(admission); }

  // First of all: a server that comes into a run under way starts to fetch.
  void OnOpened(Actions* actions);

  // ---- calls

  // Rule 12. ALREADY_EXISTS while the old leader lives; FAILED_PRECONDITION for a smaller
  // incarnation or another uid.
  absl::StatusOr<v1::TakeOverResponse> OnTakeOver(const v1::TakeOverRequest& request, int64_t now,
                                                  Actions* actions);

  // Answered by AnswerJoin with `token`, now or later. `deadline`: when the call must be answered.
  void OnJoin(uint64_t token, const v1::JoinRunRequest& request, int64_t now, int64_t deadline,
              Actions* actions);
  // The caller of a pending join went away.
  void OnJoinCancelled(uint64_t token);

  // The rank leaves; true if the run ended. Idempotent.
  absl::StatusOr<bool> OnClose(const v1::CloseRunRequest& request, int64_t now, Actions* actions);

  // ---- control stream. A non-OK status refuses the stream.
  absl::Status OnControlUp(const v1::Sender& sender, int64_t now, Actions* actions);
  void OnControlDown(int32_t rank, const Incarnation& incarnation, int64_t now);
  void OnControlMessage(const v1::TrainerMessage& message, int64_t now, Actions* actions);

  // ---- data streams. A non-OK status ends the stream and changes nothing.
  absl::Status OnDataUp(const v1::Sender& sender, int64_t now, Actions* actions);
  // REQUIRES: the verdict kPlace is followed by exactly one OnPlaced or OnPieceLost when the copy
  // has ended.
  absl::StatusOr<PieceVerdict> OnPiece(const v1::ChunkHeader& header, const v1::Piece& piece,
                                       int64_t now);
  void OnPlaced(const v1::ChunkHeader& header, const v1::Piece& piece, int64_t now,
                Actions* actions);
  // The bytes did not match the piece's checksum: as if it had not come.
  void OnPieceLost(const v1::ChunkHeader& header, const v1::Piece& piece);
  // Whether the sender is the living incarnation of a rank that joined. FAILED_PRECONDITION
  // otherwise.
  absl::Status CheckTrainer(const v1::Sender& sender) const;

  // ---- the engine. `failure` non-OK: the matrix could not be computed at all.
  void OnComputed(int64_t step, int32_t attempt, int32_t round, const v1::Vote::Matrix& result,
                  const absl::Status& failure, Actions* actions);
  // What Finish{step, attempt} asked for is done: the gradient buffers are free.
  void OnSettled(int64_t step, int32_t attempt, Actions* actions);
  // Committed state was lost (the device failed): the run fails loudly.
  void OnStateLost(const absl::Status& why, Actions* actions) { Fail(why, actions); }
  // Initial weights cover every matrix of this server (WEIGHTS mode).
  void OnWeightsReady(Actions* actions);

  // ---- change of placement
  // What FetchState asked for under this epoch is here. `status` non-OK: it cannot be had.
  void OnPrepared(int64_t epoch, const absl::Status& status, Actions* actions);
  // An operator, or this server's own end, asks for another placement: the leader hears of it until
  // the placement agrees.
  void OnReplanAsked(const v1::ReplanAsked& asked, Actions* actions);
  // The leader will not do it.
  void OnReplanRefused() { replan_.reset(); }

  // ---- time
  // Call about four times a second. A late call (the process was frozen) first extends every
  // deadline by the gap.
  void OnTick(int64_t now, Actions* actions);
  // What OnTick does for one deadline; for tests that drive time by hand.
  void OnStepDeadline(int64_t now, Actions* actions);
  void OnLeaseEnd(int32_t rank, int64_t now);
  // SIGTERM: an unsealed attempt is dropped, a new one is not begun.
  void OnDrain(int64_t now, Actions* actions);

  // ---- state
  const RunSpec& spec() const { return *spec_; }
  const std::shared_ptr<const RunSpec>& shared_spec() const { return spec_; }
  const Attempt& attempt() const { return attempt_; }
  const std::vector<RankState>& ranks() const { return ranks_; }
  // (rank, position in its push blocks) of everything that is pushed to the matrix, in rank order.
  // Empty until all ranks joined.
  const std::vector<std::pair<int32_t, int32_t>>& pushers(int32_t matrix) const {
    return pushers_[matrix];
  }
  const RunCounters& counters() const { return counters_; }
  int64_t consumed_step() const { return consumed_; }
  int64_t placement_epoch() const { return epoch_; }
  const std::optional<v1::Decide>& last_consumed() const { return last_consumed_; }
  const std::optional<v1::Decide>& last_attempt() const { return last_attempt_; }
  // Step whose deltas are kept; 0: none.
  int64_t kept_step() const { return kept_step_; }
  // A change of placement that is neither switched nor cancelled here.
  const std::optional<v1::Prepare>& prepare() const { return prepare_; }
  // The last change of placement; unset: none yet.
  const std::optional<v1::Moved>& moved() const { return moved_; }
  // This server has no part in the placement in force: it only tells where the run went.
  bool away() const { return away_; }
  bool ended() const { return ended_; }
  bool draining() const { return draining_; }
  bool weights_ready() const { return weights_ready_; }
  const absl::Status& failure() const { return failure_; }
  bool Live(int32_t rank, int64_t now) const;
  bool AnyLive(int64_t now) const;
  // Seconds until the takeover timeout releases the run; 0 while some lease runs.
  double ReleaseSeconds(int64_t now) const;
  // joining, collecting, computing, voted, rescaled, idle ...
  std::string PhaseName() const;
  // Who or what is awaited, in words; empty if nothing.
  std::string Awaited() const;
  std::string CanonicalBytes() const;

 private:
  struct PendingJoin {
    uint64_t token;
    int64_t deadline;
    v1::JoinRunRequest request;
  };

  // run_machine.cc
  void Send(int32_t rank, v1::ServerMessage message, Actions* actions) const;
  void SendToAll(const v1::ServerMessage& message, Actions* actions) const;
  void Refuse(int32_t rank, const Incarnation& to, const absl::Status& why, int64_t step,
              int32_t attempt, bool fenced, Actions* actions) const;
  absl::Status CheckIdentity(const v1::Sender& sender) const;
  absl::Status CheckSender(const v1::Sender& sender) const;
  void Fail(const absl::Status& why, Actions* actions);
  void EndRun(const std::string& reason, Actions* actions);
  void ResetAttempt(int64_t step, int32_t attempt);
  void SendDecided(int32_t rank, const v1::Decide& decision, Actions* actions) const;
  std::string RankList(const std::vector<int32_t>& ranks) const;

  // run_machine_join.cc
  absl::Status CheckJoinHeader(const v1::JoinRunRequest& request) const;
  absl::Status Admit(const v1::JoinRunRequest& request, int64_t now, Actions* actions);
  absl::Status CheckJoinIdentity(const v1::JoinRunRequest& request, int64_t now) const;
  // OK: accepted; UNAVAILABLE: wait for a decision; else refused (rule 3).
  absl::Status CheckApplied(const v1::JoinRunRequest& request) const;
  void AnswerReadyJoins(int64_t now, Actions* actions);
  absl::Status CheckCoverage() const;
  v1::JoinRunResponse JoinAnswer() const;
  std::vector<int32_t> MissingJoins() const;
  void Supersede(int32_t index, const Incarnation& theirs, Actions* actions);
  void FixPushers();

  // run_machine_step.cc
  void OnBeginStep(int32_t rank, const v1::BeginStep& begin, int64_t now, Actions* actions);
  absl::Status CheckBegin(int32_t rank, const v1::BeginStep& begin) const;
  void AcceptBegin(int32_t rank, const v1::BeginStep& begin, int64_t now, Actions* actions);
  void OnAllBegun(Actions* actions);
  void OnArrivedQuery(int32_t rank, const v1::ArrivedQuery& query, Actions* actions) const;
  void GrantAll(Actions* actions);
  bool MayGrant() const;
  void MaybeFreeDeltas(Actions* actions);
  absl::Status CheckAgreement() const;

  // run_machine_decide.cc
  void OnRescale(const v1::Rescale& rescale, Actions* actions);
  void OnDecide(const v1::Decide& decision, int64_t now, Actions* actions);
  void Record(const v1::Decide& decision, int64_t now, Actions* actions);
  void ReplayHeld(int64_t now, Actions* actions);
  void MaybeComputeAll(Actions* actions);
  void MaybeCompute(int32_t matrix, Actions* actions);
  void MaybeVote(Actions* actions);
  void OnEndPush(int32_t rank, const v1::EndPush& end, int64_t now, Actions* actions);
  void DropAttempt(const std::string& reason, Actions* actions);
  void SendSeal(Actions* actions) const;
  std::string Missing() const;

  // run_machine_move.cc
  // A known life that has not heard of the placement in force.
  bool Outdated(const v1::Sender& sender) const;
  // Joins wait: this server is not in the run yet, or said that it is prepared to leave the
  // placement in force.
  bool HoldsJoins() const { return prepared_ || incoming_; }
  void OnEpochMessage(const v1::TrainerMessage& message, int64_t now, Actions* actions);
  void OnPrepare(const v1::Prepare& prepare, Actions* actions);
  absl::Status CheckPrepare(const v1::Prepare& prepare) const;
  void MaybePrepared(Actions* actions);
  bool ReadyToMove() const;
  bool AppliedBeforeMove(int32_t rank) const;
  void OnCancelPrepare(int64_t epoch, int64_t now, Actions* actions);
  void OnSwitch(int64_t epoch, int64_t now, Actions* actions);
  void StartAnew(int64_t now, Actions* actions);
  void SendEpochAck(int64_t epoch, v1::EpochAck::State state, const std::string& reason,
                    Actions* actions) const;
  void SendPrepareState(Actions* actions) const;
  void SendMoved(int32_t rank, const Incarnation& to, Actions* actions) const;
  void SendReplanAsked(Actions* actions) const;
  v1::OpenRunRequest OpenedNow() const;
  std::string AwaitedByMove() const;
  void AppendMove(std::string* out) const;

  std::shared_ptr<const RunSpec> spec_;
  ProtocolPolicy policy_;
  Admission admission_;
  int64_t epoch_ = 0;

  Incarnation leader_;
  std::vector<RankState> ranks_;
  std::vector<PendingJoin> pending_joins_;
  bool all_joined_once_ = false;  // from here on push blocks are fixed
  std::vector<std::vector<std::pair<int32_t, int32_t>>>
      pushers_;  // by matrix: (rank, push block), in rank order
  bool weights_ready_ = false;

  Attempt attempt_;
  int64_t consumed_ = 0;
  std::optional<v1::Decide> last_consumed_;
  std::optional<v1::Decide> last_attempt_;
  int64_t kept_step_ = 0;
  // (step, attempt) that ended while its gradient buffers may still be read or written.
  std::optional<std::pair<int64_t, int32_t>> unsettled_;

  // Change of placement. Cleared by Switch and CancelPrepare, but for the last three.
  std::optional<v1::Prepare> prepare_;
  std::shared_ptr<const RunSpec> next_;  // null: this server leaves
  bool incoming_ = false;                // not in the run before the Switch
  bool fetched_ = false;
  bool prepared_ = false;        // said so
  std::string prepare_failure_;  // of FAILED
  int64_t largest_epoch_ = 0;    // ever in force or prepared (rule 15)
  std::optional<v1::Moved> moved_;
  bool away_ = false;
  std::optional<v1::ReplanAsked> replan_;

  bool ended_ = false;
  bool draining_ = false;
  absl::Status failure_;
  int64_t last_tick_ = 0;
  int64_t release_at_ = 0;  // takeover timeout; 0: some lease runs
  RunCounters counters_;
};

}  // namespace stiefel

#endif  // STIEFEL_SERVER_RUN_MACHINE_H_
