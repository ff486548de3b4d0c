#include "server/run_machine.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "common/errors.h"
#include "common/status.h"
#include "google/protobuf/io/coded_stream.h"
#include "google/protobuf/io/zero_copy_stream_impl_lite.h"

namespace stiefel {
namespace {

// Deterministic bytes of a message (maps sorted), for canonical forms.
std::string Bytes(const google::protobuf::MessageLite& message) {
  std::string bytes;
  google::protobuf::io::StringOutputStream stream(&bytes);
  google::protobuf::io::CodedOutputStream coded(&stream);
  coded.SetSerializationDeterministic(true);
  message.SerializeToCodedStream(&coded);
  coded.Trim();
  return bytes;
}

template <typename Message>
void AppendOptional(const char* tag, const std::optional<Message>& message, std::string* out) {
  if (message) absl::StrAppend(out, tag, "{", Bytes(*message), "}");
}

}  // namespace

bool Attempt::AllBegun() const {
  for (const AttemptRank& rank : ranks) {
    if (!rank.begun) return false;
  }
  return true;
}

RunMachine::RunMachine(std::shared_ptr<const RunSpec> spec, int64_t now, ProtocolPolicy policy)
    : spec_(std::move(spec)),
      policy_(policy),
      epoch_(spec_->opened().placement_epoch()),
      leader_(spec_->opened().leader()) {
  ranks_.resize(spec_->world_size());
  pushers_.resize(spec_->matrices().size());
  ranks_[0].incarnation = leader_;
  consumed_ = spec_->opened().start_step() - 1;
  if (spec_->opened().has_moves_in()) {
    const v1::Prepare& in_force = spec_->opened().moves_in();
    epoch_ = in_force.placement().epoch();
    consumed_ = in_force.after_step();
    incoming_ = true;
    prepare_ = in_force;
    *prepare_->mutable_placement() = spec_->placement();
    next_ = spec_;
  }
  largest_epoch_ = spec_->opened().placement_epoch();
  for (RankState& rank : ranks_) rank.applied = consumed_;
  weights_ready_ = !spec_->weights_mode();
  ranks_[0].lease_end = now + spec_->lease();
  last_tick_ = now;
  release_at_ = now + spec_->takeover_timeout();
  ResetAttempt(consumed_ + 1, 0);
}

void RunMachine::ResetAttempt(int64_t step, int32_t attempt) {
  attempt_ = Attempt();
  attempt_.step = step;
  attempt_.attempt = attempt;
  attempt_.ranks.resize(ranks_.size());
  attempt_.matrices.resize(spec_->matrices().size());
}

void RunMachine::Send(int32_t rank, v1::ServerMessage message, Actions* actions) const {
  message.set_run_uid(spec_->opened().run_uid());
  message.set_placement_epoch(epoch_);
  actions->push_back(action::SendControl{rank, ranks_[rank].incarnation, std::move(message)});
}

void RunMachine::SendToAll(const v1::ServerMessage& message, Actions* actions) const {
  for (int32_t rank = 0; rank < static_cast<int32_t>(ranks_.size()); ++rank)
    Send(rank, message, actions);
}

void RunMachine::Refuse(int32_t rank, const Incarnation& to, const absl::Status& why, int64_t step,
                        int32_t attempt, bool fenced, Actions* actions) const {
  v1::ServerMessage message;
  message.set_run_uid(spec_->opened().run_uid());
  message.set_placement_epoch(epoch_);
  v1::Refused* refused = message.mutable_refused();
  refused->set_code(static_cast<int32_t>(why.code()));
  refused->set_message(std::string(why.message()));
  refused->set_step(step);
  refused->set_attempt(attempt);
  refused->set_fenced(fenced);
  actions->push_back(action::SendControl{rank, to, std::move(message)});
}

void RunMachine::SendDecided(int32_t rank, const v1::Decide& decision, Actions* actions) const {
  v1::ServerMessage message;
  v1::Decided* decided = message.mutable_decided();
  decided->set_step(decision.step());
  decided->set_attempt(decision.attempt());
  decided->set_round(decision.round());
  decided->set_outcome(decision.outcome());
  decided->set_grad_norm(decision.grad_norm());
  *decided->mutable_skipped_matrices() = decision.skipped_matrices();
  decided->set_reason(decision.reason());
  Send(rank, std::move(message), actions);
}

// Rules 1 and 2: who speaks, for which run.
absl::Status RunMachine::CheckIdentity(const v1::Sender& sender) const {
  if (!failure_.ok()) return failure_;
  if (ended_)
    return absl::FailedPreconditionError(
        absl::StrCat("run \"", spec_->opened().name(), "\" has ended"));
  if (sender.run_uid() != spec_->opened().run_uid()) {
    return RunMismatch(absl::StrCat("message of rank ", sender.rank()),
                       absl::StrCat("run_uid ", sender.run_uid()),
                       absl::StrCat("run_uid ", spec_->opened().run_uid()));
  }
  if (sender.rank() < 0 || sender.rank() >= spec_->world_size())
    return IndexOutOfRange("rank", sender.rank(), spec_->world_size());
  const Incarnation theirs(sender.incarnation());
  const Incarnation& current = ranks_[sender.rank()].incarnation;
  if (theirs == current) return absl::OkStatus();
  if (!policy_.fence_leader && sender.rank() == 0) return absl::OkStatus();
  if (current < theirs) {
    return absl::FailedPreconditionError(absl::StrCat("rank ", sender.rank(), " has not joined as ",
                                                      theirs.DebugString(),
                                                      "; join the run first"));
  }
  return StaleIncarnation(sender.rank(), theirs.generation, theirs.id, current.generation,
                          current.id);
}

// And under which placement. UNAVAILABLE: it has not heard of the one in force.
absl::Status RunMachine::CheckSender(const v1::Sender& sender) const {
  STIEFEL_RETURN_IF_ERROR(CheckIdentity(sender));
  if (sender.placement_epoch() == epoch_) return absl::OkStatus();
  if (Outdated(sender)) {
    return absl::UnavailableError(absl::StrCat("run \"", spec_->opened().name(),
                                               "\" moved to placement ", epoch_, " after step ",
                                               moved_->after_step(), "; rank ", sender.rank(),
                                               " speaks under ", sender.placement_epoch()));
  }
  return PlacementEpochMismatch(absl::StrCat("message of rank ", sender.rank()),
                                sender.placement_epoch(), epoch_);
}

void RunMachine::Fail(const absl::Status& why, Actions* actions) {
  failure_ = absl::AbortedError(
      absl::StrCat("run \"", spec_->opened().name(), "\" failed: ", why.message()));
  for (int32_t rank = 0; rank < static_cast<int32_t>(ranks_.size()); ++rank) {
    Refuse(rank, ranks_[rank].incarnation, failure_, attempt_.step, attempt_.attempt, false,
           actions);
  }
}

void RunMachine::EndRun(const std::string& reason, Actions* actions) {
  if (ended_) return;
  ended_ = true;
  for (const PendingJoin& pending : pending_joins_) {
    actions->push_back(action::AnswerJoin{pending.token, absl::AbortedError(reason), {}});
  }
  pending_joins_.clear();
  actions->push_back(action::EndRun{reason});
}

absl::StatusOr<bool> RunMachine::OnClose(const v1::CloseRunRequest& request, int64_t now,
                                         Actions* actions) {
  if (ended_) return true;
  // Under whatever placement: who leaves needs no newer one.
  if (absl::Status known = CheckIdentity(request.sender()); !known.ok()) return known;
  if (away_) {
    if (request.sender().rank() == 0)
      EndRun(absl::StrCat("run \"", spec_->opened().name(), "\" moved away after step ", consumed_),
             actions);
    return true;
  }
  RankState& rank = ranks_[request.sender().rank()];
  rank.closed = true;
  rank.joined = false;
  for (int32_t r = 0; r < static_cast<int32_t>(ranks_.size()); ++r) {
    if (!ranks_[r].closed && Live(r, now)) return false;
  }
  EndRun(absl::StrCat("run \"", spec_->opened().name(), "\" was closed after step ", consumed_),
         actions);
  return true;
}

void RunMachine::OnDrain(int64_t now, Actions* actions) {
  draining_ = true;
  if (!attempt_.sealed() && attempt_.deadline != 0 && !prepared_) {
    DropAttempt(
        absl::StrCat("step ", attempt_.step, " attempt ", attempt_.attempt, ": server ",
                     spec_->opened().server_index(), " (",
                     spec_->opened().servers(spec_->opened().server_index()), ") is draining"),
        actions);
  }
}

std::string RunMachine::RankList(const std::vector<int32_t>& ranks) const {
  if (ranks.size() <= 16)
    return absl::StrCat(ranks.size() == 1 ? "rank " : "ranks ", absl::StrJoin(ranks, ", "));
  return absl::StrCat("ranks ", absl::StrJoin(ranks.begin(), ranks.begin() + 16, ", "), " and ",
                      ranks.size() - 16, " more");
}

std::string RunMachine::PhaseName() const {
  if (!failure_.ok()) return "failed";
  if (ended_) return "ended";
  if (away_) return "moved away";
  if (prepare_) return "moving";
  if (!MissingJoins().empty() && !all_joined_once_) return "joining";
  if (attempt_.drop) return "dropping";
  if (attempt_.vote1) return "voted again";
  if (attempt_.rescale) return "rescaled";
  if (attempt_.vote0) return "voted";
  if (attempt_.deadline == 0) return "idle";
  return Missing().empty() ? "computing" : "collecting";
}

std::string RunMachine::Awaited() const {
  if (ended_ || away_) return "";
  if (prepare_) return AwaitedByMove();
  if (const std::vector<int32_t> missing = MissingJoins(); !missing.empty())
    return absl::StrCat("JoinRun of ", RankList(missing));
  if (attempt_.drop || attempt_.vote1 || (attempt_.vote0 && !attempt_.rescale))
    return "decision of the leader (rank 0)";
  if (attempt_.deadline == 0) return "";
  const std::string missing = Missing();
  return missing.empty() ? "own computation" : missing;
}

std::string RunMachine::CanonicalBytes() const {
  std::string out = absl::StrCat(
      epoch_, "/", consumed_, "/", kept_step_, unsettled_ ? "-" : "s", weights_ready_ ? "w" : "-",
      ended_ ? "e" : "-", draining_ ? "d" : "-", all_joined_once_ ? "j" : "-",
      failure_.ok() ? "" : "F", "/L", leader_.generation, ".", leader_.id);
  for (const RankState& rank : ranks_) {
    absl::StrAppend(&out, "|r", rank.joined, rank.closed, rank.control_up, rank.streams_closed,
                    rank.needs_weights, ",", rank.incarnation.generation, ".", rank.incarnation.id,
                    ",", rank.lease_end, ",", rank.applied, ",", rank.begun_step);
    AppendOptional("hb", rank.held_begin, &out);
    AppendOptional("he", rank.held_end, &out);
  }
  absl::StrAppend(&out, "|a", attempt_.step, ".", attempt_.attempt, ".", attempt_.round, ",",
                  attempt_.deadline, ",", attempt_.scale);
  for (const AttemptRank& rank : attempt_.ranks) {
    absl::StrAppend(&out, "|", rank.begun, rank.ended, ",", rank.incarnation.generation, ".",
                    rank.incarnation.id, Bytes(rank.begin), "/", Bytes(rank.end));
    rank.arrivals.AppendCanonical(&out);
  }
  for (const MatrixProgress& matrix : attempt_.matrices)
    absl::StrAppend(&out, "|m", static_cast<int>(matrix.state), Bytes(matrix.result));
  AppendOptional("v0", attempt_.vote0, &out);
  AppendOptional("v1", attempt_.vote1, &out);
  AppendOptional("rs", attempt_.rescale, &out);
  AppendOptional("dr", attempt_.drop, &out);
  AppendOptional("lc", last_consumed_, &out);
  AppendOptional("la", last_attempt_, &out);
  for (const PendingJoin& pending : pending_joins_)
    absl::StrAppend(&out, "|p", pending.token, Bytes(pending.request));
  AppendMove(&out);
  return out;
}

}  // namespace stiefel
