// The walk of a step: begin, pieces, votes, rescale, decision. See the numbered walk in
// run_machine.h.
#include <cmath>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/errors.h"
#include "common/status.h"
#include "google/protobuf/util/message_differencer.h"
#include "server/run_machine.h"

namespace stiefel {
namespace {

bool SameDecision(const v1::Decide& a, const v1::Decide& b) {
  return a.step() == b.step() && a.attempt() == b.attempt() && a.round() == b.round() &&
         a.outcome() == b.outcome() &&
         std::equal(a.skipped_matrices().begin(), a.skipped_matrices().end(),
                    b.skipped_matrices().begin(), b.skipped_matrices().end());
}

std::string Describe(const v1::Decide& d) {
  return absl::StrCat(v1::Outcome_Name(d.outcome()), " of step ", d.step(), " attempt ",
                      d.attempt(), " round ", d.round());
}

bool Finite(double value) { return std::isfinite(value); }

absl::Status CheckCommonFields(const v1::CommonFields& common) {
  for (const auto& [group, fields] : common.groups()) {
    if (!(fields.lr() >= 0) || !Finite(fields.lr()) || !(fields.weight_decay() >= 0) ||
        !Finite(fields.weight_decay())) {
      return absl::InvalidArgumentError(absl::StrCat("group ", group, ": lr ", fields.lr(),
                                                     " or weight_decay ", fields.weight_decay(),
                                                     " is not finite and >= 0"));
    }
    if (fields.has_beta() && !(fields.beta() >= 0 && fields.beta() < 1)) {
      return absl::InvalidArgumentError(
          absl::StrCat("group ", group, ": beta ", fields.beta(), " is not within [0, 1)"));
    }
    if (fields.has_kind() && !v1::Kind_IsValid(fields.kind())) {
      return absl::InvalidArgumentError(
          absl::StrCat("group ", group, ": unknown kind ", static_cast<int>(fields.kind())));
    }
  }
  if (common.has_max_grad_norm() &&
      !(common.max_grad_norm() > 0 && Finite(common.max_grad_norm()))) {
    return absl::InvalidArgumentError(
        absl::StrCat("max_grad_norm ", common.max_grad_norm(), " is not positive and finite"));
  }
  if (common.has_grad_scale() && !(common.grad_scale() > 0 && Finite(common.grad_scale()))) {
    return absl::InvalidArgumentError(
        absl::StrCat("grad_scale ", common.grad_scale(), " is not positive and finite"));
  }
  if (common.has_commit() && !v1::CommitMode_IsValid(common.commit())) {
    return absl::InvalidArgumentError(
        absl::StrCat("unknown commit mode ", static_cast<int>(common.commit())));
  }
  return absl::OkStatus();
}

double WeightOf(const v1::BeginStep& begin) { return begin.has_weight() ? begin.weight() : 1; }

}  // namespace

void RunMachine::OnControlMessage(const v1::TrainerMessage& message, int64_t now,
                                  Actions* actions) {
  const v1::Sender& sender = message.sender();
  if (absl::Status known = CheckSender(sender); !known.ok()) {
    if (sender.rank() < 0 || sender.rank() >= spec_->world_size()) return;
    const Incarnation theirs(sender.incarnation());
    Refuse(sender.rank(), theirs, known, 0, 0, theirs < ranks_[sender.rank()].incarnation, actions);
    return;
  }
  RankState& rank = ranks_[sender.rank()];
  rank.lease_end = now + spec_->lease();
  const bool leads = sender.rank() == 0;
  switch (message.kind_case()) {
    case v1::TrainerMessage::kBeginStep:
      return OnBeginStep(sender.rank(), message.begin_step(), now, actions);
    case v1::TrainerMessage::kEndPush:
      return OnEndPush(sender.rank(), message.end_push(), now, actions);
    case v1::TrainerMessage::kArrivedQuery:
      return OnArrivedQuery(sender.rank(), message.arrived_query(), actions);
    case v1::TrainerMessage::kRescale:
      if (leads) return OnRescale(message.rescale(), actions);
      break;
    case v1::TrainerMessage::kDecide:
      if (leads) return OnDecide(message.decide(), now, actions);
      break;
    case v1::TrainerMessage::kHeartbeat: {
      v1::ServerMessage answer;
      answer.mutable_heartbeat_ack();
      return Send(sender.rank(), std::move(answer), actions);
    }
    case v1::TrainerMessage::kUpdatesQuery:
      if (policy_.resend_deltas) actions->push_back(action::Resend{sender.rank()});
      return;
    case v1::TrainerMessage::kHello:
      return;
    case v1::TrainerMessage::KIND_NOT_SET:
      return Refuse(sender.rank(), rank.incarnation,
                    absl::InvalidArgumentError(absl::StrCat(
                        "control message of rank ", sender.rank(), " without a known kind")),
                    0, 0, false, actions);
  }
  Refuse(sender.rank(), rank.incarnation,
         absl::PermissionDeniedError(absl::StrCat("rank ", sender.rank(), " is not the leader")), 0,
         0, false, actions);
}

// ---------------------------------------------------------------- begin

absl::Status RunMachine::CheckBegin(int32_t rank, const v1::BeginStep& begin) const {
  if (!ranks_[rank].joined)
    return absl::FailedPreconditionError(
        absl::StrCat("rank ", rank, " begins step ", begin.step(), " before it joined"));
  const double weight = WeightOf(begin);
  if (!(weight >= 0) || !Finite(weight))
    return absl::InvalidArgumentError(
        absl::StrCat("weight ", weight, " of rank ", rank, " is not finite and >= 0"));
  for (const auto& [group, fields] : begin.common().groups()) {
    if (!spec_->HasGroup(group))
      return absl::InvalidArgumentError(
          absl::StrCat("common fields name group ", group, ", which no parameter is in"));
  }
  return CheckCommonFields(begin.common());
}

void RunMachine::OnBeginStep(int32_t rank, const v1::BeginStep& begin, int64_t now,
                             Actions* actions) {
  RankState& state = ranks_[rank];
  if (absl::Status valid = CheckBegin(rank, begin); !valid.ok()) {
    return Refuse(rank, state.incarnation, valid, begin.step(), begin.attempt(), false, actions);
  }
  const auto key = std::make_pair(begin.step(), begin.attempt());
  const auto open = std::make_pair(attempt_.step, attempt_.attempt);
  if (!policy_.match_names && begin.step() <= attempt_.step)
    return AcceptBegin(rank, begin, now, actions);
  if (key == open) return AcceptBegin(rank, begin, now, actions);
  if (key > open) {
    if (policy_.hold_ahead) {
      if (!state.held_begin ||
          std::make_pair(state.held_begin->step(), state.held_begin->attempt()) < key)
        state.held_begin = begin;
    }
    return;
  }
  // Behind: its outcome is known here, or was forgotten long ago.
  if (begin.step() == consumed_ && last_consumed_)
    return SendDecided(rank, *last_consumed_, actions);
  if (begin.step() == attempt_.step && last_attempt_ && last_attempt_->step() == begin.step())
    return SendDecided(rank, *last_attempt_, actions);
  Refuse(rank, state.incarnation,
         StepMismatch(absl::StrCat("BeginStep of rank ", rank), begin.step(), attempt_.step),
         begin.step(), begin.attempt(), false, actions);
}

void RunMachine::AcceptBegin(int32_t rank, const v1::BeginStep& begin, int64_t now,
                             Actions* actions) {
  RankState& state = ranks_[rank];
  AttemptRank& part = attempt_.ranks[rank];
  if (part.begun && part.incarnation == state.incarnation) {
    if (!google::protobuf::util::MessageDifferencer::Equals(part.begin, begin)) {
      Refuse(rank, state.incarnation,
             absl::InvalidArgumentError(absl::StrCat("rank ", rank, " began step ", begin.step(),
                                                     " twice with other fields")),
             begin.step(), begin.attempt(), false, actions);
    } else if (MayGrant()) {
      actions->push_back(action::GrantCredit{rank});
    }
    return;
  }
  if (attempt_.sealed()) return;  // it will hear the decision
  if (draining_) {
    // Not a drop: the trainers would redo it at once, for as long as this server lives.
    return Refuse(
        rank, state.incarnation,
        absl::UnavailableError(absl::StrCat(spec_->opened().servers(spec_->opened().server_index()),
                                            " is draining: it begins no step")),
        begin.step(), begin.attempt(), false, actions);
  }
  part.begun = true;
  part.incarnation = state.incarnation;
  part.begin = begin;
  state.begun_step = begin.step();
  state.applied = begin.step() - 1;
  state.needs_weights = false;
  if (attempt_.deadline == 0) attempt_.deadline = now + spec_->step_timeout();
  MaybeFreeDeltas(actions);
  if (MayGrant()) actions->push_back(action::GrantCredit{rank});
  if (state.held_end && state.held_end->step() == begin.step() &&
      state.held_end->attempt() == begin.attempt()) {
    part.ended = true;
    part.end = *state.held_end;
    state.held_end.reset();
  }
  if (attempt_.AllBegun()) OnAllBegun(actions);
}

void RunMachine::OnAllBegun(Actions* actions) {
  if (absl::Status agreed = CheckAgreement(); !agreed.ok())
    return DropAttempt(std::string(agreed.message()), actions);
  MaybeComputeAll(actions);
  MaybeVote(actions);
}

// Common fields are equal on all ranks, and so are the weights within a reduce group.
absl::Status RunMachine::CheckAgreement() const {
  for (int32_t rank = 1; rank < static_cast<int32_t>(ranks_.size()); ++rank) {
    google::protobuf::util::MessageDifferencer differencer;
    std::string report;
    differencer.ReportDifferencesToString(&report);
    if (differencer.Compare(attempt_.ranks[0].begin.common(), attempt_.ranks[rank].begin.common()))
      continue;
    while (!report.empty() && report.back() == '\n') report.pop_back();
    return absl::InvalidArgumentError(absl::StrCat("step ", attempt_.step, ": ranks 0 and ", rank,
                                                   " disagree (rank 0 -> rank ", rank,
                                                   "): ", report));
  }
  std::map<std::pair<int32_t, int32_t>, int32_t> first;  // (matrix, reduce group) -> rank
  for (int32_t rank = 0; rank < static_cast<int32_t>(ranks_.size()); ++rank) {
    for (const BlockSpec& block : ranks_[rank].push) {
      if (block.reduce_group < 0) continue;
      const int32_t other =
          first.emplace(std::make_pair(block.matrix, block.reduce_group), rank).first->second;
      const double mine = WeightOf(attempt_.ranks[rank].begin);
      const double theirs = WeightOf(attempt_.ranks[other].begin);
      if (mine == theirs) continue;
      return absl::InvalidArgumentError(
          absl::StrCat("step ", attempt_.step, ": reduce group ", block.reduce_group, " of \"",
                       spec_->matrices()[block.matrix].name, "\" has weight ", theirs, " on rank ",
                       other, " and ", mine, " on rank ", rank));
    }
  }
  return absl::OkStatus();
}

void RunMachine::MaybeFreeDeltas(Actions* actions) {
  if (kept_step_ == 0) return;
  bool all = true;
  for (const RankState& rank : ranks_) {
    if (!rank.closed && rank.begun_step <= kept_step_) all = false;
  }
  if (!all && policy_.keep_deltas) return;
  actions->push_back(action::FreeDeltas{kept_step_});
  kept_step_ = 0;
}

bool RunMachine::MayGrant() const {
  return weights_ready_ && settled_ && !attempt_.sealed() && failure_.ok();
}

void RunMachine::GrantAll(Actions* actions) {
  if (!MayGrant()) return;
  for (int32_t rank = 0; rank < static_cast<int32_t>(ranks_.size()); ++rank) {
    if (attempt_.ranks[rank].begun) actions->push_back(action::GrantCredit{rank});
  }
}

void RunMachine::OnSettled(int64_t step, int32_t attempt, Actions* actions) {
  if (settled_ || !last_attempt_ || last_attempt_->step() != step ||
      last_attempt_->attempt() != attempt)
    return;
  settled_ = true;
  GrantAll(actions);
}

void RunMachine::OnWeightsReady(Actions* actions) {
  if (weights_ready_) return;
  weights_ready_ = true;
  for (int32_t rank = 0; rank < static_cast<int32_t>(ranks_.size()); ++rank) {
    if (ranks_[rank].needs_weights) actions->push_back(action::Resend{rank});
  }
  GrantAll(actions);
}

// ---------------------------------------------------------------- pieces

absl::StatusOr<PieceVerdict> RunMachine::OnPiece(const v1::ChunkHeader& header,
                                                 const v1::Piece& piece, int64_t now) {
  STIEFEL_RETURN_IF_ERROR(CheckSender(header.sender()));
  const int32_t rank = header.sender().rank();
  ranks_[rank].lease_end = now + spec_->lease();
  const auto key = std::make_pair(header.step(), header.attempt());
  const auto open = std::make_pair(attempt_.step, attempt_.attempt);
  if (policy_.match_names && (key < open || (key == open && attempt_.sealed()))) {
    ++counters_.stale_pieces;
    return PieceVerdict::kStale;
  }
  if (header.step() > attempt_.step) {
    return StepMismatch(absl::StrCat("chunk of rank ", rank), header.step(), attempt_.step);
  }
  if (key > open)
    return AttemptMismatch(absl::StrCat("chunk of rank ", rank, " for step ", header.step()),
                           header.step(), header.attempt(), attempt_.attempt);
  AttemptRank& part = attempt_.ranks[rank];
  if (!part.begun || part.incarnation != ranks_[rank].incarnation || !MayGrant()) {
    return absl::FailedPreconditionError(absl::StrCat("chunk of rank ", rank, " for step ",
                                                      header.step(), " attempt ", header.attempt(),
                                                      " without a credit"));
  }
  const std::vector<BlockSpec>& blocks = ranks_[rank].push;
  if (piece.block() < 0 || piece.block() >= static_cast<int64_t>(blocks.size()))
    return IndexOutOfRange(absl::StrCat("push block of rank ", rank), piece.block(), blocks.size());
  const BlockSpec& block = blocks[piece.block()];
  const MatrixSpec& matrix = spec_->matrices()[block.matrix];
  if (!spec_->Owns(block.matrix)) {
    return absl::InvalidArgumentError(absl::StrCat("\"", matrix.name, "\" is owned by server ",
                                                   matrix.owner, ", not by server ",
                                                   spec_->opened().server_index()));
  }
  if (piece.part() < 0 || piece.part() >= block.parts)
    return IndexOutOfRange(
        absl::StrCat("part of block ", piece.block(), " of \"", matrix.name, "\""), piece.part(),
        block.parts);
  std::optional<uint32_t> checksum;
  if (piece.has_crc32c()) checksum = piece.crc32c();
  auto verdict = part.arrivals.Reserve(piece.block(), piece.part(), block.elements(),
                                       piece.offset(), piece.count(), checksum, piece.absent());
  if (!verdict.ok())
    return absl::Status(verdict.status().code(), absl::StrCat("rank ", rank, " \"", matrix.name,
                                                              "\" ", verdict.status().message()));
  if (*verdict == PieceVerdict::kDuplicate) ++counters_.duplicate_pieces;
  return verdict;
}

void RunMachine::OnPlaced(const v1::ChunkHeader& header, const v1::Piece& piece, int64_t now,
                          Actions* actions) {
  if (policy_.match_names &&
      (header.step() != attempt_.step || header.attempt() != attempt_.attempt))
    return;
  const int32_t rank = header.sender().rank();
  if (!piece.absent())
    attempt_.ranks[rank].arrivals.Placed(piece.block(), piece.part(), piece.count());
  if (!attempt_.AllBegun() || attempt_.sealed()) return;
  MaybeCompute(ranks_[rank].push[piece.block()].matrix, actions);
  MaybeVote(actions);
}

void RunMachine::OnPieceLost(const v1::ChunkHeader& header, const v1::Piece& piece) {
  if (header.step() != attempt_.step || header.attempt() != attempt_.attempt) return;
  attempt_.ranks[header.sender().rank()].arrivals.Unreserve(piece.block(), piece.part(),
                                                            piece.offset(), piece.count());
}

void RunMachine::OnArrivedQuery(int32_t rank, const v1::ArrivedQuery& query,
                                Actions* actions) const {
  v1::ServerMessage message;
  v1::Arrived* answer = message.mutable_arrived();
  answer->set_step(query.step());
  answer->set_attempt(query.attempt());
  if (query.step() == attempt_.step && query.attempt() == attempt_.attempt &&
      attempt_.ranks[rank].incarnation == ranks_[rank].incarnation) {
    for (const auto& [key, arrived] : attempt_.ranks[rank].arrivals.parts()) {
      v1::Arrived::Part* part = answer->add_parts();
      part->set_block(key.first);
      part->set_part(key.second);
      part->set_absent(arrived.absent);
      for (const auto& [begin, end] : arrived.reserved) {
        part->add_bounds(begin);
        part->add_bounds(end);
      }
    }
  }
  Send(rank, std::move(message), actions);
}

// ---------------------------------------------------------------- compute and vote

void RunMachine::MaybeComputeAll(Actions* actions) {
  for (const int32_t matrix : spec_->owned()) MaybeCompute(matrix, actions);
}

void RunMachine::MaybeCompute(int32_t matrix, Actions* actions) {
  MatrixProgress& progress = attempt_.matrices[matrix];
  if (progress.state != MatrixProgress::State::kWaiting || !spec_->Owns(matrix)) return;
  bool absent = true;
  for (const auto& [rank, b] : pushers_[matrix]) {
    const BlockSpec& block = ranks_[rank].push[b];
    for (int32_t part = 0; part < block.parts; ++part) {
      if (!attempt_.ranks[rank].arrivals.Complete(b, part, block.elements())) return;
      absent = absent && attempt_.ranks[rank].arrivals.Absent(b, part);
    }
  }
  progress.result.set_matrix(matrix);
  if (absent) {
    progress.state = MatrixProgress::State::kDone;
    progress.result.set_absent(true);
    actions->push_back(action::Publish{matrix});
    return;
  }
  progress.state = MatrixProgress::State::kComputing;
  actions->push_back(
      action::Compute{matrix, attempt_.step, attempt_.attempt, attempt_.round, attempt_.scale});
}

void RunMachine::OnComputed(int64_t step, int32_t attempt, int32_t round,
                            const v1::Vote::Matrix& result, const absl::Status& failure,
                            Actions* actions) {
  if (step != attempt_.step || attempt != attempt_.attempt || round != attempt_.round ||
      attempt_.drop)
    return;
  MatrixProgress& progress = attempt_.matrices[result.matrix()];
  if (progress.state != MatrixProgress::State::kComputing) return;
  if (!failure.ok()) {
    const std::string why = absl::StrCat(
        "server ", spec_->opened().servers(spec_->opened().server_index()), " could not compute \"",
        spec_->matrices()[result.matrix()].name, "\" in step ", step, ": ", failure.message());
    if (round == 0) return DropAttempt(why, actions);
    attempt_.vote1 = *attempt_.vote0;
    attempt_.vote1->set_round(1);
    attempt_.vote1->set_failed(true);
    attempt_.vote1->set_failure(why);
    return SendSeal(actions);
  }
  progress.state = MatrixProgress::State::kDone;
  progress.result = result;
  actions->push_back(action::Publish{result.matrix()});
  MaybeVote(actions);
}

void RunMachine::MaybeVote(Actions* actions) {
  if (attempt_.drop || (attempt_.round == 0 && attempt_.vote0) || attempt_.vote1) return;
  for (const AttemptRank& rank : attempt_.ranks) {
    if ((!rank.begun || !rank.ended) && policy_.vote_after_all) return;
  }
  for (const int32_t matrix : spec_->owned()) {
    if (attempt_.matrices[matrix].state != MatrixProgress::State::kDone) return;
  }
  v1::Vote vote;
  vote.set_step(attempt_.step);
  vote.set_attempt(attempt_.attempt);
  vote.set_round(attempt_.round);
  for (const int32_t matrix : spec_->owned())
    *vote.add_matrices() = attempt_.matrices[matrix].result;
  for (const AttemptRank& rank : attempt_.ranks) {
    *vote.add_summed() = rank.incarnation.ToProto();
    vote.add_local_sum_squares(rank.end.local_sum_squares());
    vote.add_local_finite(!rank.end.has_local_finite() || rank.end.local_finite());
  }
  const v1::CommonFields& common = attempt_.ranks[0].begin.common();
  if (common.has_max_grad_norm()) vote.set_max_grad_norm(common.max_grad_norm());
  vote.set_commit(common.commit() == v1::PER_MATRIX ? v1::PER_MATRIX : v1::WHOLE_STEP);
  (attempt_.round == 0 ? attempt_.vote0 : attempt_.vote1) = std::move(vote);
  SendSeal(actions);
}

// Tells the leader what this server promised: its votes, or its drop.
void RunMachine::SendSeal(Actions* actions) const {
  v1::ServerMessage message;
  if (attempt_.drop) {
    *message.mutable_drop() = *attempt_.drop;
    return Send(0, std::move(message), actions);
  }
  if (attempt_.vote0) {
    *message.mutable_vote() = *attempt_.vote0;
    Send(0, message, actions);
  }
  if (attempt_.vote1) {
    *message.mutable_vote() = *attempt_.vote1;
    Send(0, message, actions);
  }
}

void RunMachine::OnEndPush(int32_t rank, const v1::EndPush& end, int64_t now, Actions* actions) {
  RankState& state = ranks_[rank];
  AttemptRank& part = attempt_.ranks[rank];
  const auto key = std::make_pair(end.step(), end.attempt());
  const auto open = std::make_pair(attempt_.step, attempt_.attempt);
  if (!(end.local_sum_squares() >= 0) || !std::isfinite(end.local_sum_squares())) {
    // An overflow of the trainer's own sum is a non-finite gradient: the trainer says so with
    // local_finite.
    return Refuse(
        rank, state.incarnation,
        absl::InvalidArgumentError(absl::StrCat("local_sum_squares ", end.local_sum_squares(),
                                                " of rank ", rank, " is not finite and >= 0")),
        end.step(), end.attempt(), false, actions);
  }
  if (key > open || (key == open && !part.begun)) {
    if (policy_.hold_ahead &&
        (!state.held_end ||
         std::make_pair(state.held_end->step(), state.held_end->attempt()) < key)) {
      state.held_end = end;
    }
    return;
  }
  if (key < open && policy_.match_names) return;  // its BeginStep was answered with the outcome
  if (part.ended || attempt_.sealed() || part.incarnation != state.incarnation) return;
  part.ended = true;
  part.end = end;
  MaybeVote(actions);
}

// ---------------------------------------------------------------- seal, decide

void RunMachine::DropAttempt(const std::string& reason, Actions* actions) {
  if (attempt_.drop || (attempt_.sealed() && policy_.seal_on_vote)) return;
  v1::Drop drop;
  drop.set_step(attempt_.step);
  drop.set_attempt(attempt_.attempt);
  drop.set_reason(reason);
  attempt_.drop = std::move(drop);
  SendSeal(actions);
}

std::string RunMachine::Missing() const {
  if (!weights_ready_) return "initial weights of some matrices (InitWeights)";
  std::vector<int32_t> unbegun;
  std::vector<int32_t> unended;
  std::string incomplete;
  for (int32_t rank = 0; rank < static_cast<int32_t>(ranks_.size()); ++rank) {
    const AttemptRank& part = attempt_.ranks[rank];
    if (!part.begun) {
      unbegun.push_back(rank);
      continue;
    }
    if (!part.ended) unended.push_back(rank);
    if (!incomplete.empty()) continue;
    for (int32_t b = 0; b < static_cast<int32_t>(ranks_[rank].push.size()); ++b) {
      const BlockSpec& block = ranks_[rank].push[b];
      if (!spec_->Owns(block.matrix) || !incomplete.empty()) continue;
      for (int32_t p = 0; p < block.parts; ++p) {
        if (part.arrivals.Complete(b, p, block.elements())) continue;
        incomplete = absl::StrCat("gradient of \"", spec_->matrices()[block.matrix].name, "\" ",
                                  block.rect.DebugString(), " from rank ", rank);
        break;
      }
    }
  }
  std::string missing;
  const auto add = [&missing](const std::string& what) {
    absl::StrAppend(&missing, missing.empty() ? "" : "; ", what);
  };
  if (!unbegun.empty()) add(absl::StrCat("BeginStep of ", RankList(unbegun)));
  if (!incomplete.empty()) add(incomplete);
  if (!unended.empty()) add(absl::StrCat("EndPush of ", RankList(unended)));
  return missing;
}

void RunMachine::OnStepDeadline(int64_t now, Actions* actions) {
  if (attempt_.deadline == 0) return;
  attempt_.deadline = now + spec_->step_timeout();
  const bool was_sealed = attempt_.sealed();
  std::string why = absl::StrCat("step ", attempt_.step, " attempt ", attempt_.attempt, ": ");
  if (!was_sealed || !policy_.seal_on_vote) {
    const std::string missing = Missing();
    if (missing.empty() && !was_sealed) return;  // all is here and being computed
    absl::StrAppend(&why, "deadline passed; missing ", missing);
    DropAttempt(why, actions);
  } else {
    absl::StrAppend(&why, attempt_.drop ? attempt_.drop->reason() : "voted",
                    "; the leader (rank 0) has not decided");
  }
  v1::ServerMessage message;
  v1::Awaiting* awaiting = message.mutable_awaiting();
  awaiting->set_step(attempt_.step);
  awaiting->set_attempt(attempt_.attempt);
  awaiting->set_reason(why);
  SendToAll(message, actions);
}

void RunMachine::OnRescale(const v1::Rescale& rescale, Actions* actions) {
  if (rescale.step() != attempt_.step || rescale.attempt() != attempt_.attempt)
    return;  // decided here: its Decided says so
  if (attempt_.rescale) {
    if (attempt_.rescale->scale() != rescale.scale()) {
      return Fail(
          absl::AbortedError(absl::StrCat("two unequal scales for step ", rescale.step(), ": ",
                                          attempt_.rescale->scale(), " and ", rescale.scale())),
          actions);
    }
    return SendSeal(actions);
  }
  if (!attempt_.vote0 || !(rescale.scale() > 0) || !(rescale.scale() <= 1)) {
    return Refuse(0, leader_,
                  absl::FailedPreconditionError(
                      absl::StrCat("Rescale by ", rescale.scale(), " of step ", rescale.step(),
                                   " before this server's vote, or not within (0, 1]")),
                  rescale.step(), rescale.attempt(), false, actions);
  }
  attempt_.rescale = rescale;
  attempt_.round = 1;
  attempt_.scale = rescale.scale();
  for (const int32_t matrix : spec_->owned()) {
    MatrixProgress& progress = attempt_.matrices[matrix];
    if (progress.result.absent()) actions->push_back(action::Publish{matrix});  // as of round 1
    if (progress.result.absent() || progress.result.nonfinite_gradient() > 0)
      continue;  // nothing to compute again
    progress.state = MatrixProgress::State::kWaiting;
  }
  MaybeComputeAll(actions);
  MaybeVote(actions);
}

// Rule 8.
void RunMachine::OnDecide(const v1::Decide& decision, int64_t now, Actions* actions) {
  v1::ServerMessage ack;
  ack.mutable_decide_ack()->set_step(decision.step());
  ack.mutable_decide_ack()->set_attempt(decision.attempt());
  for (const auto* record : {&last_consumed_, &last_attempt_}) {
    if (!*record || (*record)->step() != decision.step() ||
        (*record)->attempt() != decision.attempt())
      continue;
    if (SameDecision(**record, decision)) return Send(0, std::move(ack), actions);
    if (policy_.first_decision) {
      return Fail(absl::AbortedError(absl::StrCat("two unequal decisions: ", Describe(**record),
                                                  " is recorded, the leader now says ",
                                                  Describe(decision))),
                  actions);
    }
  }
  const auto key = std::make_pair(decision.step(), decision.attempt());
  const auto open = std::make_pair(attempt_.step, attempt_.attempt);
  // Older than the records: a repetition of what all servers acknowledged long ago.
  if (key < open && policy_.first_decision) return;
  const absl::Status mismatch = absl::FailedPreconditionError(
      absl::StrCat("the leader decides ", Describe(decision), "; this server is at step ",
                   attempt_.step, " attempt ", attempt_.attempt));
  if (key != open && policy_.first_decision)
    return Refuse(0, leader_, mismatch, decision.step(), decision.attempt(), false, actions);
  const bool rescaled = attempt_.rescale.has_value();
  const bool voted =
      rescaled ? attempt_.vote1 && !attempt_.vote1->failed() : attempt_.vote0.has_value();
  const bool may = decision.outcome() == v1::DROP ||
                   (voted && !attempt_.drop &&
                    (decision.outcome() == v1::SKIP || decision.round() == (rescaled ? 1 : 0)));
  if (key == open && !may) {
    return Refuse(
        0, leader_,
        absl::FailedPreconditionError(absl::StrCat("the leader decides ", Describe(decision),
                                                   " without this server's vote for it")),
        decision.step(), decision.attempt(), false, actions);
  }
  Record(decision, now, actions);
  Send(0, std::move(ack), actions);
}

void RunMachine::Record(const v1::Decide& decision, int64_t now, Actions* actions) {
  last_attempt_ = decision;
  switch (decision.outcome()) {
    case v1::COMMIT:
      ++counters_.committed_steps;
      break;
    case v1::SKIP:
      ++counters_.skipped_steps;
      counters_.last_skip_reason = decision.reason();
      break;
    default:
      ++counters_.dropped_attempts;
      counters_.last_drop_reason = decision.reason();
      break;
  }
  if (decision.outcome() != v1::DROP) {
    consumed_ = decision.step();
    last_consumed_ = decision;
    kept_step_ = decision.outcome() == v1::COMMIT ? decision.step() : 0;
  }
  settled_ = false;
  actions->push_back(action::Finish{decision});
  if (decision.outcome() == v1::DROP) {
    ResetAttempt(decision.step(), decision.attempt() + 1);
  } else {
    ResetAttempt(decision.step() + 1, 0);
  }
  for (int32_t rank = 0; rank < static_cast<int32_t>(ranks_.size()); ++rank)
    SendDecided(rank, decision, actions);
  // A rank without weights waits for those of the newest decided step.
  for (int32_t rank = 0; rank < static_cast<int32_t>(ranks_.size()); ++rank) {
    if (decision.outcome() != v1::DROP && ranks_[rank].joined && ranks_[rank].needs_weights)
      actions->push_back(action::Resend{rank});
  }
  AnswerReadyJoins(now, actions);
  ReplayHeld(now, actions);
}

// What came ahead of this server's record may be due now (rule 11).
void RunMachine::ReplayHeld(int64_t now, Actions* actions) {
  for (int32_t rank = 0; rank < static_cast<int32_t>(ranks_.size()); ++rank) {
    RankState& state = ranks_[rank];
    if (state.held_begin) {
      const v1::BeginStep begin = *state.held_begin;
      state.held_begin.reset();
      OnBeginStep(rank, begin, now, actions);
    }
    if (state.held_end && std::make_pair(state.held_end->step(), state.held_end->attempt()) <
                              std::make_pair(attempt_.step, attempt_.attempt)) {
      state.held_end.reset();
    }
  }
}

}  // namespace stiefel
