// The machine's actions, and the engine's work.
#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/errors.h"
#include "server/run_host.h"
#include "spdlog/spdlog.h"

namespace stiefel {
namespace {

constexpr size_t kStepEndsKept = 16;
constexpr int32_t kAny = std::numeric_limits<int32_t>::max();

}  // namespace

// Actions may make the machine ask for more; those come after what was asked before.
void RunHost::Perform(Turn* turn) {
  for (size_t i = 0; i < turn->actions.size(); ++i) {
    Action action = std::move(turn->actions[i]);
    std::visit(
        [this, turn](auto& a) {
          mutex_.AssertHeld();
          Do(a, turn);
        },
        action);
  }
  turn->actions.clear();
  const Attempt& attempt = machine_.attempt();
  if (attempt.drop) CancelAttempt(attempt.step, attempt.attempt, turn);
}

void RunHost::CancelAttempt(int64_t step, int32_t attempt, Turn* turn) {
  turn->cancelled = std::max(turn->cancelled, std::make_pair(step, attempt));
  turn->collective = collective_;
}

void RunHost::Do(action::SendControl& action, Turn*) {
  if (trace_ && action.message.has_vote()) trace_->Voted(action.message.vote(), Now());
  const auto stream = control_of_.find({action.rank, action.to});
  if (stream == control_of_.end()) return;
  if (action.message.has_arrived()) {
    v1::Arrived* arrived = action.message.mutable_arrived();
    const Credit& credit = ranks_[action.rank].credit;
    if (credit.step == arrived->step() && credit.attempt == arrived->attempt())
      arrived->set_consumed_bytes(credit.consumed_bytes);
  }
  calls_.Add([sink = controls_.at(stream->second).sink, message = std::move(action.message)] {
    sink->Send(message);
  });
}

void RunHost::Do(action::AnswerJoin& action, Turn*) {
  const auto found = joins_.find(action.token);
  if (found == joins_.end()) return;
  action.response.set_credit_window_bytes(environment_.options.credit_window_bytes);
  calls_.Add([done = std::move(found->second), status = std::move(action.status),
              response = std::move(action.response)] { done(status, response); });
  joins_.erase(found);
}

void RunHost::Do(action::GrantCredit& action, Turn* turn) {
  GrantCredit(action.rank, /*always=*/true, turn);
}

bool RunHost::Current(const StepKey& key) const {
  const Attempt& attempt = machine_.attempt();
  return !stopped_ && !machine_.ended() && !attempt.drop &&
         key == StepKey{attempt.step, attempt.attempt, attempt.round};
}

void RunHost::Do(action::Compute& action, Turn* turn) {
  const StepKey key{action.step, action.attempt, action.round};
  MatrixStore& store = *stores_.at(action.matrix);
  if (trace_) trace_->Complete(action.matrix, Now());
  if (action.round > 0) {  // the updates of the round before are for nobody
    for (RankIo& io : ranks_) io.queue.DropUpdates(action.step, action.attempt, action.round - 1);
  }
  const int32_t partner = store.spec().partner;
  absl::StatusOr<MatrixJob> job = store.BeginJob(key, machine_.attempt(), action.scale,
                                                 partner < 0 ? nullptr : stores_.at(partner).get());
  if (!job.ok()) {
    v1::Vote::Matrix result;
    result.set_matrix(action.matrix);
    machine_.OnComputed(key.step, key.attempt, key.round, result, job.status(), &turn->actions);
    return;
  }
  ++computing_;
  if (job->sharded != nullptr) return StartChain(*std::move(job), action.matrix);
  environment_.engine->Submit(
      store.WorkspaceBytes(),
      [self = shared_from_this(), job = *std::move(job), matrix = action.matrix](
          const absl::Status& ready, Stream* stream, DeviceBuffer* workspace) mutable {
        self->RunCompute(std::move(job), matrix, ready, stream, workspace);
      },
      need_order_[action.matrix]);
}

void RunHost::RunCompute(MatrixJob job, int32_t matrix, const absl::Status& ready, Stream* stream,
                         DeviceBuffer* workspace) {
  bool wanted;
  {
    MutexLock lock(&mutex_);
    wanted = Current(job.key);
  }
  const int64_t begin = Now();
  JobEnd end;
  absl::Status status = wanted ? ready : absl::CancelledError("the attempt is over");
  if (status.ok()) status = RunStepJob(job, stream, workspace, &end);
  end.micros = Now() - begin;
  if (wanted) TraceStage(job, matrix, begin, begin + end.micros);
  job.pins.clear();  // before the step can be decided: a commit makes these the staged buffers
  EndCompute(job, matrix, status, end);
}

void RunHost::TraceStage(const MatrixJob& job, int32_t matrix, int64_t begin, int64_t end) {
  MutexLock lock(&mutex_);
  if (trace_) {
    trace_->Computed(matrix, job.key.step, KindName(job.spec->rule, job.args.kind), begin, end);
  }
}

void RunHost::EndCompute(const MatrixJob& job, int32_t matrix, const absl::Status& status,
                         const JobEnd& end) {
  Turn turn;
  {
    MutexLock lock(&mutex_);
    --computing_;
    if (Current(job.key)) {
      v1::Vote::Matrix vote;
      vote.set_matrix(matrix);
      vote.set_absent(status.ok() && end.absent);
      if (status.ok() && !end.absent) {
        const StepResult& result = end.result;
        if (std::isfinite(result.sum_squares)) vote.set_sum_squares(result.sum_squares);
        vote.set_nonfinite_gradient(result.nonfinite_gradient);
        vote.set_nonfinite_update(result.nonfinite_update);
        vote.set_explanation(end.explanation);
        stores_.at(matrix)->FinishJob(job, end);
      }
      machine_.OnComputed(job.key.step, job.key.attempt, job.key.round, vote, status,
                          &turn.actions);
    }
    MaybeSettle(&turn);
    Perform(&turn);
    ReleaseIfQuiet();
  }
  EndTurn(&turn);
}

void RunHost::Do(action::Publish& action, Turn* turn) {
  MatrixStore& store = *stores_.at(action.matrix);
  const Attempt& attempt = machine_.attempt();
  if (attempt.matrices[action.matrix].result.absent())
    store.SetAbsent({attempt.step, attempt.attempt, attempt.round});
  for (int32_t rank = 0; rank < spec_->world_size(); ++rank) {
    if (!machine_.ranks()[rank].joined) continue;
    RefreshPulls(rank);
    const auto blocks = ranks_[rank].pulls.find(action.matrix);
    if (blocks == ranks_[rank].pulls.end()) continue;
    for (const int32_t block : blocks->second) Enqueue(rank, block, store);
    Pump(rank, turn);
  }
}

void RunHost::Do(action::Resend& action, Turn* turn) {
  RefreshPulls(action.rank);
  RankIo& io = ranks_[action.rank];
  const RankState& state = machine_.ranks()[action.rank];
  io.queue.Clear();  // what is enqueued now holds all of it
  if (state.needs_weights && machine_.weights_ready()) {
    for (const auto& [matrix, blocks] : io.pulls) {
      for (const int32_t block : blocks) EnqueueWeights(action.rank, block, *stores_.at(matrix));
    }
  }
  for (const auto& [matrix, blocks] : io.pulls) {
    const MatrixStore& store = *stores_.at(matrix);
    if (!store.update() || store.update()->key.step <= state.applied) continue;
    for (const int32_t block : blocks) Enqueue(action.rank, block, store);
  }
  Pump(action.rank, turn);
}

// ---------------------------------------------------------------- the end of an attempt

void RunHost::CommitStores(const v1::Decide& decision) {
  const std::set<int32_t> skipped(decision.skipped_matrices().begin(),
                                  decision.skipped_matrices().end());
  for (const auto& [index, store] : stores_) {
    if (skipped.count(index) > 0) {
      store->Skip(decision.reason());
      continue;
    }
    std::optional<MatrixJob> absorb = store->Commit(decision.step());
    if (!absorb) continue;
    ++absorbing_;
    absorbs_.push_back(*std::move(absorb));
  }
  if (init_ != nullptr) init_->Close();
  StartAbsorbs();
}

void RunHost::Do(action::Finish& action, Turn* turn) {
  const v1::Decide& decision = action.decision;
  settling_ = {decision.step(), decision.attempt()};
  if (trace_) trace_->Decided(decision, Now());
  CancelAttempt(decision.step(), decision.attempt(), turn);
  if (machine_.draining()) drained_ = true;
  if (decision.outcome() == v1::COMMIT) {
    CommitStores(decision);
  } else {
    for (RankIo& io : ranks_) io.queue.DropUpdates(decision.step(), decision.attempt(), kAny);
    for (const auto& [index, store] : stores_) {
      if (decision.outcome() == v1::SKIP) {
        store->Skip(decision.reason());
      } else {
        store->Discard();
      }
    }
  }
  if (decision.outcome() != v1::COMMIT) {
    spdlog::warn("run \"{}\": {} of step {} attempt {}: {}", spec_->opened().name(),
                 v1::Outcome_Name(decision.outcome()), decision.step(), decision.attempt(),
                 decision.reason());
  }
  if (decision.outcome() != v1::DROP) {
    last_grad_norm_ = decision.grad_norm();
    step_ends_.push_back(Now());
    if (step_ends_.size() > kStepEndsKept) step_ends_.pop_front();
  }
  MaybeSettle(turn);
}

// Absorbing writes the state in place, so it waits for whoever hashes or sends it.
void RunHost::StartAbsorbs() {
  if (hashing_ > 0 || lending_ > 0) return;
  for (MatrixJob& job : absorbs_) {
    environment_.engine->Submit(0, [self = shared_from_this(), job = std::move(job)](
                                       const absl::Status& ready, Stream* stream, DeviceBuffer*) {
      self->RunAbsorb(job, ready, stream);
    });
  }
  absorbs_.clear();
}

void RunHost::RunAbsorb(const MatrixJob& job, const absl::Status& ready, Stream* stream) {
  const absl::Status absorbed = ready.ok() ? RunAbsorbJob(job, stream) : ready;
  Turn turn;
  {
    MutexLock lock(&mutex_);
    --absorbing_;
    if (!absorbed.ok()) {
      machine_.OnStateLost(
          absl::Status(absorbed.code(),
                       absl::StrCat("the state of \"", job.spec->Label(), "\" after step ",
                                    job.key.step, " was lost: ", absorbed.message())),
          &turn.actions);
    }
    MaybeSettle(&turn);
    Perform(&turn);
    ReleaseIfQuiet();
  }
  EndTurn(&turn);
}

void RunHost::MaybeSettle(Turn* turn) {
  if (!settling_ || copies_ > 0 || computing_ > 0 || absorbing_ > 0) return;
  const auto [step, attempt] = *settling_;
  settling_.reset();
  retired_.clear();
  machine_.OnSettled(step, attempt, &turn->actions);
  StartHashes();
  AnswerStateCalls();
}

void RunHost::Do(action::FreeDeltas& action, Turn*) {
  for (RankIo& io : ranks_) io.queue.DropUpdates(action.step, kAny, kAny);
  for (const auto& [index, store] : stores_) {
    if (store->update() && store->update()->key.step == action.step) store->FreeUpdate();
  }
}

void RunHost::Do(action::Fence& action, Turn* turn) {
  const Incarnation& current = machine_.ranks()[action.rank].incarnation;
  const absl::Status fenced = StaleIncarnation(action.rank, action.older.generation,
                                               action.older.id, current.generation, current.id);
  const StreamKey key(action.rank, action.older);
  if (const auto control = control_of_.find(key); control != control_of_.end()) {
    action::SendControl send{action.rank, action.older, {}};
    send.message.set_run_uid(spec_->opened().run_uid());
    send.message.set_placement_epoch(machine_.placement_epoch());
    v1::Refused* refused = send.message.mutable_refused();
    refused->set_code(static_cast<int32_t>(fenced.code()));
    refused->set_message(std::string(fenced.message()));
    refused->set_fenced(true);
    Do(send, turn);
    CloseControl(control->second, fenced);
  }
  const std::set<uint64_t> streams = ranks_[action.rank].data_streams;
  for (const uint64_t id : streams) {
    if (data_.at(id).key == key) CloseData(id, fenced);
  }
}

void RunHost::Do(action::EndRun& action, Turn* turn) {
  spdlog::info("{}", action.reason);
  CancelAttempt(kAllAttempts.first, kAllAttempts.second, turn);
  CloseStreams(absl::FailedPreconditionError(action.reason));
  for (RankIo& io : ranks_) io.queue.Clear();
  StartAbsorbs();
  DropIncoming();
  AnswerStateCalls();
  AnswerReplans();
  ReleaseIfQuiet();
}

}  // namespace stiefel
