// LeaderMachine: changes of placement (rules 13, 15 and 16).
#include <algorithm>
#include <limits>
#include <utility>

#include "absl/strings/str_cat.h"
#include "client/leader_machine.h"

namespace stiefel {
namespace {

// Of a server that was opened to come in and has not switched: it is not in the run yet.
bool ComesIn(const v1::TakeOverResponse& record) {
  return record.opened().has_moves_in() &&
         record.opened().moves_in().placement().epoch() == record.placement_epoch();
}

const google::protobuf::RepeatedPtrField<std::string>& ServersInForce(
    const v1::TakeOverResponse& record) {
  return ComesIn(record) ? record.opened().moves_in().placement().servers()
                         : record.opened().servers();
}

// Empty: the server has left.
std::string AddressOf(const v1::TakeOverResponse& record) {
  const v1::OpenRunRequest& opened = record.opened();
  if (opened.server_index() < 0 || opened.server_index() >= opened.servers_size()) return "";
  return opened.servers(opened.server_index());
}

}  // namespace

absl::Status LeaderMachine::StartMove(const v1::Prepare& prepare, std::vector<bool> next,
                                      LeaderSends* sends) {
  const int64_t epoch = prepare.placement().epoch();
  const auto in_force = std::count(members_.begin(), members_.end(), true);
  if (move_)
    return absl::FailedPreconditionError(
        absl::StrCat("a move to placement ", move_->prepare.placement().epoch(), " is under way"));
  if (records_missing_ > 0)
    return absl::FailedPreconditionError("the run has not been taken over yet");
  if (epoch <= largest_epoch_ && policy_.fresh_epochs)
    return absl::FailedPreconditionError(
        absl::StrCat("placement ", epoch, " is not above ", largest_epoch_, ", used before"));
  if (static_cast<int64_t>(next.size()) < in_force)
    return absl::InvalidArgumentError(
        absl::StrCat(next.size(), " servers in a move of a run on ", in_force));
  largest_epoch_ = std::max(largest_epoch_, epoch);
  members_.assign(next.size(), false);
  std::fill(members_.begin(), members_.begin() + in_force, true);
  if (outstanding_) outstanding_->acknowledged.resize(next.size(), true);
  for (auto& [key, open] : open_) open.servers.resize(next.size());
  move_end_.reset();
  move_.emplace();
  move_->prepare = prepare;
  move_->epochs.assign(next.size(), epoch);
  move_->next = std::move(next);
  EnterPhase(Move::Phase::kDeciding, sends);
  AdvanceMove(sends);
  return absl::OkStatus();
}

// Rule 15: whatever was sealed is decided, and recorded by all, first.
void LeaderMachine::AdvanceMove(LeaderSends* sends) {
  if (!move_) return;
  const bool decided = (!outstanding_ && open_.empty()) || !policy_.decide_first;
  if (move_->phase == Move::Phase::kDeciding && decided) EnterPhase(Move::Phase::kPreparing, sends);
  const auto& answered = move_->answered;
  const bool all = std::find(answered.begin(), answered.end(), false) == answered.end();
  const bool any = std::find(answered.begin(), answered.end(), true) != answered.end();
  switch (move_->phase) {
    case Move::Phase::kDeciding:
      return;
    case Move::Phase::kPreparing:
      if (decided && (all || (any && !policy_.prepare_all)))
        EnterPhase(Move::Phase::kSwitching, sends);
      return;
    case Move::Phase::kSwitching:
    case Move::Phase::kCancelling:
      if (all) EndMove();
      return;
  }
}

void LeaderMachine::EnterPhase(Move::Phase phase, LeaderSends* sends) {
  move_->phase = phase;
  // Servers that come in may have said that they are prepared while decisions were awaited.
  if (phase != Move::Phase::kPreparing) move_->answered.assign(members_.size(), false);
  for (size_t server = 0; server < members_.size(); ++server) {
    // Those that were to come in hold nothing that anybody needs.
    if (phase == Move::Phase::kCancelling && !members_[server]) move_->answered[server] = true;
    SendPhase(static_cast<int32_t>(server), sends);
  }
}

void LeaderMachine::SendPhase(int32_t server, LeaderSends* sends) const {
  if (move_->epochs[server] == 0) return;
  v1::TrainerMessage message;
  switch (move_->phase) {
    case Move::Phase::kDeciding:
      return;
    case Move::Phase::kPreparing:
      if (!members_[server]) return;  // the host opens it with the same in moves_in
      *message.mutable_prepare() = move_->prepare;
      break;
    case Move::Phase::kSwitching:
      message.mutable_switch_placement()->set_epoch(move_->epochs[server]);
      break;
    case Move::Phase::kCancelling:
      message.mutable_cancel_prepare()->set_epoch(move_->epochs[server]);
      break;
  }
  sends->push_back({server, std::move(message)});
}

void LeaderMachine::OnEpochAck(int32_t server, const v1::EpochAck& ack, LeaderSends* sends) {
  if (!move_ || ack.epoch() != move_->epochs[server]) return;
  const bool cancelling = move_->phase == Move::Phase::kCancelling;
  const bool switching = move_->phase == Move::Phase::kSwitching;
  switch (ack.state()) {
    case v1::EpochAck::PREPARED:
      if (move_->phase == Move::Phase::kDeciding && !members_[server]) break;
      if (move_->phase != Move::Phase::kPreparing) return;
      break;
    case v1::EpochAck::CANCELLED:
      if (!cancelling) return;
      break;
    case v1::EpochAck::SWITCHED:
      if (!switching) return;
      break;
    case v1::EpochAck::FAILED:
      if (switching)
        failure_ = absl::FailedPreconditionError(absl::StrCat(
            "server ", server, " cannot switch to placement ", ack.epoch(), ": ", ack.reason()));
      if (switching || cancelling) return;
      return CancelMove(ack.reason(), sends);
    default:
      return;
  }
  move_->answered[server] = true;
  AdvanceMove(sends);
}

void LeaderMachine::OnMoveDeadline(LeaderSends* sends) {
  if (!move_) return;
  if (move_->phase == Move::Phase::kDeciding || move_->phase == Move::Phase::kPreparing)
    return CancelMove(absl::StrCat("the deadline passed, awaiting ", Awaited()), sends);
  for (size_t server = 0; server < members_.size(); ++server) {
    if (move_->phase == Move::Phase::kSwitching && !move_->next[server])
      move_->answered[server] = true;
  }
  AdvanceMove(sends);
}

bool LeaderMachine::AwaitsOnlyLeavers() const {
  if (!move_ || move_->phase != Move::Phase::kSwitching) return false;
  for (size_t server = 0; server < members_.size(); ++server) {
    if (move_->next[server] && !move_->answered[server]) return false;
  }
  return true;
}

void LeaderMachine::CancelMove(const std::string& reason, LeaderSends* sends) {
  move_->reason = reason;
  EnterPhase(Move::Phase::kCancelling, sends);
  AdvanceMove(sends);
}

void LeaderMachine::EndMove() {
  const bool switched = move_->phase == Move::Phase::kSwitching;
  if (switched) {
    members_ = move_->next;
    epoch_ = move_->prepare.placement().epoch();
    decided_ =
        std::max(decided_, Key(move_->prepare.after_step(), std::numeric_limits<int32_t>::max()));
    open_.clear();
  }
  move_end_ = MoveEnd{move_->prepare.placement().epoch(), switched, move_->reason};
  move_.reset();
}

// ---------------------------------------------------------------- takeover

// The largest epoch that any server switched to is in force, and its servers take part.
void LeaderMachine::FindMembers() {
  const v1::TakeOverResponse* newest = nullptr;
  for (const auto& record : records_) {
    if (!record) continue;
    largest_epoch_ = std::max({largest_epoch_, record->placement_epoch(), record->largest_epoch()});
    if (newest == nullptr || newest->placement_epoch() < record->placement_epoch())
      newest = &*record;
  }
  epoch_ = newest->placement_epoch();
  const auto& servers = ServersInForce(*newest);
  for (size_t s = 0; s < records_.size(); ++s) {
    if (!records_[s]) continue;
    const std::string address = AddressOf(*records_[s]);
    members_[s] = std::find(servers.begin(), servers.end(), address) != servers.end();
  }
}

// Rule 13: a Switch found anywhere is completed, else every Prepare is cancelled.
void LeaderMachine::FindMove(LeaderSends* sends) {
  Move move;
  move.next = members_;
  move.epochs.assign(members_.size(), 0);
  bool behind = false;
  bool prepared = false;
  std::vector<int64_t> cancelled(members_.size(), 0);
  for (size_t s = 0; s < records_.size(); ++s) {
    if (!records_[s]) continue;
    const v1::TakeOverResponse& record = *records_[s];
    const int64_t found = record.has_prepare() ? record.prepare().placement().epoch() : 0;
    if (record.placement_epoch() < epoch_) {
      if (found == epoch_) {
        behind = true;
        move.prepare = record.prepare();
        move.epochs[s] = found;
      } else if (members_[s]) {
        failure_ = absl::FailedPreconditionError(absl::StrCat(
            "server ", s, " (", AddressOf(record), ") is at placement ", record.placement_epoch(),
            " and was never prepared for ", epoch_, ", which is in force elsewhere; restore it"));
      }
    } else if (found != 0) {
      prepared = true;
      cancelled[s] = found;
      if (move.prepare.placement().epoch() < found) move.prepare = record.prepare();
    }
  }
  // A newer Prepare says that the Switch was completed but for servers that left.
  const bool complete = behind && !prepared && policy_.complete_switch;
  if (!complete) move.epochs = std::move(cancelled);
  if (!complete && !(prepared && policy_.cancel_found)) return;
  move.reason = "the leader that prepared it is gone";
  move_ = std::move(move);
  EnterPhase(complete ? Move::Phase::kSwitching : Move::Phase::kCancelling, sends);
  for (size_t s = 0; s < members_.size(); ++s) {
    if (move_->epochs[s] == 0) move_->answered[s] = true;
  }
  AdvanceMove(sends);
}

// ---------------------------------------------------------------- for others

std::string LeaderMachine::AwaitedByMove() const {
  if (!failure_.ok()) return std::string(failure_.message());
  static constexpr const char* kWhat[] = {"decide", "prepare", "switch to", "cancel"};
  const int64_t epoch = move_->prepare.placement().epoch();
  for (size_t s = 0; s < members_.size(); ++s) {
    if (!move_->answered[s])
      return absl::StrCat("server ", s, " to ", kWhat[static_cast<int>(move_->phase)],
                          " placement ", epoch);
  }
  return "";
}

void LeaderMachine::AppendMove(std::string* out) const {
  absl::StrAppend(out, "|m", epoch_, ".", largest_epoch_, failure_.ok() ? "" : "F");
  for (const bool member : members_) absl::StrAppend(out, member);
  if (move_end_) absl::StrAppend(out, "e", move_end_->epoch, move_end_->switched);
  if (!move_) return;
  absl::StrAppend(out, "p", static_cast<int>(move_->phase), move_->prepare.SerializeAsString());
  for (size_t s = 0; s < members_.size(); ++s)
    absl::StrAppend(out, ",", move_->next[s], move_->answered[s], move_->epochs[s]);
}

}  // namespace stiefel
