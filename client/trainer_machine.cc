#include "client/trainer_machine.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "common/errors.h"

namespace stiefel {

TrainerMachine::TrainerMachine(int32_t servers, std::vector<TrainerBlock> push,
                               std::vector<TrainerBlock> pull, ProtocolPolicy policy)
    : policy_(policy),
      push_(std::move(push)),
      pull_(std::move(pull)),
      servers_(servers),
      received_(pull_.size()) {}

void TrainerMachine::OnJoined(int32_t server, std::optional<int64_t> applied, int64_t consumed) {
  servers_[server].joined = true;
  servers_[server].consumed = consumed;
  if (applied) return MoveApplied(*applied);
  fresh_ = true;
  MoveFreshTarget();
}

void TrainerMachine::Rejoin(int32_t servers, std::vector<TrainerBlock> push,
                            std::vector<TrainerBlock> pull) {
  push_ = std::move(push);
  pull_ = std::move(pull);
  servers_.assign(servers, ServerState());
  received_.assign(pull_.size(), Received());
  scanned_ = Version();
  delivered_ = 0;
  decided_.clear();
  next_attempt_ = 0;
  awaiting_.clear();
  step_error_ = absl::OkStatus();
  // The user may have seen this end already: it stands.
  dropped_before_move_ =
      dropped_before_move_ || (begun_ && dropped_ && dropped_->attempt() >= begun_->attempt());
  if (dropped_before_move_) return;
  dropped_.reset();
  if (begun_) begun_->set_attempt(0);
  if (ended_) ended_->set_attempt(0);
}

// Decisions may be told before the join is answered, when the target is not known yet.
void TrainerMachine::MoveApplied(int64_t applied) {
  applied_ = applied;
  decided_.erase(decided_.begin(), decided_.upper_bound(applied_));
  if (dropped_ && dropped_->step() != target()) dropped_.reset();
  next_attempt_ = dropped_ && !dropped_before_move_ ? dropped_->attempt() + 1 : 0;
}

// A trainer without weights receives those of the newest step that any server has decided.
void TrainerMachine::MoveFreshTarget() {
  int64_t newest = decided_.empty() ? 0 : decided_.rbegin()->first;
  for (const ServerState& server : servers_) newest = std::max(newest, server.consumed);
  MoveApplied(newest - 1);
}

// ---------------------------------------------------------------- the user's calls

absl::Status TrainerMachine::Begin(int64_t step, v1::BeginStep fields, TrainerSends* sends) {
  if (!fatal_.ok()) return fatal_;
  for (size_t s = 0; s < servers_.size(); ++s) {
    if (!servers_[s].joined)
      return absl::FailedPreconditionError(
          absl::StrCat("step ", step, " cannot begin: server ", s, " was not joined"));
  }
  if (fresh_)
    return absl::FailedPreconditionError(absl::StrCat(
        "step ", step, " cannot begin: the weights of step ", target(), " have not been pulled"));
  if (begun_)
    return absl::FailedPreconditionError(absl::StrCat("step ", begun_->step(), " attempt ",
                                                      begun_->attempt(),
                                                      " is begun; wait for it and apply it first"));
  if (step != target()) return StepMismatch("BeginStep", step, target());
  fields.set_step(step);
  fields.set_attempt(next_attempt_);
  begun_ = std::move(fields);
  for (int32_t server = 0; server < static_cast<int32_t>(servers_.size()); ++server) {
    servers_[server].sent_bytes = 0;
    servers_[server].queue.clear();
    if (servers_[server].up) {
      servers_[server].knows_arrived = true;
      SendBegun(server, sends);
    }
  }
  return absl::OkStatus();
}

absl::Status TrainerMachine::Push(int32_t block, int32_t part, bool absent) {
  if (!fatal_.ok()) return fatal_;
  if (!begun_)
    return absl::FailedPreconditionError(
        absl::StrCat("push of block ", block, " before step ", target(), " was begun"));
  if (ended_)
    return absl::FailedPreconditionError(
        absl::StrCat("push of block ", block, " after EndPush of step ", begun_->step()));
  if (block < 0 || block >= static_cast<int32_t>(push_.size()))
    return IndexOutOfRange("push block", block, push_.size());
  if (part < 0 || part >= push_[block].parts)
    return IndexOutOfRange(absl::StrCat("part of push block ", block), part, push_[block].parts);
  if (!pushed_.emplace(std::make_pair(block, part), absent).second) {
    return absl::FailedPreconditionError(absl::StrCat(
        "block ", block, " part ", part, " was pushed before in step ", begun_->step()));
  }
  Queue(block, part, absent, nullptr);
  return absl::OkStatus();
}

std::optional<std::pair<int32_t, int32_t>> TrainerMachine::FirstUnpushed() const {
  for (int32_t block = 0; begun_ && block < static_cast<int32_t>(push_.size()); ++block) {
    for (int32_t part = 0; part < push_[block].parts; ++part) {
      if (pushed_.count({block, part}) == 0) return std::make_pair(block, part);
    }
  }
  return std::nullopt;
}

absl::Status TrainerMachine::EndPush(v1::EndPush fields, TrainerSends* sends) {
  if (!fatal_.ok()) return fatal_;
  if (!begun_)
    return absl::FailedPreconditionError(
        absl::StrCat("EndPush before step ", target(), " was begun"));
  if (ended_)
    return absl::FailedPreconditionError(
        absl::StrCat("EndPush of step ", begun_->step(), " was given before"));
  if (const auto missing = FirstUnpushed()) {
    return absl::FailedPreconditionError(
        absl::StrCat("EndPush of step ", begun_->step(), ": block ", missing->first, " part ",
                     missing->second, " was neither pushed nor declared absent"));
  }
  fields.set_step(begun_->step());
  fields.set_attempt(begun_->attempt());
  ended_ = std::move(fields);
  if (dropped_before_move_) return absl::OkStatus();
  for (int32_t server = 0; server < static_cast<int32_t>(servers_.size()); ++server) {
    if (!servers_[server].up) continue;
    v1::TrainerMessage message;
    *message.mutable_end_push() = *ended_;
    sends->push_back({server, std::move(message)});
  }
  return absl::OkStatus();
}

absl::Status TrainerMachine::Applied(TrainerSends* sends) {
  const std::optional<StepEnd> end = End();
  if (!end) return absl::FailedPreconditionError(absl::StrCat("step ", target(), " has not ended"));
  ClearAttempt();
  dropped_.reset();
  if (end->outcome == v1::DROP) {
    if (!std::exchange(dropped_before_move_, false)) next_attempt_ = end->attempt + 1;
    return absl::OkStatus();
  }
  fresh_ = false;
  applied_ = end->step;
  next_attempt_ = 0;
  decided_.erase(decided_.begin(), decided_.upper_bound(applied_));
  for (Received& received : received_) received = Received();
  for (int32_t server = 0; server < static_cast<int32_t>(servers_.size()); ++server) {
    if (!servers_[server].discarded_ahead || !servers_[server].up) continue;
    servers_[server].discarded_ahead = false;
    v1::TrainerMessage message;
    message.mutable_updates_query();
    sends->push_back({server, std::move(message)});
  }
  return absl::OkStatus();
}

void TrainerMachine::ClearAttempt() {
  begun_.reset();
  ended_.reset();
  pushed_.clear();
  awaiting_.clear();
  step_error_ = absl::OkStatus();
  for (ServerState& server : servers_) server.queue.clear();
}

// ---------------------------------------------------------------- servers

void TrainerMachine::SendBegun(int32_t server, TrainerSends* sends) const {
  v1::TrainerMessage begin;
  *begin.mutable_begin_step() = *begun_;
  sends->push_back({server, std::move(begin)});
  if (!ended_) return;
  v1::TrainerMessage end;
  *end.mutable_end_push() = *ended_;
  sends->push_back({server, std::move(end)});
}

void TrainerMachine::OnServerUp(int32_t server, TrainerSends* sends) {
  ServerState& state = servers_[server];
  state.up = true;
  state.knows_arrived = true;
  if (state.discarded_ahead) {
    state.discarded_ahead = false;
    v1::TrainerMessage message;
    message.mutable_updates_query();
    sends->push_back({server, std::move(message)});
  }
  if (!begun_ || dropped_before_move_) return;
  SendBegun(server, sends);
  state.knows_arrived = false;
  v1::TrainerMessage query;
  query.mutable_arrived_query()->set_step(begun_->step());
  query.mutable_arrived_query()->set_attempt(begun_->attempt());
  sends->push_back({server, std::move(query)});
}

void TrainerMachine::OnServerDown(int32_t server) {
  servers_[server].up = false;
  servers_[server].knows_arrived = false;
}

void TrainerMachine::OnCredit(int32_t server, const v1::Credit& credit) {
  v1::Credit& current = servers_[server].credit;
  const auto theirs = std::make_pair(credit.step(), credit.attempt());
  const auto ours = std::make_pair(current.step(), current.attempt());
  if (theirs > ours || (theirs == ours && credit.granted_bytes() > current.granted_bytes()))
    current = credit;
}

void TrainerMachine::OnArrived(int32_t server, const v1::Arrived& arrived) {
  ServerState& state = servers_[server];
  if (!begun_ || arrived.step() != begun_->step() || arrived.attempt() != begun_->attempt() ||
      state.knows_arrived)
    return;
  QueueEverything(server, arrived);
  state.sent_bytes = arrived.consumed_bytes();
  state.knows_arrived = true;
}

void TrainerMachine::QueueEverything(int32_t server, const v1::Arrived& arrived) {
  servers_[server].queue.clear();
  std::map<std::pair<int32_t, int32_t>, IntervalSet> there;
  for (const v1::Arrived::Part& part : arrived.parts()) {
    IntervalSet& bounds = there[{part.block(), part.part()}];
    for (int i = 0; i + 1 < part.bounds_size(); i += 2)
      bounds.Add(part.bounds(i), part.bounds(i + 1));
  }
  for (const auto& [key, absent] : pushed_) {
    if (push_[key.first].server != server) continue;
    const auto found = there.find(key);
    Queue(key.first, key.second, absent, found == there.end() ? nullptr : &found->second);
  }
}

void TrainerMachine::Queue(int32_t block, int32_t part, bool absent, const IntervalSet* arrived) {
  const TrainerBlock& spec = push_[block];
  std::deque<PieceRef>& queue = servers_[spec.server].queue;
  if (absent) {
    queue.push_back({block, part, 0, 0, true});
    return;
  }
  for (int64_t offset = 0; offset < spec.elements; offset += spec.piece_elements) {
    const int64_t count = std::min(spec.piece_elements, spec.elements - offset);
    if (arrived != nullptr && arrived->Contains(offset, offset + count)) continue;
    queue.push_back({block, part, offset, count, false});
  }
}

void TrainerMachine::OnDecided(int32_t server, const v1::Decided& decided) {
  if (decided.step() <= applied_) return;
  if (decided.outcome() == v1::DROP) {
    if (decided.step() != target()) return;
    if (dropped_before_move_) {
      next_attempt_ = std::max(next_attempt_, decided.attempt() + 1);
      return;
    }
    if (decided.attempt() < attempt()) return;
    if (!dropped_ || dropped_->attempt() < decided.attempt()) dropped_ = decided;
    if (!begun_) next_attempt_ = std::max(next_attempt_, decided.attempt() + 1);
    return;
  }
  const auto [found, fresh] = decided_.emplace(decided.step(), decided);
  const v1::Decided& first = found->second;
  if (!fresh && (first.outcome() != decided.outcome() || first.attempt() != decided.attempt() ||
                 first.round() != decided.round())) {
    fatal_ = absl::AbortedError(
        absl::StrCat("server ", server, " says ", v1::Outcome_Name(decided.outcome()), " of step ",
                     decided.step(), " attempt ", decided.attempt(), " round ", decided.round(),
                     ", another said ", v1::Outcome_Name(first.outcome()), " of attempt ",
                     first.attempt(), " round ", first.round()));
  }
  if (fresh_) MoveFreshTarget();
}

void TrainerMachine::OnRefused(int32_t server, const v1::Refused& refused) {
  const absl::Status why(static_cast<absl::StatusCode>(refused.code()),
                         absl::StrCat("server ", server, ": ", refused.message()));
  if (refused.fenced()) {
    fatal_ = why;
  } else if (refused.step() == 0 || (begun_ && refused.step() == begun_->step() &&
                                     refused.attempt() == begun_->attempt())) {
    step_error_ = why;
  }
}

void TrainerMachine::OnAwaiting(int32_t server, const v1::Awaiting& awaiting) {
  if (begun_ && awaiting.step() == begun_->step() && awaiting.attempt() == begun_->attempt())
    awaiting_ = awaiting.reason();
}

bool TrainerMachine::SendsBegun(int32_t server) const {
  const ServerState& state = servers_[server];
  return begun_ && !dropped_before_move_ && state.up && state.knows_arrived &&
         state.credit.step() == begun_->step() && state.credit.attempt() == begun_->attempt() &&
         decided_.count(begun_->step()) == 0 &&
         !(dropped_ && dropped_->attempt() >= begun_->attempt());
}

std::vector<PieceRef> TrainerMachine::NextPieces(int32_t server, int64_t max_bytes,
                                                 int max_pieces) {
  std::vector<PieceRef> pieces;
  if (!SendsBegun(server)) return pieces;
  ServerState& state = servers_[server];
  while (!state.queue.empty() && static_cast<int>(pieces.size()) < max_pieces) {
    const PieceRef& piece = state.queue.front();
    const int64_t bytes = piece.count * push_[piece.block].element_bytes;
    if (bytes > max_bytes || bytes > state.credit.granted_bytes() - state.sent_bytes) break;
    max_bytes -= bytes;
    state.sent_bytes += bytes;
    pieces.push_back(piece);
    state.queue.pop_front();
  }
  return pieces;
}

bool TrainerMachine::AllSent(int32_t server) const {
  return servers_[server].queue.empty() && servers_[server].knows_arrived;
}

std::string TrainerMachine::CanonicalBytes() const {
  std::string out =
      absl::StrCat(fresh_, dropped_before_move_, "/", applied_, "/", next_attempt_, "/",
                   fatal_.ok(), step_error_.ok(), "/", begun_ ? begun_->step() : 0, ".",
                   begun_ ? begun_->attempt() : 0, ended_.has_value());
  for (const auto& [key, absent] : pushed_)
    absl::StrAppend(&out, "p", key.first, ".", key.second, absent);
  for (const ServerState& server : servers_) {
    absl::StrAppend(&out, "|s", server.joined, server.up, server.knows_arrived,
                    server.discarded_ahead, ",", server.consumed, ",", server.credit.step(), ".",
                    server.credit.attempt(), ".", server.credit.granted_bytes(), ",",
                    server.sent_bytes);
    for (const PieceRef& piece : server.queue)
      absl::StrAppend(&out, "q", piece.block, ".", piece.part, ".", piece.offset, piece.absent);
  }
  for (const Received& received : received_) {
    absl::StrAppend(&out, "|u", received.version.step, ".", received.version.attempt, ".",
                    received.version.round, ",", received.placed, received.absent);
    for (const auto& [begin, end] : received.reserved) absl::StrAppend(&out, "[", begin, "-", end);
  }
  for (const auto& [step, decided] : decided_)
    absl::StrAppend(&out, "|d", decided.SerializeAsString());
  if (dropped_) absl::StrAppend(&out, "|x", dropped_->SerializeAsString());
  return out;
}

}  // namespace stiefel
