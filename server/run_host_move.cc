// Changes of placement: state that comes, state that is lent to those that gain it, and the switch.
// Also what operators ask for.
#include <algorithm>
#include <cmath>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/checked_math.h"
#include "common/checksum.h"
#include "common/errors.h"
#include "common/status.h"
#include "server/peer_state.h"
#include "server/run_host.h"
#include "spdlog/spdlog.h"

namespace stiefel {
namespace {

constexpr double kMaxReplanWaitSeconds = 3600;
constexpr double kMaxStateWaitSeconds = 60;
constexpr size_t kMaxWaiting = 1024;

int64_t WaitMicros(double seconds, double most) {
  return std::isfinite(seconds) ? static_cast<int64_t>(std::clamp(seconds, 0.0, most) * 1e6) : 0;
}

}  // namespace

std::shared_ptr<const RunSpec> RunHost::spec() const {
  MutexLock lock(&mutex_);
  return spec_;
}

// ---------------------------------------------------------------- state that comes

// Memory for the shards that are gained, beside everything else that is held: what moves is counted
// twice until the switch.
absl::Status RunHost::MakeRoom(Incoming* incoming) {
  const RunSpec& next = *incoming->next;
  STIEFEL_RETURN_IF_ERROR(AdmitRun(next, machine_.ranks(), Limits()).status());
  int64_t gained = 0;
  for (const int32_t index : next.owned()) {
    if (stores_.count(index) > 0) continue;
    STIEFEL_ASSIGN_OR_RETURN(std::unique_ptr<MatrixStore> store,
                             MatrixStore::Create(index, &next.matrices()[index],
                                                 next.weights_mode(), environment_.backend));
    gained = SaturatingAdd(gained, store->CommittedBytes());
    incoming->stores[index] = std::move(store);
  }
  const int64_t limit = environment_.options.memory_limit_bytes;
  if (SaturatingAdd(admitted_.bytes, gained) > limit) {
    return absl::ResourceExhaustedError(absl::StrCat(
        "to take in ", incoming->stores.size(), " shards of ", gained, " bytes beside the ",
        admitted_.bytes, " that the run needs here now passes the limit of ", limit));
  }
  if (!incoming->stores.empty() && environment_.peers == nullptr)
    return absl::UnimplementedError("this server cannot reach others");
  // Each by itself, so that it is free when the shard moves on.
  for (const auto& [index, store] : incoming->stores)
    STIEFEL_RETURN_IF_ERROR(MatrixStore::AllocateState({store.get()}, environment_.backend));
  return absl::OkStatus();
}

void RunHost::Do(action::FetchState& action, Turn* turn) {
  const int64_t epoch = action.next->opened().placement_epoch();
  incoming_.emplace();
  incoming_->next = action.next;
  const absl::Status room = MakeRoom(&*incoming_);
  if (!room.ok() || incoming_->stores.empty())
    return machine_.OnPrepared(epoch, room, &turn->actions);
  StartFetch(action.after_step);
}

void RunHost::StartFetch(int64_t after_step) {
  const v1::OpenRunRequest& next = incoming_->next->opened();
  // A server that comes in was told the placement in force; others have it.
  const v1::Placement from = next.has_moves_in() ? next.moves_in().placement() : spec_->placement();
  StateFetcher::Request request;
  request.sender.set_run_uid(next.run_uid());
  request.sender.set_placement_epoch(next.placement_epoch());
  request.sender.set_server_index(next.server_index());
  request.after_step = after_step;
  for (const auto& [index, store] : incoming_->stores)
    request.shards.push_back({index, from.servers(from.owners(index)), store.get()});
  incoming_->fetcher = std::make_shared<StateFetcher>(environment_.peers, environment_.clock);
  const int64_t epoch = next.placement_epoch();
  // Off the lock: it may end at once.
  calls_.Add([fetcher = incoming_->fetcher, request = std::move(request), epoch,
              self = weak_from_this()]() mutable {
    fetcher->Start(std::move(request), [self, epoch](const absl::Status& status) {
      if (const std::shared_ptr<RunHost> host = self.lock()) host->OnFetched(epoch, status);
    });
  });
}

void RunHost::OnFetched(int64_t epoch, const absl::Status& status) {
  Turn turn;
  {
    MutexLock lock(&mutex_);
    machine_.OnPrepared(epoch, status, &turn.actions);
    Perform(&turn);
  }
  EndTurn(&turn);
}

// On a worker: a fetch that is cancelled waits for its callbacks, which take the lock, and this may
// be one of them.
void RunHost::DropIncoming() {
  if (!incoming_) return;
  environment_.engine->Submit(0, [held = std::make_shared<Incoming>(*std::move(incoming_))](
                                     const absl::Status&, Stream*, DeviceBuffer*) {});
  incoming_.reset();
}

void RunHost::Do(action::DropPrepared&, Turn*) {
  DropIncoming();
  AnswerStateCalls();
}

// ---------------------------------------------------------------- state that is lent

absl::Status RunHost::CheckStateCall(const v1::FetchStateRequest& request) const {
  const v1::PeerSender& sender = request.sender();
  const std::string what =
      absl::StrCat("state of shard ", request.shard(), " for server ", sender.server_index());
  if (machine_.ended()) return absl::NotFoundError("the run has ended");
  if (sender.run_uid() != spec_->opened().run_uid()) {
    return RunMismatch(what, absl::StrCat("run_uid ", sender.run_uid()),
                       absl::StrCat("run_uid ", spec_->opened().run_uid()));
  }
  const std::optional<v1::Prepare>& prepare = machine_.prepare();
  const int64_t epoch = prepare ? prepare->placement().epoch() : machine_.placement_epoch();
  if (sender.placement_epoch() < epoch || (!prepare && sender.placement_epoch() == epoch))
    return PlacementEpochMismatch(what, sender.placement_epoch(), epoch);
  if (sender.placement_epoch() > epoch)
    return absl::UnavailableError(
        absl::StrCat(what, ": placement ", sender.placement_epoch(), " is not prepared here yet"));
  if (request.after_step() != prepare->after_step())
    return StepMismatch(what, request.after_step(), prepare->after_step());
  if (stores_.count(request.shard()) == 0)
    return absl::FailedPreconditionError(absl::StrCat(what, ": it is not on this server"));
  if (machine_.consumed_step() != request.after_step() || settling_)
    return absl::UnavailableError(
        absl::StrCat(what, ": step ", request.after_step(), " is not decided here yet"));
  return absl::OkStatus();
}

void RunHost::OnFetchState(const v1::FetchStateRequest& request, std::unique_ptr<PeerReply> reply) {
  {
    MutexLock lock(&mutex_);
    StateCall call;
    call.request = request;
    call.reply = std::move(reply);
    call.deadline = Now() + WaitMicros(request.wait_seconds(), kMaxStateWaitSeconds);
    if (state_calls_.size() >= kMaxWaiting) {
      calls_.Add([reply = call.reply] {
        reply->Finish(absl::UnavailableError("too many calls wait for state"));
      });
    } else {
      state_calls_.push_back(std::move(call));
      AnswerStateCalls();
    }
  }
  calls_.Run();
}

// Bytes are read outside the lock, from buffers that are pinned; nothing is absorbed meanwhile.
void RunHost::AnswerStateCalls() {
  std::vector<StateCall> waiting;
  for (StateCall& call : state_calls_) {
    const absl::Status may = CheckStateCall(call.request);
    if (absl::IsUnavailable(may) && Now() < call.deadline && !call.reply->caller_gone()) {
      waiting.push_back(std::move(call));
    } else if (!may.ok()) {
      calls_.Add([reply = call.reply, may] { reply->Finish(may); });
    } else {
      ++lending_;
      StateImage image = stores_.at(call.request.shard())->PinState();
      calls_.Add([self = shared_from_this(), image = std::move(image), reply = call.reply,
                  offset = call.request.offset()]() mutable {
        SendState(image, offset, reply.get());
        image.pins.clear();
        MutexLock lock(&self->mutex_);
        --self->lending_;
        self->StartAbsorbs();
        self->ReleaseIfQuiet();
      });
    }
  }
  state_calls_ = std::move(waiting);
}

// ---------------------------------------------------------------- the switch

void RunHost::SetWorkspaces() {
  std::vector<int64_t> workspaces;
  for (const auto& [index, store] : stores_) workspaces.push_back(store->WorkspaceBytes());
  environment_.engine->SetWorkspaces(std::move(workspaces));
}

void RunHost::Do(action::SwitchPlacement& action, Turn* turn) {
  const absl::Status moved = absl::UnavailableError(
      absl::StrCat("run \"", spec_->opened().name(), "\" moved to placement ",
                   machine_.placement_epoch(), " after step ", machine_.consumed_step()));
  spdlog::info("{}", std::string(moved.message()));
  for (int32_t rank = 0; rank < static_cast<int32_t>(ranks_.size()); ++rank) {
    const RankState& state = machine_.ranks()[rank];
    if (!state.closed && control_of_.count({rank, state.incarnation}) == 0) untold_.insert(rank);
    ranks_[rank].queue.Clear();
    ranks_[rank].credit = Credit();
    ranks_[rank].pulls_of = Incarnation();
    ranks_[rank].pulls.clear();
  }
  control_of_.clear();  // the ranks are not gone: the machine does not hear of it
  CloseStreams(moved);
  targets_.clear();
  for (const auto& [index, store] : stores_) {
    if (store->gradient() != nullptr) retired_.push_back(store->gradient());
  }
  settling_ = {action.step, action.attempt};
  std::map<int32_t, std::unique_ptr<MatrixStore>> before = std::move(stores_);
  stores_.clear();
  if (action.next != nullptr) {
    spec_ = action.next;
    for (const int32_t index : spec_->owned()) {
      const auto kept = before.find(index);
      stores_[index] = std::move(kept != before.end() ? kept->second : incoming_->stores.at(index));
      stores_[index]->Moved(&spec_->matrices()[index]);
    }
  }
  DropIncoming();
  SetWorkspaces();
  if (collective_ != nullptr) {  // of the placement before; nothing is computed now
    environment_.engine->Submit(
        0, [before = std::move(collective_)](const absl::Status&, Stream*, DeviceBuffer*) {
          before->Cancel(kAllAttempts.first, kAllAttempts.second);
        });
    collective_.reset();
  }
  if (action.next != nullptr) {
    if (const absl::Status opened = OpenCollective(); !opened.ok())
      machine_.OnStateLost(opened, &turn->actions);
  }
  if (init_ != nullptr) init_->Close();
  leaving_ = false;
  MaybeSettle(turn);
  AnswerStateCalls();
  AnswerReplans();
}

// ---------------------------------------------------------------- operators

bool RunHost::Led() const { return control_of_.count({0, machine_.ranks()[0].incarnation}) > 0; }

v1::ReplanResponse RunHost::PlacementNow() const {
  v1::ReplanResponse response;
  if (machine_.away()) {
    *response.mutable_placement() = machine_.moved()->placement();
  } else if (machine_.placement_epoch() < spec_->opened().placement_epoch()) {  // it comes in
    *response.mutable_placement() = spec_->opened().moves_in().placement();
  } else {
    *response.mutable_placement() = spec_->placement();
  }
  return response;
}

bool RunHost::Agrees(const v1::ReplanRequest& request) const {
  const v1::ReplanResponse now = PlacementNow();
  const auto& servers = now.placement().servers();
  const auto takes_part = [&servers](const std::string& server) {
    return std::find(servers.begin(), servers.end(), server) != servers.end();
  };
  return std::all_of(request.add().begin(), request.add().end(), takes_part) &&
         std::none_of(request.drain().begin(), request.drain().end(), takes_part);
}

void RunHost::Replan(const v1::ReplanRequest& request, ReplanDone done) {
  Turn turn;
  {
    MutexLock lock(&mutex_);
    if (machine_.ended() || (!Led() && !Agrees(request))) {
      calls_.Add([done = std::move(done), name = spec_->opened().name()] {
        done(absl::FailedPreconditionError(
                 absl::StrCat("run \"", name,
                              "\": no leader (rank 0) is connected, which alone can change the "
                              "placement")),
             {});
      });
    } else if (replans_.size() >= kMaxWaiting) {
      calls_.Add([done = std::move(done)] {
        done(absl::ResourceExhaustedError("too many Replan calls wait already"), {});
      });
    } else {
      if (!Agrees(request)) {
        v1::ReplanAsked asked;
        *asked.mutable_add() = request.add();
        *asked.mutable_drain() = request.drain();
        machine_.OnReplanAsked(asked, &turn.actions);
      }
      replans_.push_back({request, std::move(done),
                          Now() + WaitMicros(request.wait_seconds(), kMaxReplanWaitSeconds)});
      Perform(&turn);
      AnswerReplans();
    }
  }
  EndTurn(&turn);
}

void RunHost::AnswerReplans() {
  std::vector<ReplanWaiter> waiting;
  for (ReplanWaiter& waiter : replans_) {
    absl::Status status;
    if (!Agrees(waiter.request) && machine_.ended()) {
      status = absl::FailedPreconditionError("the run has ended");
    } else if (!Agrees(waiter.request) && waiter.request.wait_seconds() > 0) {
      if (Now() < waiter.deadline) {
        waiting.push_back(std::move(waiter));
        continue;
      }
      status = absl::DeadlineExceededError(
          absl::StrCat("the placement had not changed after ", waiter.request.wait_seconds(),
                       " s (it may still): ",
                       machine_.Awaited().empty() ? "the leader moves a run between steps"
                                                  : machine_.Awaited()));
    }
    calls_.Add([done = std::move(waiter.done), status, now = PlacementNow()] {
      done(status, status.ok() ? now : v1::ReplanResponse());
    });
  }
  replans_ = std::move(waiting);
}

void RunHost::OnReplanRefused(const v1::ReplanRefused& refused) {
  spdlog::warn("run \"{}\": the leader refuses to change the placement: {}", spec_->opened().name(),
               refused.reason());
  machine_.OnReplanRefused();
  leaving_ = false;
  for (ReplanWaiter& waiter : replans_) {
    calls_.Add([done = std::move(waiter.done), reason = refused.reason()] {
      done(absl::FailedPreconditionError(absl::StrCat("the leader refuses: ", reason)), {});
    });
  }
  replans_.clear();
}

bool RunHost::AskToLeave() {
  Turn turn;
  {
    MutexLock lock(&mutex_);
    if (machine_.away()) return true;
    if (machine_.ended() || !Led() || spec_->opened().servers_size() < 2) return false;
    leaving_ = true;
    v1::ReplanAsked asked;
    asked.add_drain(spec_->opened().servers(spec_->opened().server_index()));
    machine_.OnReplanAsked(asked, &turn.actions);
    Perform(&turn);
  }
  EndTurn(&turn);
  return true;
}

bool RunHost::Leaving() const {
  MutexLock lock(&mutex_);
  return leaving_ && !machine_.ended() && Led();
}

bool RunHost::Away() const {
  MutexLock lock(&mutex_);
  return machine_.away();
}

bool RunHost::Left() const {
  MutexLock lock(&mutex_);
  return machine_.ended() || (machine_.away() && untold_.empty());
}

bool RunHost::MayBeReplacedBy(const v1::OpenRunRequest& request) const {
  MutexLock lock(&mutex_);
  const v1::OpenRunRequest& held = spec_->opened();
  return machine_.away() ||
         (held.has_moves_in() && machine_.placement_epoch() < held.placement_epoch() &&
          held.run_uid() == request.run_uid() && request.has_moves_in() &&
          held.placement_epoch() < request.placement_epoch());
}

}  // namespace stiefel
