// How the leader moves the run to another placement (PROTOCOL rules 15 and 16), as operators and
// servers ask. On the mover's thread; session_move.cc has the whole walk.
#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "client/move_request.h"
#include "client/open_run.h"
#include "client/session.h"
#include "common/clock.h"
#include "common/status.h"

namespace stiefel {
namespace {

constexpr int64_t kLookMicros = 100000;
// How long servers may take to say what they are, and new ones to open the run.
constexpr int64_t kAskMicros = 5000000;
// A move may take a step timeout, but at least this: state is copied, and other ranks come to the
// step boundary.
constexpr int64_t kLeastMoveMicros = 60000000;
// After a move that was cancelled; the run goes on meanwhile.
constexpr int64_t kRetryMicros = 1000000;
constexpr int64_t kCloseMicros = 2000000;
// How long servers that leave may take to say that they have switched; they may have stopped.
constexpr int64_t kLeaverMicros = 1000000;

int64_t Now() { return RealClock().NowMicros(); }

absl::Status Stopped() { return absl::CancelledError("the trainer stops"); }

bool ServerMayCome(const absl::Status& status) { return absl::IsUnavailable(status); }

template <typename List>
bool Contains(const List& list, const std::string& value) {
  return std::find(list.begin(), list.end(), value) != list.end();
}

}  // namespace

// What servers are is asked while the run goes on.
bool Session::MaySurvey() const {
  return leader_ && !closed_ && !wish_.empty() && surveyed_.empty() && Now() >= lead_after_;
}

void Session::SurveyServers() {
  MoveWish wish;
  std::vector<std::string> addresses;
  size_t stay = 0;
  {
    MutexLock lock(&mutex_);
    wish = wish_;
    addresses.assign(opened_.servers().begin(), opened_.servers().end());
    stay = addresses.size();
  }
  for (const std::string& address : wish.add) {
    if (!Contains(addresses, address) && wish.drain.count(address) == 0)
      addresses.push_back(address);
  }
  const Servers all = ConnectTo(addresses);
  SetCalling(all);
  const std::vector<absl::StatusOr<std::string>> answers =
      CallEach(all, "GetServerInfo", v1::GetServerInfoRequest().SerializeAsString(), kAskMicros);
  MutexLock lock(&mutex_);
  std::vector<v1::ServerInfo> infos(answers.size());
  for (size_t s = 0; s < answers.size(); ++s) {
    if (answers[s].ok() && infos[s].ParseFromString(*answers[s])) continue;
    if (s >= stay) return RefuseWish(answers[s].status());
    lead_after_ = Now() + kRetryMicros;  // the run has other troubles
    return;
  }
  surveyed_ = all;
  infos_ = std::move(infos);
  MaybeLead();
}

// The answer to whoever asked for a change of placement.
void Session::RefuseWish(const absl::Status& why) {
  wish_.Clear();
  surveyed_ = Servers();
  v1::TrainerMessage refused;
  refused.mutable_replan_refused()->set_reason(std::string(why.message()));
  for (int32_t s = 0; s < static_cast<int32_t>(servers_.size()); ++s) {
    if (!servers_[s].comes_in) SendControl(s, refused);
  }
}

// Between two steps: the last one is applied and decided everywhere, the next has not begun.
bool Session::MayLead() const {
  if (!leader_ || !trainer_ || Stopping() || closed_ || moving_ || leading_ || wish_.empty() ||
      surveyed_.empty() || trainer_->begun() || !trainer_->has_weights() || OutcomeIsKnown()) {
    return false;
  }
  return std::none_of(servers_.begin(), servers_.end(),
                      [](const ServerState& server) { return server.weights_needed; });
}

// From here on nothing of the next step is sent.
void Session::MaybeLead() {
  if (!MayLead()) return;
  leading_ = true;
  changed_.NotifyAll();
}

void Session::OnReplanAsked(const v1::ReplanAsked& asked) {
  const MoveWish before = wish_;
  wish_.add.insert(asked.add().begin(), asked.add().end());
  wish_.drain.insert(asked.drain().begin(), asked.drain().end());
  if (wish_.add != before.add) surveyed_ = Servers();
  changed_.NotifyAll();
}

void Session::OnEpochAck(int32_t server, const v1::EpochAck& ack) {
  if (!leader_) return;
  LeaderSends sends;
  leader_->OnEpochAck(server, ack, &sends);
  Perform(std::move(sends));
  changed_.NotifyAll();
}

// Drives one move; returns the new placement, in force on all its servers. UNAVAILABLE: it may work
// later. Other errors are the answer to the operator.
absl::StatusOr<v1::Placement> Session::Lead() {
  MoveWish wish;
  v1::OpenRunRequest opened;
  v1::Prepare prepare;
  Servers all;
  std::vector<v1::ServerInfo> infos;
  {
    MutexLock lock(&mutex_);
    wish = wish_;
    opened = opened_;
    all = std::exchange(surveyed_, Servers());
    infos = infos_;
    prepare.set_after_step(trainer_->applied());
    largest_epoch_ = std::max(largest_epoch_, leader_->largest_epoch());
  }
  STIEFEL_ASSIGN_OR_RETURN(const MoveRequest request,
                           MakeMoveRequest(layout_, opened, all.addresses, infos, wish));
  STIEFEL_ASSIGN_OR_RETURN(const MovePlan plan, PlanMove(request));
  {
    MutexLock lock(&mutex_);
    *prepare.mutable_placement() = PlacementOf(request, plan, largest_epoch_ + 1);
    if (plan.shards_moved == 0 && prepare.placement().servers_size() == opened.servers_size() &&
        static_cast<int>(all.addresses.size()) == opened.servers_size()) {
      wish_.Clear();
      return absl::UnavailableError("there is nothing to move");
    }
    ++largest_epoch_;
  }
  STIEFEL_RETURN_IF_ERROR(OpenOnNew(all, opened, prepare));
  absl::StatusOr<v1::Placement> moved = DriveMove(all, prepare);
  if (!moved.ok()) {
    CloseOnNew(all, opened);
    return moved;
  }
  MutexLock lock(&mutex_);
  if (plan.complete) wish_.Clear();
  return moved;
}

// Opens the run on the servers that come in, which begin to fetch.
absl::Status Session::OpenOnNew(const Servers& all, const v1::OpenRunRequest& opened,
                                const v1::Prepare& prepare) {
  v1::OpenRunRequest request = opened;
  *request.mutable_moves_in()->mutable_placement() = PlacementOf(opened);
  request.mutable_moves_in()->set_after_step(prepare.after_step());
  SetPlacement(prepare.placement(), &request);
  {
    MutexLock lock(&mutex_);
    *request.mutable_leader() = sender_.incarnation();
  }
  Servers coming;
  std::vector<int32_t> index;
  const auto& next = prepare.placement().servers();
  for (size_t s = opened.servers_size(); s < all.addresses.size(); ++s) {
    coming.addresses.push_back(all.addresses[s]);
    coming.connections.push_back(all.connections[s]);
    index.push_back(
        static_cast<int32_t>(std::find(next.begin(), next.end(), all.addresses[s]) - next.begin()));
  }
  if (coming.addresses.empty()) return absl::OkStatus();
  SetCalling(coming);
  const absl::Status answered = CallAllAs<v1::OpenRunResponse>(
                                    coming, "OpenRun",
                                    [&](int server, int64_t) {
                                      request.set_server_index(index[server]);
                                      return request.SerializeAsString();
                                    },
                                    ServerMayCome, Now() + kAskMicros)
                                    .status();
  if (!answered.ok()) CloseOnNew(all, opened);
  return answered;
}

// Servers that were to come in, and do not.
void Session::CloseOnNew(const Servers& all, const v1::OpenRunRequest& opened) {
  Servers coming;
  for (size_t s = opened.servers_size(); s < all.addresses.size(); ++s) {
    coming.addresses.push_back(all.addresses[s]);
    coming.connections.push_back(all.connections[s]);
  }
  v1::CloseRunRequest close;
  {
    MutexLock lock(&mutex_);
    *close.mutable_sender() = sender_;
  }
  CallEach(coming, "CloseRun", close.SerializeAsString(), kCloseMicros);
}

// Links to the servers that come in, Prepare to all, and what follows, until the new placement is
// in force everywhere or cancelled everywhere.
absl::StatusOr<v1::Placement> Session::DriveMove(const Servers& all, const v1::Prepare& prepare) {
  MutexLock lock(&mutex_);
  for (size_t s = servers_.size(); s < all.addresses.size(); ++s) {
    servers_.emplace_back();
    servers_.back().address = all.addresses[s];
    servers_.back().connection = all.connections[s];
    servers_.back().comes_in = true;
    servers_.back().heard = Now();
    OpenLink(static_cast<int32_t>(s));
  }
  std::vector<bool> next;
  for (const std::string& address : all.addresses)
    next.push_back(Contains(prepare.placement().servers(), address));
  LeaderSends sends;
  STIEFEL_RETURN_IF_ERROR(leader_->StartMove(prepare, std::move(next), &sends));
  Perform(std::move(sends));
  wake_.NotifyAll();
  int64_t deadline = Now() + std::max(step_timeout_, kLeastMoveMicros);
  bool late = false;
  bool leavers = false;
  while (leader_->moving()) {
    if (Stopping()) return Stopped();
    if (!leader_->failure().ok()) {
      Fail(leader_->failure());
      return leader_->failure();
    }
    if (!leavers && leader_->AwaitsOnlyLeavers()) {
      leavers = true;
      deadline = std::min(deadline, Now() + kLeaverMicros);
    }
    if (!late && (closed_ || Now() >= deadline)) {
      late = true;
      LeaderSends cancel;
      leader_->OnMoveDeadline(&cancel);
      Perform(std::move(cancel));
    }
    changed_.WaitUntilMicros(&mutex_, Now() + kLookMicros);
  }
  if (!leader_->move_end()->switched) {
    return absl::UnavailableError(absl::StrCat("placement ", prepare.placement().epoch(),
                                               " was cancelled: ", leader_->move_end()->reason));
  }
  SetPlacement(prepare.placement(), &opened_);
  leader_ = LeaderMachine::Opened(prepare.placement().servers_size(), prepare.after_step() + 1);
  leader_->KnowShards(opened_);
  return prepare.placement();
}

// The move came to nothing: links to servers that were to come in are closed, and what was withheld
// is sent.
void Session::ResumeHere(const absl::Status& why) {
  MutexLock lock(&mutex_);
  const auto stay = static_cast<size_t>(opened_.servers_size());
  for (size_t s = stay; s < servers_.size(); ++s) {
    servers_[s].link_wanted = false;
    if (servers_[s].link != nullptr)
      CloseLink(static_cast<int32_t>(s), servers_[s].link.get(),
                absl::CancelledError("the move was cancelled"));
  }
  wake_.NotifyAll();
  while (AnyLinkFrom(stay)) {
    if (Stopping()) return;
    changed_.WaitUntilMicros(&mutex_, Now() + kLookMicros);
  }
  servers_.resize(stay);
  lead_after_ = Now() + kRetryMicros;
  if (!absl::IsUnavailable(why) && !absl::IsCancelled(why) && !absl::IsDeadlineExceeded(why))
    RefuseWish(why);
  leading_ = moving_ = false;
  for (int32_t s = 0; s < static_cast<int32_t>(stay); ++s) {
    if (servers_[s].link == nullptr || servers_[s].link->closing) continue;
    TrainerSends sends;
    trainer_->OnServerUp(s, &sends);
    Perform(std::move(sends));
  }
}

}  // namespace stiefel
