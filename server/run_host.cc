#include "server/run_host.h"

#include <algorithm>
#include <cmath>

#include "absl/strings/str_cat.h"
#include "common/status.h"
#include "server/need_order.h"
#include "server/peer_state.h"

namespace stiefel {
namespace {

// Longest that a JoinRun is held, whatever the caller asks for.
constexpr double kMaxJoinWaitSeconds = 3600;
// Calls that may wait: a rank whose caller gave up and came again has two.
constexpr size_t kJoinsPerRank = 16;

}  // namespace

RunHost::RunHost(Environment environment, std::shared_ptr<const RunSpec> spec)
    : environment_(std::move(environment)),
      opened_at_(environment_.clock->NowMicros()),
      spec_(std::move(spec)),
      machine_(spec_, opened_at_),
      ranks_(spec_->world_size()) {}

RunHost::~RunHost() = default;

absl::StatusOr<std::shared_ptr<RunHost>> RunHost::Open(Environment environment,
                                                       const v1::OpenRunRequest& request) {
  STIEFEL_ASSIGN_OR_RETURN(std::shared_ptr<const RunSpec> spec, RunSpec::Create(request));
  auto host = std::shared_ptr<RunHost>(new RunHost(std::move(environment), std::move(spec)));
  STIEFEL_RETURN_IF_ERROR(host->Allocate());
  Turn turn;
  {
    MutexLock lock(&host->mutex_);
    host->machine_.OnOpened(&turn.actions);
    host->Perform(&turn);
  }
  host->EndTurn(&turn);
  return host;
}

AdmissionLimits RunHost::Limits() const {
  AdmissionLimits limits;
  limits.memory_limit_bytes = environment_.options.memory_limit_bytes;
  limits.credit_window_bytes = environment_.options.credit_window_bytes;
  limits.matrices_in_flight = environment_.engine->workers();
  limits.staging = environment_.options.staging;
  return limits;
}

absl::Status RunHost::Allocate() {
  MutexLock lock(&mutex_);
  machine_.set_admission([this](const std::vector<RankState>& ranks) {
    mutex_.AssertHeld();  // the machine is called under the lock only
    return AdmitSteps(ranks);
  });
  if (environment_.trace != nullptr)
    trace_ = std::make_unique<RunTrace>(environment_.trace, &machine_);
  if (spec_->opened().has_moves_in()) {  // the shards come with their state
    if (!spec_->weights_mode()) return absl::OkStatus();
    init_ =
        std::make_unique<WeightsInit>(spec_, std::map<int32_t, std::shared_ptr<SharedBuffer>>());
    init_->Close();
    return absl::OkStatus();
  }
  STIEFEL_ASSIGN_OR_RETURN(admitted_, AdmitRun(*spec_, {}, Limits()));
  std::vector<MatrixStore*> stores;
  for (const int32_t index : spec_->owned()) {
    STIEFEL_ASSIGN_OR_RETURN(std::unique_ptr<MatrixStore> store,
                             MatrixStore::Create(index, &spec_->matrices()[index],
                                                 spec_->weights_mode(), environment_.backend));
    stores.push_back(store.get());
    stores_[index] = std::move(store);
  }
  STIEFEL_RETURN_IF_ERROR(MatrixStore::AllocateState(stores, environment_.backend));
  STIEFEL_RETURN_IF_ERROR(OpenCollective());
  SetWorkspaces();
  if (!spec_->weights_mode()) return absl::OkStatus();
  std::map<int32_t, std::shared_ptr<SharedBuffer>> weights;
  for (const MatrixStore* store : stores) weights[store->index()] = store->weights();
  init_ = std::make_unique<WeightsInit>(spec_, std::move(weights));
  if (stores.empty()) {  // nothing to initialise here
    Actions actions;
    machine_.OnWeightsReady(&actions);
  }
  return absl::OkStatus();
}

absl::Status RunHost::AdmitSteps(const std::vector<RankState>& ranks) {
  STIEFEL_ASSIGN_OR_RETURN(admitted_, AdmitRun(*spec_, ranks, Limits()));
  std::vector<MatrixStore*> stores;
  for (const auto& [index, store] : stores_) stores.push_back(store.get());
  STIEFEL_RETURN_IF_ERROR(
      MatrixStore::AllocateSteps(stores, admitted_.staging, ranks, environment_.backend));
  need_order_ = NeedOrder(ranks, spec_->matrices().size());
  targets_.assign(ranks.size(), {});
  for (size_t rank = 0; rank < ranks.size(); ++rank)
    targets_[rank].resize(ranks[rank].push.size(), {nullptr, 0});
  for (MatrixStore* store : stores) {
    for (size_t r = 0; r < store->regions().size(); ++r) {
      const PushRegion& region = store->regions()[r];
      targets_[region.rank][region.block_index] = {store, static_cast<int32_t>(r)};
    }
  }
  return absl::OkStatus();
}

void RunHost::EndTurn(Turn* turn) {
  for (DataWrite& write : turn->writes)
    write.sink->Write(BuildChunk(std::move(write.plan), write.receiver));
  turn->writes.clear();
  if (turn->collective != nullptr) {
    turn->collective->Cancel(turn->cancelled.first, turn->cancelled.second);
    if (turn->cancelled == kAllAttempts) {  // nothing is read from stores for peers any more
      MutexLock lock(&mutex_);
      collective_.reset();
      ReleaseIfQuiet();
    }
  }
  calls_.Run();
}

uint64_t RunHost::Join(const v1::JoinRunRequest& request, JoinDone done) {
  Turn turn;
  uint64_t token;
  {
    MutexLock lock(&mutex_);
    token = next_id_++;
    if (joins_.size() >= kJoinsPerRank * ranks_.size()) {
      calls_.Add([done = std::move(done), waiting = joins_.size()] {
        done(absl::ResourceExhaustedError(
                 absl::StrCat(waiting, " JoinRun calls wait already; no more are held")),
             {});
      });
    } else {
      joins_[token] = std::move(done);
      const double wait = std::isfinite(request.wait_seconds())
                              ? std::clamp(request.wait_seconds(), 0.0, kMaxJoinWaitSeconds)
                              : 0.0;
      const int64_t now = Now();
      machine_.OnJoin(token, request, now, now + static_cast<int64_t>(wait * 1e6), &turn.actions);
      Perform(&turn);
    }
  }
  EndTurn(&turn);
  return token;
}

bool RunHost::CancelJoin(uint64_t token) {
  JoinDone dropped;  // destroyed outside the lock
  MutexLock lock(&mutex_);
  const auto found = joins_.find(token);
  if (found == joins_.end()) return false;
  dropped = std::move(found->second);
  joins_.erase(found);
  machine_.OnJoinCancelled(token);
  return true;
}

absl::StatusOr<v1::TakeOverResponse> RunHost::TakeOver(const v1::TakeOverRequest& request) {
  Turn turn;
  absl::StatusOr<v1::TakeOverResponse> record = absl::UnknownError("");
  {
    MutexLock lock(&mutex_);
    record = machine_.OnTakeOver(request, Now(), &turn.actions);
    Perform(&turn);
  }
  EndTurn(&turn);
  return record;
}

absl::StatusOr<v1::CloseRunResponse> RunHost::CloseRun(const v1::CloseRunRequest& request) {
  Turn turn;
  absl::StatusOr<bool> closed = false;
  {
    MutexLock lock(&mutex_);
    closed = machine_.OnClose(request, Now(), &turn.actions);
    Perform(&turn);
  }
  EndTurn(&turn);
  if (!closed.ok()) return closed.status();
  v1::CloseRunResponse response;
  response.set_run_ended(*closed);
  return response;
}

void RunHost::Tick() {
  Turn turn;
  std::shared_ptr<PeerCollective> collective;
  {
    MutexLock lock(&mutex_);
    machine_.OnTick(Now(), &turn.actions);
    Perform(&turn);
    collective = collective_;
    if (incoming_ && incoming_->fetcher != nullptr)
      calls_.Add([fetcher = incoming_->fetcher] { fetcher->Tick(); });
    AnswerStateCalls();
    AnswerReplans();
  }
  EndTurn(&turn);
  if (collective != nullptr) collective->Tick();
}

void RunHost::Drain() {
  Turn turn;
  {
    MutexLock lock(&mutex_);
    machine_.OnDrain(Now(), &turn.actions);
    Perform(&turn);
    drained_ = drained_ || !machine_.attempt().sealed();
  }
  EndTurn(&turn);
}

bool RunHost::Drained() const {
  MutexLock lock(&mutex_);
  if (machine_.ended()) return true;
  if (!drained_ || settling_) return false;
  for (const auto& [id, stream] : data_) {
    if (stream.writing || !ranks_[stream.key.first].queue.empty()) return false;
  }
  return true;
}

bool RunHost::ended() const {
  MutexLock lock(&mutex_);
  return machine_.ended();
}

void RunHost::CloseStreams(const absl::Status& status) {
  while (!controls_.empty()) CloseControl(controls_.begin()->first, status);
  while (!data_.empty()) CloseData(data_.begin()->first, status);
}

void RunHost::Disconnect(const absl::Status& status) {
  {
    MutexLock lock(&mutex_);
    CloseStreams(status);
    for (auto& [token, done] : joins_) {
      machine_.OnJoinCancelled(token);
      calls_.Add([done = std::move(done), status] { done(status, {}); });
    }
    joins_.clear();
    for (ReplanWaiter& waiter : replans_)
      calls_.Add([done = std::move(waiter.done), status] { done(status, {}); });
    replans_.clear();
    state_calls_.clear();  // whoever asked hears UNAVAILABLE
    DropIncoming();
  }
  calls_.Run();
}

// The memory of an ended run is given back when no copy and no job can touch it any more.
void RunHost::ReleaseIfQuiet() {
  if (!machine_.ended() || copies_ > 0 || computing_ > 0 || absorbing_ > 0 || hashing_ > 0 ||
      lending_ > 0) {
    return;
  }
  if (collective_ != nullptr) return;
  if (stores_.empty()) return;
  targets_.clear();
  stores_.clear();
  retired_.clear();
  if (init_ != nullptr) init_->Close();
}

absl::StatusOr<WeightsInit::Progress> RunHost::TakeInitWeights(IncomingChunk* chunk) {
  const v1::ChunkHeader& header = chunk->header();
  if (init_ == nullptr) {
    return absl::FailedPreconditionError(absl::StrCat(
        "run \"", spec()->opened().name(), "\" is in DELTA mode: servers hold no weights"));
  }
  if (header.type() != v1::ChunkHeader::INIT_WEIGHTS)
    return absl::InvalidArgumentError(
        absl::StrCat("a chunk of type ", header.type(), " on InitWeights, not INIT_WEIGHTS"));
  {
    MutexLock lock(&mutex_);
    STIEFEL_RETURN_IF_ERROR(machine_.CheckTrainer(header.sender()));
  }
  STIEFEL_ASSIGN_OR_RETURN(const WeightsInit::Progress progress, init_->Take(chunk));
  if (!progress.completed_now) return progress;
  Turn turn;
  {
    MutexLock lock(&mutex_);
    machine_.OnWeightsReady(&turn.actions);
    Perform(&turn);
  }
  EndTurn(&turn);
  return progress;
}

}  // namespace stiefel
