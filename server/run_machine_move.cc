// Changes of placement: rules 15 and 16. See the second walk in run_machine.h.
#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "google/protobuf/util/message_differencer.h"
#include "server/run_machine.h"

namespace stiefel {

void RunMachine::OnOpened(Actions* actions) {
  if (incoming_) actions->push_back(action::FetchState{next_, prepare_->after_step()});
}

bool RunMachine::Outdated(const v1::Sender& sender) const {
  return moved_ && sender.placement_epoch() < epoch_ && CheckIdentity(sender).ok();
}

// ---------------------------------------------------------------- messages of the leader

// These name their epochs themselves: a leader speaks of a change under the placement before it.
void RunMachine::OnEpochMessage(const v1::TrainerMessage& message, int64_t now, Actions* actions) {
  const v1::Sender& sender = message.sender();
  const Incarnation theirs(sender.incarnation());
  if (absl::Status known = CheckIdentity(sender); !known.ok()) {
    if (sender.rank() < 0 || sender.rank() >= spec_->world_size()) return;
    return Refuse(sender.rank(), theirs, known, 0, 0, theirs < ranks_[sender.rank()].incarnation,
                  actions);
  }
  if (sender.rank() != 0) {
    return Refuse(
        sender.rank(), theirs,
        absl::PermissionDeniedError(absl::StrCat("rank ", sender.rank(), " is not the leader")), 0,
        0, false, actions);
  }
  ranks_[0].lease_end = now + spec_->lease();
  if (message.has_prepare()) return OnPrepare(message.prepare(), actions);
  if (message.has_cancel_prepare())
    return OnCancelPrepare(message.cancel_prepare().epoch(), now, actions);
  OnSwitch(message.switch_placement().epoch(), now, actions);
}

absl::Status RunMachine::CheckPrepare(const v1::Prepare& prepare) const {
  const int64_t epoch = prepare.placement().epoch();
  if (prepare_) {
    return absl::FailedPreconditionError(
        absl::StrCat("placement ", prepare_->placement().epoch(),
                     " is prepared here already; cancel it before placement ", epoch));
  }
  if (epoch <= largest_epoch_ && policy_.fresh_epochs) {
    return absl::FailedPreconditionError(
        absl::StrCat("epoch ", epoch, " is not above ", largest_epoch_, ", which was used before"));
  }
  if (prepare.after_step() < consumed_) {
    return absl::FailedPreconditionError(absl::StrCat(
        "a move after step ", prepare.after_step(), ", but step ", consumed_, " is decided here"));
  }
  return absl::OkStatus();
}

void RunMachine::OnPrepare(const v1::Prepare& prepare, Actions* actions) {
  const int64_t epoch = prepare.placement().epoch();
  if (epoch == epoch_) return SendEpochAck(epoch, v1::EpochAck::SWITCHED, "", actions);
  if (prepare_ && google::protobuf::util::MessageDifferencer::Equals(*prepare_, prepare))
    return SendPrepareState(actions);
  const absl::Status may = CheckPrepare(prepare);
  auto next = may.ok() ? spec_->Moved(prepare.placement()) : may;
  if (!next.ok()) {
    return SendEpochAck(epoch, v1::EpochAck::FAILED, std::string(next.status().message()), actions);
  }
  prepare_ = prepare;
  next_ = *std::move(next);
  largest_epoch_ = std::max(largest_epoch_, epoch);
  fetched_ = next_ == nullptr;
  if (!fetched_) actions->push_back(action::FetchState{next_, prepare.after_step()});
  MaybePrepared(actions);
}

void RunMachine::OnPrepared(int64_t epoch, const absl::Status& status, Actions* actions) {
  if (!prepare_ || prepare_->placement().epoch() != epoch || fetched_) return;
  fetched_ = true;
  if (status.ok()) return MaybePrepared(actions);
  prepare_failure_ = absl::StrCat(
      "server ", spec_->opened().servers(spec_->opened().server_index()), ": ", status.message());
  SendPrepareState(actions);
}

// From its PREPARED on this server seals nothing and lets nobody join, so that what it said stays
// true until the leader's Switch or CancelPrepare.
void RunMachine::MaybePrepared(Actions* actions) {
  if (!prepare_ || prepared_ || !fetched_ || !prepare_failure_.empty()) return;
  if (!incoming_ && !ReadyToMove()) return;
  prepared_ = true;
  SendPrepareState(actions);
}

// Rule 15, and nobody needs the deltas of the last step any more: the leader's Prepare says that it
// has applied it.
bool RunMachine::ReadyToMove() const {
  const bool decided = consumed_ == prepare_->after_step() && !attempt_.sealed() && !unsettled_;
  if ((!decided && policy_.decide_first) || !weights_ready_) return false;
  for (int32_t rank = 1; rank < static_cast<int32_t>(ranks_.size()); ++rank) {
    if (!AppliedBeforeMove(rank) && policy_.applied_first) return false;
  }
  return true;
}

bool RunMachine::AppliedBeforeMove(int32_t rank) const {
  const RankState& state = ranks_[rank];
  return state.closed ||
         (state.joined && !state.needs_weights && state.applied >= prepare_->after_step());
}

void RunMachine::OnCancelPrepare(int64_t epoch, int64_t now, Actions* actions) {
  if (epoch == epoch_) return SendEpochAck(epoch, v1::EpochAck::SWITCHED, "", actions);
  largest_epoch_ = std::max(largest_epoch_, epoch);
  SendEpochAck(epoch, v1::EpochAck::CANCELLED, "", actions);
  if (!prepare_ || prepare_->placement().epoch() != epoch) return;
  actions->push_back(action::DropPrepared{epoch});
  prepare_.reset();
  next_.reset();
  fetched_ = prepared_ = false;
  prepare_failure_.clear();
  if (incoming_) {
    return EndRun(
        absl::StrCat("run \"", spec_->opened().name(), "\": the leader cancelled placement ", epoch,
                     ", in which this server was to come in"),
        actions);
  }
  if (attempt_.deadline != 0) attempt_.deadline = now + spec_->step_timeout();
  AnswerReadyJoins(now, actions);
}

void RunMachine::OnSwitch(int64_t epoch, int64_t now, Actions* actions) {
  if (epoch == epoch_) return SendEpochAck(epoch, v1::EpochAck::SWITCHED, "", actions);
  if (!prepare_ || prepare_->placement().epoch() != epoch || (!prepared_ && policy_.prepare_all)) {
    return SendEpochAck(epoch, v1::EpochAck::FAILED,
                        absl::StrCat("placement ", epoch, " is not prepared on server ",
                                     spec_->opened().servers(spec_->opened().server_index())),
                        actions);
  }
  moved_.emplace();
  *moved_->mutable_placement() = prepare_->placement();
  moved_->set_after_step(prepare_->after_step());
  for (int32_t rank = 1; rank < static_cast<int32_t>(ranks_.size()); ++rank)
    SendMoved(rank, ranks_[rank].incarnation, actions);
  SendEpochAck(epoch, v1::EpochAck::SWITCHED, "", actions);
  StartAnew(now, actions);
}

// The placement is in force: everything but the committed state begins as in a run just opened.
void RunMachine::StartAnew(int64_t now, Actions* actions) {
  if (kept_step_ != 0) actions->push_back(action::FreeDeltas{kept_step_});
  kept_step_ = 0;
  unsettled_ = {attempt_.step, attempt_.attempt};
  actions->push_back(action::SwitchPlacement{next_, attempt_.step, attempt_.attempt});
  epoch_ = moved_->placement().epoch();
  away_ = next_ == nullptr;
  if (!away_) spec_ = next_;
  prepare_.reset();
  next_.reset();
  incoming_ = fetched_ = prepared_ = false;
  prepare_failure_.clear();
  // All ranks have applied the last step, and its decision is on every server: nobody asks for it.
  last_consumed_.reset();
  last_attempt_.reset();
  weights_ready_ = true;
  all_joined_once_ = false;
  pushers_.assign(spec_->matrices().size(), {});
  for (RankState& rank : ranks_) {
    rank.joined = rank.control_up = rank.needs_weights = false;
    rank.begun_step = 0;
    rank.applied = consumed_;
    rank.held_begin.reset();
    rank.held_end.reset();
  }
  ResetAttempt(consumed_ + 1, 0);
  if (replan_) {
    const auto& servers = moved_->placement().servers();
    const auto takes_part = [&servers](const std::string& server) {
      return std::find(servers.begin(), servers.end(), server) != servers.end();
    };
    if (std::all_of(replan_->add().begin(), replan_->add().end(), takes_part) &&
        std::none_of(replan_->drain().begin(), replan_->drain().end(), takes_part))
      replan_.reset();
  }
  if (!away_) return AnswerReadyJoins(now, actions);
  unsettled_.reset();
  release_at_ = now + spec_->takeover_timeout();
  for (const PendingJoin& pending : pending_joins_)
    actions->push_back(action::AnswerJoin{pending.token, absl::OkStatus(), JoinAnswer()});
  pending_joins_.clear();
}

// ---------------------------------------------------------------- what is said

void RunMachine::SendEpochAck(int64_t epoch, v1::EpochAck::State state, const std::string& reason,
                              Actions* actions) const {
  v1::ServerMessage message;
  message.mutable_epoch_ack()->set_epoch(epoch);
  message.mutable_epoch_ack()->set_state(state);
  message.mutable_epoch_ack()->set_reason(reason);
  Send(0, std::move(message), actions);
}

// Tells the leader whether this server is prepared, once it knows.
void RunMachine::SendPrepareState(Actions* actions) const {
  if (!prepare_) return;
  const int64_t epoch = prepare_->placement().epoch();
  if (prepared_) return SendEpochAck(epoch, v1::EpochAck::PREPARED, "", actions);
  if (!prepare_failure_.empty())
    SendEpochAck(epoch, v1::EpochAck::FAILED, prepare_failure_, actions);
}

void RunMachine::SendMoved(int32_t rank, const Incarnation& to, Actions* actions) const {
  v1::ServerMessage message;
  message.set_run_uid(spec_->opened().run_uid());
  message.set_placement_epoch(epoch_);
  *message.mutable_moved() = *moved_;
  actions->push_back(action::SendControl{rank, to, std::move(message)});
}

void RunMachine::OnReplanAsked(const v1::ReplanAsked& asked, Actions* actions) {
  if (!replan_) replan_.emplace();
  const auto add = [](const std::string& server,
                      google::protobuf::RepeatedPtrField<std::string>* to) {
    if (std::find(to->begin(), to->end(), server) == to->end()) to->Add()->assign(server);
  };
  for (const std::string& server : asked.add()) add(server, replan_->mutable_add());
  for (const std::string& server : asked.drain()) add(server, replan_->mutable_drain());
  SendReplanAsked(actions);
}

void RunMachine::SendReplanAsked(Actions* actions) const {
  if (!replan_) return;
  v1::ServerMessage message;
  *message.mutable_replan_asked() = *replan_;
  Send(0, std::move(message), actions);
}

// ---------------------------------------------------------------- for others

v1::OpenRunRequest RunMachine::OpenedNow() const {
  v1::OpenRunRequest opened = spec_->opened();
  if (!away_) return opened;
  opened.set_placement_epoch(epoch_);
  *opened.mutable_servers() = moved_->placement().servers();
  *opened.mutable_owners() = moved_->placement().owners();
  *opened.mutable_replicas() = moved_->placement().replicas();
  opened.set_server_index(-1);
  return opened;
}

std::string RunMachine::AwaitedByMove() const {
  if (!prepare_failure_.empty()) return "cancellation by the leader (rank 0)";
  if (prepared_) return "Switch or CancelPrepare of the leader (rank 0)";
  if (!fetched_) return "state of shards from their owners";
  std::vector<int32_t> behind;
  for (int32_t rank = 1; rank < static_cast<int32_t>(ranks_.size()); ++rank) {
    if (!AppliedBeforeMove(rank)) behind.push_back(rank);
  }
  if (!behind.empty())
    return absl::StrCat("step ", prepare_->after_step(), " to be applied by ", RankList(behind));
  return absl::StrCat("decision of step ",
                      attempt_.sealed() ? attempt_.step : prepare_->after_step());
}

void RunMachine::AppendMove(std::string* out) const {
  absl::StrAppend(out, "|v", largest_epoch_, incoming_, fetched_, prepared_, away_,
                  prepare_failure_);
  if (prepare_) absl::StrAppend(out, "P", prepare_->SerializeAsString());
  if (moved_) absl::StrAppend(out, "M", moved_->SerializeAsString());
  if (replan_) absl::StrAppend(out, "R", replan_->SerializeAsString());
  if (unsettled_) absl::StrAppend(out, "U", unsettled_->first, ".", unsettled_->second);
}

}  // namespace stiefel
