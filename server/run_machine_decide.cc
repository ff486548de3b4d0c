// The second half of a step: computing, votes, drops, the leader's decision. The first half is in
// run_machine_step.cc.
#include <algorithm>
#include <cmath>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/errors.h"
#include "plan/shards.h"
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

}  // namespace

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
  // Whether all shards are absent is known after they spoke to each other.
  if (absent && !spec_->matrices()[matrix].computed_together()) {
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
        spec_->matrices()[result.matrix()].Label(), "\" in step ", step, ": ", failure.message());
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
        const MatrixSpec& matrix = spec_->matrices()[block.matrix];
        incomplete =
            absl::StrCat("gradient of \"", matrix.name, "\" ",
                         InMatrix(matrix.place, block.rect).DebugString(), " from rank ", rank);
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
  if (prepared_) return;
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
    if (progress.result.absent()) continue;
    // Nothing to compute again, unless shards that are finite compute it together with this one.
    if (progress.result.nonfinite_gradient() > 0 &&
        !spec_->matrices()[matrix].computed_together()) {
      continue;
    }
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
  unsettled_ = {decision.step(), decision.attempt()};
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
  MaybePrepared(actions);
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
