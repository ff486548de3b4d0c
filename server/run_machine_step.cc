// The first half of a step: BeginStep, agreement, pieces. See the numbered walk in run_machine.h;
// the second half is in run_machine_decide.cc.
#include <cmath>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/errors.h"
#include "common/status.h"
#include "google/protobuf/util/message_differencer.h"
#include "server/run_machine.h"

namespace stiefel {
namespace {

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
  if (message.has_prepare() || message.has_cancel_prepare() || message.has_switch_placement())
    return OnEpochMessage(message, now, actions);
  if (absl::Status known = CheckSender(sender); !known.ok()) {
    if (sender.rank() < 0 || sender.rank() >= spec_->world_size()) return;
    const Incarnation theirs(sender.incarnation());
    if (Outdated(sender)) return SendMoved(sender.rank(), theirs, actions);
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
    case v1::TrainerMessage::kPrepare:  // the last three: above
    case v1::TrainerMessage::kCancelPrepare:
    case v1::TrainerMessage::kSwitchPlacement:
    case v1::TrainerMessage::kReplanRefused:  // the host's
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
  MaybePrepared(actions);
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
  return weights_ready_ && !unsettled_ && !attempt_.sealed() && failure_.ok();
}

void RunMachine::GrantAll(Actions* actions) {
  if (!MayGrant()) return;
  for (int32_t rank = 0; rank < static_cast<int32_t>(ranks_.size()); ++rank) {
    if (attempt_.ranks[rank].begun) actions->push_back(action::GrantCredit{rank});
  }
}

void RunMachine::OnSettled(int64_t step, int32_t attempt, Actions* actions) {
  if (unsettled_ != std::make_pair(step, attempt)) return;
  unsettled_.reset();
  MaybePrepared(actions);
  GrantAll(actions);
}

void RunMachine::OnWeightsReady(Actions* actions) {
  if (weights_ready_) return;
  weights_ready_ = true;
  MaybePrepared(actions);
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

}  // namespace stiefel
