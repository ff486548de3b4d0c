// Changes of placement (PROTOCOL rules 15 and 16): how a rank follows one, and how the leader
// drives it (session_lead.cc). All on a thread of its own; the user's calls go on meanwhile, and
// what they did since the last decided step is sent again.
//
//   leader      asked by a server (ReplanAsked), between two steps: BeginStep is withheld ->
//               servers say what they are -> PlanMove -> OpenRun on those that come in ->
//               LeaderMachine: Prepare .. Switch on all, or CancelPrepare
//   every rank  Moved -> links closed -> JoinRun on the servers of the new placement ->
//               TrainerMachine::Rejoin -> links open
#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "client/open_run.h"
#include "client/session.h"
#include "common/clock.h"
#include "common/status.h"

namespace stiefel {
namespace {

constexpr int64_t kLookMicros = 100000;

int64_t Now() { return RealClock().NowMicros(); }

absl::Status Stopped() { return absl::CancelledError("the trainer stops"); }

}  // namespace

// ---------------------------------------------------------------- the thread

void Session::RunMover() {
  for (;;) {
    std::optional<v1::Placement> follow;
    bool ask = false;
    {
      MutexLock lock(&mutex_);
      while (!Stopping() && !heard_moved_ && !leading_ && !MaySurvey())
        changed_.WaitUntilMicros(&mutex_, Now() + kLookMicros);
      if (Stopping()) return;
      ask = !heard_moved_ && !leading_;
      moving_ = !ask;
      if (!leading_) follow = std::exchange(heard_moved_, std::nullopt);
    }
    if (ask) {
      SurveyServers();
      continue;
    }
    const int64_t start = Now();
    if (!follow) {
      absl::StatusOr<v1::Placement> led = Lead();
      if (led.ok()) {
        follow = *std::move(led);
      } else {
        ResumeHere(led.status());
      }
    }
    const absl::Status followed = follow ? Follow(*follow) : absl::OkStatus();
    MutexLock lock(&mutex_);
    timings_.move_s += static_cast<double>(Now() - start) / 1e6;
    if (followed.ok()) continue;  // the next move may have begun
    moving_ = leading_ = false;
    Fail(followed);
  }
}

bool Session::Stopping() const { return stopping_ || cancelled_ || !fatal_.ok(); }

// Calls of the mover, so that Cancel reaches them too.
void Session::SetCalling(const Servers& servers) {
  MutexLock lock(&mutex_);
  calling_ = servers.connections;
}

// ---------------------------------------------------------------- following

void Session::OnMoved(int32_t server, const v1::Moved& moved) {
  if (leader_) {  // what its SWITCHED said, which was lost
    v1::EpochAck ack;
    ack.set_epoch(moved.placement().epoch());
    ack.set_state(v1::EpochAck::SWITCHED);
    return OnEpochAck(server, ack);
  }
  if (!trainer_ || moved.placement().epoch() <= sender_.placement_epoch()) return;
  heard_moved_ = moved.placement();
  changed_.NotifyAll();
}

bool Session::AnyLinkFrom(size_t first) const {
  if (links_dying_ > 0) return true;
  for (size_t s = first; s < servers_.size(); ++s) {
    if (servers_[s].link != nullptr) return true;
  }
  return false;
}

// Closes all links, and waits until none is left.
absl::Status Session::LeaveLinks() {
  MutexLock lock(&mutex_);
  links_wanted_ = false;
  wake_.NotifyAll();
  while (AnyLinkFrom(0)) {
    if (Stopping()) return Stopped();
    changed_.WaitUntilMicros(&mutex_, Now() + kLookMicros);
  }
  return absl::OkStatus();
}

// Joins the run where it went.
absl::Status Session::Follow(const v1::Placement& placement) {
  STIEFEL_RETURN_IF_ERROR(LeaveLinks());
  Incarnation incarnation;
  std::optional<int64_t> applied;
  {
    MutexLock lock(&mutex_);
    incarnation = Incarnation(sender_.incarnation());
    if (trainer_->has_weights()) applied = trainer_->applied();
  }
  Servers servers = ConnectTo({placement.servers().begin(), placement.servers().end()});
  STIEFEL_ASSIGN_OR_RETURN(const std::vector<v1::JoinRunResponse> answers,
                           JoinNewest(&servers, incarnation, applied, placement.epoch(),
                                      DeadlineAfter(layout_.options().join_timeout)));
  Adopt(servers, answers, applied);
  return absl::OkStatus();
}

// Connections to these servers; those that there are already are kept.
Servers Session::ConnectTo(const std::vector<std::string>& addresses) {
  const Servers known = AllServers();
  Servers servers;
  for (const std::string& address : addresses) {
    const auto found = std::find(known.addresses.begin(), known.addresses.end(), address);
    servers.addresses.push_back(address);
    servers.connections.push_back(found != known.addresses.end()
                                      ? known.connections[found - known.addresses.begin()]
                                      : std::shared_ptr<ServerConnection>(transport_->Connect(
                                            address, layout_.options().data_streams)));
  }
  return servers;
}

// Joins under the newest placement that any of them knows, at least `epoch`. *servers becomes its.
absl::StatusOr<std::vector<v1::JoinRunResponse>> Session::JoinNewest(Servers* servers,
                                                                     const Incarnation& incarnation,
                                                                     std::optional<int64_t> applied,
                                                                     int64_t epoch,
                                                                     int64_t deadline) {
  for (int failures = 0;; ++failures) {
    SetCalling(*servers);
    STIEFEL_ASSIGN_OR_RETURN(const std::vector<v1::JoinRunResponse> answers,
                             JoinRun(*servers, layout_, incarnation, applied, deadline));
    const auto newest = std::max_element(
        answers.begin(), answers.end(),
        [](const auto& a, const auto& b) { return a.placement_epoch() < b.placement_epoch(); });
    const std::vector<std::string> list(newest->servers().begin(), newest->servers().end());
    const bool moved = newest->placement_epoch() > 1;
    const bool agree = std::all_of(answers.begin(), answers.end(), [&](const auto& answer) {
      return answer.placement_epoch() == newest->placement_epoch();
    });
    if (!moved || (agree && list == servers->addresses && newest->placement_epoch() >= epoch)) {
      STIEFEL_RETURN_IF_ERROR(CheckJoined(*servers, layout_, answers));
      return answers;
    }
    if (newest->placement_epoch() >= epoch) *servers = ConnectTo(list);
    const int64_t until = Now() + BackoffMicros(failures);
    if (until >= deadline) {
      return absl::DeadlineExceededError(
          absl::StrCat("run \"", layout_.options().run, "\": placement ",
                       std::max(epoch, newest->placement_epoch()),
                       " is not in force on all of its servers (", absl::StrJoin(list, ", "), ")"));
    }
    MutexLock lock(&mutex_);
    while (Now() < until) {
      if (Stopping()) return Stopped();
      changed_.WaitUntilMicros(&mutex_, until);
    }
  }
}

// The servers of a placement, joined, take the place of those before.
void Session::Adopt(const Servers& servers, const std::vector<v1::JoinRunResponse>& answers,
                    std::optional<int64_t> applied) {
  const auto count = static_cast<int32_t>(answers.size());
  std::vector<ServerState> before;  // connections go outside the lock
  MutexLock lock(&mutex_);
  sender_.set_placement_epoch(answers[0].placement_epoch());
  largest_epoch_ = std::max(largest_epoch_, answers[0].placement_epoch());
  owners_.assign(answers[0].owners().begin(), answers[0].owners().end());
  before.swap(servers_);
  for (int32_t s = 0; s < count; ++s) {
    servers_.emplace_back();
    servers_[s].address = servers.addresses[s];
    servers_[s].connection = servers.connections[s];
    servers_[s].consumed = answers[s].consumed_step();
    servers_[s].heard = Now();
  }
  std::vector<TrainerBlock> push, pull;
  MachineBlocks(&push, &pull);
  trainer_->Rejoin(count, std::move(push), std::move(pull));
  for (int32_t s = 0; s < count; ++s) trainer_->OnJoined(s, applied, answers[s].consumed_step());
  early_.clear();
  heard_moved_.reset();
  calling_.clear();
  awaiting_since_ = 0;
  ++timings_.moves;
  moving_ = leading_ = false;
  links_wanted_ = true;
  for (int32_t s = 0; s < count; ++s) OpenLink(s);
  wake_.NotifyAll();
  changed_.NotifyAll();
}

}  // namespace stiefel
