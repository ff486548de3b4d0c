// Waiting for a step: what ends it, and what an error says.
#include <algorithm>
#include <limits>

#include "absl/strings/str_cat.h"
#include "client/session.h"
#include "common/clock.h"
#include "common/status.h"

namespace stiefel {
namespace {

// After "the deadline passed, X is awaited" the leader's decision to drop is usually on its way.
constexpr int64_t kAwaitingGraceMicros = 1000000;
// How often a waiting caller looks at the clock for servers that fell silent.
constexpr int64_t kLookMicros = 50000;

int64_t Now() { return RealClock().NowMicros(); }

}  // namespace

int64_t Session::DeadlineAfter(absl::Duration timeout) {
  constexpr int64_t kNever = std::numeric_limits<int64_t>::max() / 4;
  const int64_t micros = absl::ToInt64Microseconds(timeout);
  return micros >= kNever ? kNever : Now() + std::max<int64_t>(micros, 0);
}

StepOutcome Session::ToOutcome(const StepEnd& end) const {
  StepOutcome outcome;
  outcome.outcome = end.outcome == v1::COMMIT ? Outcome::kCommit
                    : end.outcome == v1::SKIP ? Outcome::kSkip
                                              : Outcome::kDrop;
  outcome.step = end.step;
  outcome.attempt = end.attempt;
  outcome.grad_norm = end.grad_norm;
  for (const int32_t shard : end.skipped_matrices) {  // ascending: those of a matrix together
    if (shard < 0 || shard >= static_cast<int32_t>(layout_.shards().size())) continue;
    const std::string& name = layout_.matrices()[layout_.shards()[shard].matrix].name;
    if (outcome.skipped.empty() || outcome.skipped.back() != name) outcome.skipped.push_back(name);
  }
  outcome.reason = end.reason;
  return outcome;
}

std::optional<StepEnd> Session::EndOf(int32_t parameter) const {
  std::optional<StepEnd> end = trainer_->End();
  if (end || parameter < 0 || !decided_ || decided_->step() != trainer_->target()) return end;
  for (int32_t b = 0; b < static_cast<int32_t>(layout_.wire_pull().size()); ++b) {
    const int32_t matrix = layout_.shards()[layout_.wire_pull()[b].shard].matrix;
    if (layout_.matrices()[matrix].parameter == parameter && !trainer_->BlockReady(b)) {
      return std::nullopt;
    }
  }
  end.emplace();
  end->step = decided_->step();
  end->attempt = decided_->attempt();
  end->outcome = decided_->outcome();
  end->grad_norm = decided_->grad_norm();
  end->skipped_matrices.assign(decided_->skipped_matrices().begin(),
                               decided_->skipped_matrices().end());
  end->reason = decided_->reason();
  return end;
}

// Which server that the step needs has not been heard of for `limit`.
absl::Status Session::Silent(int64_t now, int64_t limit) const {
  if (std::all_of(servers_.begin(), servers_.end(),
                  [&](const ServerState& server) { return now - server.heard < limit; })) {
    return absl::OkStatus();  // the usual case, without looking at every block
  }
  for (const int32_t s : trainer_->UnfinishedServers()) {
    const ServerState& server = servers_[s];
    const int64_t silent = now - server.heard;
    if (silent < limit) continue;
    return absl::UnavailableError(absl::StrCat(
        "server ", server.address, " has not answered for ", static_cast<double>(silent) / 1e6,
        " s (step ", trainer_->target(), ")",
        server.last_error.ok() ? "" : absl::StrCat("; last error: ", server.last_error.message())));
  }
  return absl::OkStatus();
}

absl::Status Session::TimedOut(int64_t now) const {
  if (moving_ || leading_ || heard_moved_) {
    return absl::DeadlineExceededError(absl::StrCat(
        "step ", trainer_->target(), " has not ended; the run is being moved to other servers",
        leader_ && leader_->moving() ? absl::StrCat(", waiting for ", leader_->Awaited()) : ""));
  }
  // A server that should have answered a heartbeat, or whose streams are down, is named first.
  STIEFEL_RETURN_IF_ERROR(Silent(now, 3 * HeartbeatMicros()));
  for (const int32_t s : trainer_->UnfinishedServers()) {
    if (servers_[s].link && !servers_[s].link->closing && servers_[s].failures == 0) continue;
    return absl::UnavailableError(absl::StrCat(
        "server ", servers_[s].address, " cannot be reached: ", servers_[s].last_error.message()));
  }
  std::string waiting = trainer_->awaiting();
  if (waiting.empty()) {
    for (const int32_t s : trainer_->UnfinishedServers()) {
      absl::StrAppend(&waiting, waiting.empty() ? "server " : ", ", servers_[s].address);
    }
  }
  if (leader_ && !leader_->Awaited().empty()) {
    absl::StrAppend(&waiting, "; the leader waits for ", leader_->Awaited());
  }
  return absl::DeadlineExceededError(
      absl::StrCat("step ", trainer_->target(), " has not ended; waiting for ", waiting));
}

std::optional<absl::StatusOr<StepOutcome>> Session::CheckWait(int32_t parameter, int64_t now) {
  if (absl::Status error = FinalError(); !error.ok()) return error;
  if (const std::optional<StepEnd> end = EndOf(parameter)) {
    const double elapsed = static_cast<double>(now - begun_at_) / 1e6;
    if (push_ended_ && timings_.push_s == 0) timings_.push_s = elapsed;  // the last OnSent is late
    if (parameter < 0 && timings_.decide_s == 0) timings_.decide_s = elapsed;
    return ToOutcome(*end);
  }
  if (moving_ || leading_ || heard_moved_) return std::nullopt;  // servers are others soon
  if (!trainer_->step_error().ok()) return trainer_->step_error();
  if (absl::Status silent = Silent(now, step_timeout_); !silent.ok()) return silent;
  if (awaiting_since_ != 0 && now - awaiting_since_ >= kAwaitingGraceMicros) {
    awaiting_since_ = 0;  // who waits again waits for the servers' next word, a step timeout later
    return absl::DeadlineExceededError(trainer_->awaiting());
  }
  return std::nullopt;
}

// The target step was decided before this rank came to it.
bool Session::OutcomeIsKnown() const {
  if (decided_ && decided_->step() == trainer_->target()) return true;
  const int64_t target = trainer_->target();
  return std::any_of(servers_.begin(), servers_.end(),
                     [target](const ServerState& server) { return server.consumed >= target; });
}

absl::StatusOr<StepOutcome> Session::Wait(int32_t parameter, absl::Duration timeout) {
  Caller caller(this);
  const int64_t start = Now();
  const int64_t deadline = DeadlineAfter(timeout);
  MutexLock lock(&mutex_);
  STIEFEL_RETURN_IF_ERROR(FinalError());
  if (!trainer_->begun() && trainer_->has_weights() && !OutcomeIsKnown()) {
    return absl::FailedPreconditionError(
        absl::StrCat("step ", trainer_->target(), " was not begun"));
  }
  for (;;) {
    const int64_t now = Now();
    Look(now);
    if (auto answer = CheckWait(parameter, now)) {
      timings_.wait_s += static_cast<double>(now - start) / 1e6;
      return *std::move(answer);
    }
    if (now >= deadline) {
      timings_.wait_s += static_cast<double>(now - start) / 1e6;
      return TimedOut(now);
    }
    changed_.WaitUntilMicros(&mutex_, std::min(deadline, now + kLookMicros));
  }
}

absl::StatusOr<StepOutcome> Session::PullWeights(absl::Duration timeout) {
  {
    Caller caller(this);
    MutexLock lock(&mutex_);
    STIEFEL_RETURN_IF_ERROR(FinalError());
    if (trainer_->has_weights()) {
      return absl::FailedPreconditionError(
          absl::StrCat("this trainer joined with the weights of step ", trainer_->applied(),
                       "; only one that joined with none (applied_step unset) pulls them"));
    }
  }
  return Wait(-1, timeout);
}

}  // namespace stiefel
