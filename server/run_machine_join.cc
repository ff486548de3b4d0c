// Joins, takeover of the leader, streams.
#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/errors.h"
#include "common/status.h"
#include "plan/shards.h"
#include "server/run_machine.h"

namespace stiefel {

absl::StatusOr<v1::TakeOverResponse> RunMachine::OnTakeOver(const v1::TakeOverRequest& request,
                                                            int64_t now, Actions* actions) {
  if (!failure_.ok()) return failure_;
  if (ended_)
    return absl::FailedPreconditionError(
        absl::StrCat("run \"", spec_->opened().name(), "\" has ended"));
  if (request.run_uid() != spec_->opened().run_uid()) {
    return RunMismatch("TakeOver", absl::StrCat("run_uid ", request.run_uid()),
                       absl::StrCat("run_uid ", spec_->opened().run_uid()));
  }
  const Incarnation theirs(request.leader());
  RankState& rank = ranks_[0];
  if (theirs < leader_ && policy_.fence_leader) {
    return StaleIncarnation(0, theirs.generation, theirs.id, leader_.generation, leader_.id);
  }
  if (theirs != leader_) {
    if (Live(0, now) && policy_.fence_leader) {
      return absl::AlreadyExistsError(
          absl::StrCat("rank 0 lives as ", leader_.DebugString(),
                       "; it can be replaced when its streams close or its lease ends in ",
                       static_cast<double>(rank.lease_end - now) / 1e6, " s"));
    }
    // Rules 3 and 4 hold from here on, not only from its JoinRun: else the attempt that the dead
    // leader had begun could still be voted while the deltas before it are kept.
    Supersede(0, theirs, actions);
    leader_ = theirs;
    rank.joined = rank.closed = rank.control_up = rank.streams_closed = false;
  }
  rank.lease_end = now + spec_->lease();
  v1::TakeOverResponse record;
  *record.mutable_opened() = OpenedNow();
  record.set_placement_epoch(epoch_);
  record.set_consumed_step(consumed_);
  if (last_consumed_) *record.mutable_last_consumed() = *last_consumed_;
  if (last_attempt_) *record.mutable_last_attempt() = *last_attempt_;
  record.set_open_step(attempt_.step);
  record.set_open_attempt(attempt_.attempt);
  if (attempt_.vote0) *record.mutable_vote_round0() = *attempt_.vote0;
  if (attempt_.vote1) *record.mutable_vote_round1() = *attempt_.vote1;
  if (attempt_.rescale) *record.mutable_rescale() = *attempt_.rescale;
  if (attempt_.drop) *record.mutable_drop() = *attempt_.drop;
  if (prepare_) *record.mutable_prepare() = *prepare_;
  record.set_largest_epoch(largest_epoch_);
  return record;
}

void RunMachine::OnJoin(uint64_t token, const v1::JoinRunRequest& request, int64_t now,
                        int64_t deadline, Actions* actions) {
  if (absl::Status valid = CheckJoinHeader(request); !valid.ok()) {
    actions->push_back(action::AnswerJoin{token, valid, {}});
    return;
  }
  if (away_) {  // tells where the run is
    actions->push_back(action::AnswerJoin{token, absl::OkStatus(), JoinAnswer()});
    return;
  }
  if (HoldsJoins()) {
    pending_joins_.push_back({token, deadline, request});
    return;
  }
  const absl::Status admitted = Admit(request, now, actions);
  if (!admitted.ok() && !absl::IsUnavailable(admitted)) {
    actions->push_back(action::AnswerJoin{token, admitted, {}});
    return;
  }
  pending_joins_.push_back({token, deadline, request});
  AnswerReadyJoins(now, actions);
}

void RunMachine::OnJoinCancelled(uint64_t token) {
  pending_joins_.erase(std::remove_if(pending_joins_.begin(), pending_joins_.end(),
                                      [token](const PendingJoin& p) { return p.token == token; }),
                       pending_joins_.end());
}

absl::Status RunMachine::CheckJoinIdentity(const v1::JoinRunRequest& request, int64_t now) const {
  const Incarnation theirs(request.incarnation());
  const RankState& rank = ranks_[request.rank()];
  if (theirs < rank.incarnation) {
    return StaleIncarnation(request.rank(), theirs.generation, theirs.id,
                            rank.incarnation.generation, rank.incarnation.id);
  }
  if (request.rank() == 0 && theirs != leader_ && policy_.fence_leader) {
    return absl::FailedPreconditionError(absl::StrCat("rank 0 joins as ", theirs.DebugString(),
                                                      ", but the leader is ", leader_.DebugString(),
                                                      "; take the run over first"));
  }
  if (theirs == rank.incarnation) {
    if (rank.closed)
      return absl::FailedPreconditionError(
          absl::StrCat("rank ", request.rank(), " has closed the run as ", theirs.DebugString()));
    return absl::OkStatus();
  }
  if (Live(request.rank(), now)) {
    return absl::AlreadyExistsError(absl::StrCat(
        "rank ", request.rank(), " is held by a living trainer (", rank.incarnation.DebugString(),
        "); it can be replaced when its streams close or its lease ends in ",
        static_cast<double>(rank.lease_end - now) / 1e6, " s"));
  }
  return absl::OkStatus();
}

absl::Status RunMachine::CheckApplied(const v1::JoinRunRequest& request) const {
  if (!request.has_applied_step()) {
    if (spec_->weights_mode()) return absl::OkStatus();
    return absl::InvalidArgumentError(absl::StrCat(
        "rank ", request.rank(),
        " joins without an applied step; in DELTA mode the server holds no weights to give it"));
  }
  const int64_t applied = request.applied_step();
  if (!policy_.check_applied) return absl::OkStatus();
  if (applied == consumed_) return absl::OkStatus();
  if (applied == consumed_ + 1 && attempt_.sealed()) {
    return absl::UnavailableError(
        absl::StrCat("step ", applied, " is voted here and waits for the leader's decision"));
  }
  // A skip needs no deltas, but its record is gone once the next step is decided: not after a vote.
  const bool skipped =
      last_consumed_ && last_consumed_->outcome() == v1::SKIP && !attempt_.vote0.has_value();
  if (applied == consumed_ - 1 && (kept_step_ == consumed_ || skipped)) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrCat(
      "rank ", request.rank(), " has applied step ", applied, ", this server has decided step ",
      consumed_,
      applied < consumed_
          ? " and no longer keeps the deltas between; restore the trainer from a copy at that step"
          : "; restore this server or the trainer to a common step"));
}

absl::Status RunMachine::CheckJoinHeader(const v1::JoinRunRequest& request) const {
  if (!failure_.ok()) return failure_;
  if (ended_)
    return absl::NotFoundError(absl::StrCat("run \"", spec_->opened().name(), "\" has ended"));
  if (request.protocol_version() != kProtocolVersion) {
    return absl::FailedPreconditionError(
        absl::StrCat("rank ", request.rank(), " speaks protocol ", request.protocol_version(),
                     " (software ", request.software_version(), "), this server ", kProtocolVersion,
                     " (software ", kSoftwareVersion, ")"));
  }
  if (request.world_size() != spec_->world_size()) {
    return absl::InvalidArgumentError(
        absl::StrCat("rank ", request.rank(), " has world_size ", request.world_size(),
                     ", the run was opened with ", spec_->world_size()));
  }
  if (request.rank() < 0 || request.rank() >= spec_->world_size())
    return IndexOutOfRange("rank", request.rank(), spec_->world_size());
  return absl::OkStatus();
}

// Rules 3 and 4. OK: the rank is joined. UNAVAILABLE: try again after the next decision.
absl::Status RunMachine::Admit(const v1::JoinRunRequest& request, int64_t now, Actions* actions) {
  if (!failure_.ok()) return failure_;
  STIEFEL_RETURN_IF_ERROR(CheckJoinIdentity(request, now));
  STIEFEL_RETURN_IF_ERROR(spec_->CheckParameters(request));
  STIEFEL_ASSIGN_OR_RETURN(std::vector<BlockSpec> push, spec_->ResolvePush(request));
  STIEFEL_ASSIGN_OR_RETURN(std::vector<BlockSpec> pull, spec_->ResolvePull(request));

  RankState& rank = ranks_[request.rank()];
  const Incarnation theirs(request.incarnation());
  const bool again = rank.joined && theirs == rank.incarnation;
  if ((all_joined_once_ || again) && !(push == rank.push)) {
    return absl::FailedPreconditionError(absl::StrCat(
        "rank ", request.rank(), " joins with other push blocks (", push.size(), ") than before (",
        rank.push.size(), "); blocks are fixed while the run is open"));
  }
  if (again) {
    rank.lease_end = now + spec_->lease();
    return absl::OkStatus();
  }
  STIEFEL_RETURN_IF_ERROR(CheckApplied(request));

  // A new leader's stream may be up before it joins.
  rank.control_up = rank.control_up && rank.incarnation == theirs;
  Supersede(request.rank(), theirs, actions);
  rank.joined = true;
  rank.closed = rank.streams_closed = false;
  rank.lease_end = now + spec_->lease();
  rank.applied = request.has_applied_step() ? request.applied_step() : consumed_;
  rank.needs_weights = !request.has_applied_step();
  rank.push = std::move(push);
  rank.pull = std::move(pull);
  release_at_ = 0;
  MaybePrepared(actions);
  return absl::OkStatus();
}

// A newer life of the rank: nothing is freed or summed on the word of the older one.
void RunMachine::Supersede(int32_t index, const Incarnation& theirs, Actions* actions) {
  RankState& rank = ranks_[index];
  if (policy_.cancel_on_join) {
    rank.begun_step = 0;
    rank.held_begin.reset();
    rank.held_end.reset();
  }
  if (attempt_.ranks[index].begun && !attempt_.sealed() && policy_.drop_on_rejoin) {
    DropAttempt(
        absl::StrCat("step ", attempt_.step, " attempt ", attempt_.attempt, ": rank ", index,
                     " was replaced (", theirs.DebugString(), ") after it had begun"),
        actions);
  }
  if (rank.incarnation != theirs && rank.incarnation != Incarnation())
    actions->push_back(action::Fence{index, rank.incarnation});
  rank.incarnation = theirs;
}

std::vector<int32_t> RunMachine::MissingJoins() const {
  std::vector<int32_t> missing;
  for (int32_t rank = 0; rank < static_cast<int32_t>(ranks_.size()); ++rank) {
    if (!ranks_[rank].joined) missing.push_back(rank);
  }
  return missing;
}

// Every element of a matrix owned here is pushed by some rank.
absl::Status RunMachine::CheckCoverage() const {
  std::vector<std::vector<Rect>> cover(spec_->matrices().size());
  for (const RankState& rank : ranks_) {
    for (const BlockSpec& block : rank.push) cover[block.matrix].push_back(block.rect);
  }
  for (const int32_t index : spec_->owned()) {
    const MatrixSpec& matrix = spec_->matrices()[index];
    const std::vector<Rect> gaps = Gaps(WholeRect(matrix.rows, matrix.cols), cover[index], 4);
    if (gaps.empty()) continue;
    std::string list;
    for (const Rect& gap : gaps) {
      absl::StrAppend(&list, list.empty() ? "" : ", ", InMatrix(matrix.place, gap).DebugString());
    }
    return absl::FailedPreconditionError(absl::StrCat("nobody pushes ", list, " of \"", matrix.name,
                                                      "\" (", matrix.whole_rows, " x ",
                                                      matrix.whole_cols, ")"));
  }
  return absl::OkStatus();
}

void RunMachine::FixPushers() {
  for (int32_t rank = 0; rank < static_cast<int32_t>(ranks_.size()); ++rank) {
    const std::vector<BlockSpec>& blocks = ranks_[rank].push;
    for (int32_t b = 0; b < static_cast<int32_t>(blocks.size()); ++b)
      pushers_[blocks[b].matrix].emplace_back(rank, b);
  }
}

v1::JoinRunResponse RunMachine::JoinAnswer() const {
  const v1::OpenRunRequest opened = OpenedNow();
  v1::JoinRunResponse answer;
  answer.set_run_uid(opened.run_uid());
  answer.set_placement_epoch(epoch_);
  answer.set_consumed_step(consumed_);
  answer.set_update_mode(opened.update_mode());
  *answer.mutable_servers() = opened.servers();
  *answer.mutable_owners() = opened.owners();
  *answer.mutable_parameters() = opened.parameters();
  *answer.mutable_phases() = opened.phases();
  *answer.mutable_cuts() = opened.cuts();
  *answer.mutable_replicas() = opened.replicas();
  answer.set_lease_seconds(static_cast<double>(spec_->lease()) / 1e6);
  answer.set_step_timeout_seconds(static_cast<double>(spec_->step_timeout()) / 1e6);
  answer.set_weights_needed(!weights_ready_);
  return answer;
}

// Answers every pending join whose rank is in, once all ranks are; tries those again that waited
// for a decision.
void RunMachine::AnswerReadyJoins(int64_t now, Actions* actions) {
  if (HoldsJoins()) return;
  for (auto pending = pending_joins_.begin(); pending != pending_joins_.end();) {
    const RankState& rank = ranks_[pending->request.rank()];
    if (rank.joined && rank.incarnation == Incarnation(pending->request.incarnation())) {
      ++pending;
      continue;
    }
    const absl::Status admitted = Admit(pending->request, now, actions);
    if (admitted.ok() || absl::IsUnavailable(admitted)) {
      ++pending;
    } else {
      actions->push_back(action::AnswerJoin{pending->token, admitted, {}});
      pending = pending_joins_.erase(pending);
    }
  }
  if (!MissingJoins().empty()) return;
  absl::Status covered;
  if (!all_joined_once_) {
    covered = CheckCoverage();
    if (covered.ok() && admission_) covered = admission_(ranks_);
    if (covered.ok()) {
      all_joined_once_ = true;
      FixPushers();
    } else {
      for (RankState& rank : ranks_) rank.joined = false;  // they may join again with other blocks
    }
  }
  std::vector<PendingJoin> waiting;
  for (PendingJoin& pending : pending_joins_) {
    const RankState& rank = ranks_[pending.request.rank()];
    if (covered.ok() && rank.incarnation != Incarnation(pending.request.incarnation())) {
      waiting.push_back(std::move(pending));
      continue;
    }
    actions->push_back(action::AnswerJoin{pending.token, covered,
                                          covered.ok() ? JoinAnswer() : v1::JoinRunResponse()});
  }
  pending_joins_ = std::move(waiting);
}

absl::Status RunMachine::OnControlUp(const v1::Sender& sender, int64_t now, Actions* actions) {
  const bool outdated = Outdated(sender);
  // A new leader may speak under the epoch that it is about to put in force.
  const bool ahead =
      sender.rank() == 0 && prepare_ && sender.placement_epoch() == prepare_->placement().epoch();
  STIEFEL_RETURN_IF_ERROR(outdated || ahead ? CheckIdentity(sender) : CheckSender(sender));
  RankState& rank = ranks_[sender.rank()];
  rank.control_up = true;
  rank.streams_closed = false;
  rank.lease_end = now + spec_->lease();
  if (outdated) {
    SendMoved(sender.rank(), rank.incarnation, actions);
    return absl::OkStatus();
  }
  if (sender.rank() == 0) {
    SendPrepareState(actions);
    SendReplanAsked(actions);
  }
  if (!policy_.resend_votes) return absl::OkStatus();
  if (last_consumed_) SendDecided(sender.rank(), *last_consumed_, actions);
  if (last_attempt_ && last_attempt_->outcome() == v1::DROP)
    SendDecided(sender.rank(), *last_attempt_, actions);
  if (sender.rank() == 0) SendSeal(actions);
  const AttemptRank& part = attempt_.ranks[sender.rank()];
  if (part.begun && part.incarnation == rank.incarnation && MayGrant())
    actions->push_back(action::GrantCredit{sender.rank()});
  return absl::OkStatus();
}

void RunMachine::OnControlDown(int32_t rank, const Incarnation& incarnation, int64_t now) {
  if (ranks_[rank].incarnation != incarnation) return;
  ranks_[rank].control_up = false;
  ranks_[rank].streams_closed = true;
}

absl::Status RunMachine::OnDataUp(const v1::Sender& sender, int64_t now, Actions* actions) {
  STIEFEL_RETURN_IF_ERROR(CheckSender(sender));
  if (!ranks_[sender.rank()].joined)
    return absl::FailedPreconditionError(
        absl::StrCat("rank ", sender.rank(), " opens a data stream before it joined"));
  if (policy_.resend_deltas) actions->push_back(action::Resend{sender.rank()});
  return absl::OkStatus();
}

absl::Status RunMachine::CheckTrainer(const v1::Sender& sender) const {
  STIEFEL_RETURN_IF_ERROR(CheckSender(sender));
  if (ranks_[sender.rank()].joined) return absl::OkStatus();
  return absl::FailedPreconditionError(
      absl::StrCat("rank ", sender.rank(), " has not joined; join the run first"));
}

}  // namespace stiefel
