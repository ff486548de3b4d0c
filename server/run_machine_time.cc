// Leases, deadlines, and how long a run is kept without anybody.
#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/run_machine.h"

namespace stiefel {
namespace {

// A tick later than this was held up: the process was frozen or starved.
constexpr int64_t kLateTickMicros = 1000000;

}  // namespace

bool RunMachine::Live(int32_t rank, int64_t now) const {
  if (away_) return false;
  const RankState& state = ranks_[rank];
  // The leader lives from OpenRun or TakeOver on, before it joins.
  return (state.joined || (rank == 0 && !state.closed)) && !state.streams_closed &&
         now < state.lease_end;
}

bool RunMachine::AnyLive(int64_t now) const {
  for (int32_t rank = 0; rank < static_cast<int32_t>(ranks_.size()); ++rank) {
    if (Live(rank, now)) return true;
  }
  return false;
}

double RunMachine::ReleaseSeconds(int64_t now) const {
  if (AnyLive(now)) return 0;
  // Until the next tick sees that nobody lives, all of it is left.
  const int64_t left = release_at_ == 0 ? spec_->takeover_timeout() : release_at_ - now;
  return static_cast<double>(std::max<int64_t>(0, left)) / 1e6;
}

void RunMachine::OnLeaseEnd(int32_t rank, int64_t now) { ranks_[rank].lease_end = now; }

void RunMachine::OnTick(int64_t now, Actions* actions) {
  // A frozen server must not take its own absence for the trainers'.
  const int64_t gap = now - last_tick_;
  last_tick_ = now;
  if (gap > kLateTickMicros) {
    for (RankState& rank : ranks_) rank.lease_end += gap;
    if (attempt_.deadline != 0) attempt_.deadline += gap;
    if (release_at_ != 0) release_at_ += gap;
    for (PendingJoin& pending : pending_joins_) pending.deadline += gap;
  }
  if (ended_) return;
  std::vector<PendingJoin> waiting;
  for (PendingJoin& pending : pending_joins_) {
    if (now < pending.deadline) {
      waiting.push_back(std::move(pending));
      continue;
    }
    const std::vector<int32_t> missing = MissingJoins();
    const std::string why =
        HoldsJoins()      ? "the placement is being changed"
        : missing.empty() ? "a decision of the leader (rank 0) is awaited"
                          : absl::StrCat(ranks_.size() - missing.size(), " of ", ranks_.size(),
                                         " trainers joined; missing ", RankList(missing));
    actions->push_back(action::AnswerJoin{
        pending.token,
        absl::DeadlineExceededError(absl::StrCat("run \"", spec_->opened().name(), "\": ", why)),
        {}});
  }
  pending_joins_ = std::move(waiting);
  if (attempt_.deadline != 0 && now >= attempt_.deadline) OnStepDeadline(now, actions);
  if (away_ && now >= release_at_)
    EndRun(absl::StrCat("run \"", spec_->opened().name(), "\" moved away after step ", consumed_),
           actions);
  if (away_) return;
  const bool any_closed =
      std::any_of(ranks_.begin(), ranks_.end(), [](const RankState& rank) { return rank.closed; });
  if (AnyLive(now)) {
    release_at_ = 0;
  } else if (any_closed) {
    return EndRun(absl::StrCat("run \"", spec_->opened().name(), "\" ended after step ", consumed_,
                               ": every rank has left or lost its lease"),
                  actions);
  } else if (release_at_ == 0) {
    release_at_ = now + (policy_.release_timeout ? spec_->takeover_timeout() : 0);
  }
  if (release_at_ != 0 && now >= release_at_) {
    EndRun(absl::StrCat("run \"", spec_->opened().name(),
                        "\" was released: no trainer had a lease for ",
                        static_cast<double>(spec_->takeover_timeout()) / 1e6, " s"),
           actions);
  }
}

}  // namespace stiefel
