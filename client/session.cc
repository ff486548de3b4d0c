#include "client/session.h"

#include <algorithm>
#include <random>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "client/open_run.h"
#include "common/clock.h"
#include "common/errors.h"
#include "common/status.h"

namespace stiefel {
namespace {

constexpr int64_t kCloseMicros = 5000000;
constexpr int64_t kCancelAgainMicros = 50000;

int64_t Now() { return RealClock().NowMicros(); }

uint64_t RandomId() {
  std::random_device device;
  uint64_t id = 0;
  while (id == 0) id = (uint64_t{device()} << 32) | device();
  return id;
}

absl::Status Cancelled() { return absl::CancelledError("the trainer was cancelled"); }

}  // namespace

// ---------------------------------------------------------------- connecting

Session::Session(Layout layout, Transport* transport)
    : transport_(transport), layout_(std::move(layout)) {
  const TrainerOptions& options = layout_.options();
  size_t sources = 0;
  for (const LayoutBlock& block : layout_.push()) {
    first_source_.push_back(sources);
    sources += static_cast<size_t>(block.parts);
  }
  MutexLock lock(&mutex_);
  sources_.resize(sources);
  joined_.resize(layout_.pull().size());
  servers_.resize(options.servers.size());
  for (size_t s = 0; s < servers_.size(); ++s) {
    servers_[s].address = options.servers[s];
    servers_[s].connection = transport_->Connect(options.servers[s], options.data_streams);
  }
}

Servers Session::AllServers() const {
  Servers all;
  MutexLock lock(&mutex_);
  for (const ServerState& server : servers_) {
    all.addresses.push_back(server.address);
    all.connections.push_back(server.connection);
  }
  return all;
}

absl::StatusOr<std::unique_ptr<Session>> Session::Connect(Layout layout, Transport* transport) {
  std::unique_ptr<Session> session(new Session(std::move(layout), transport));
  STIEFEL_ASSIGN_OR_RETURN(session->trace_, SessionTrace::Create(&session->layout_));
  STIEFEL_RETURN_IF_ERROR(session->Join());
  return session;
}

void Session::SetServers(const Servers& servers) {
  std::vector<ServerState> before;  // connections go outside the lock
  MutexLock lock(&mutex_);
  before.swap(servers_);
  for (size_t s = 0; s < servers.addresses.size(); ++s) {
    servers_.emplace_back();
    servers_.back().address = servers.addresses[s];
    servers_.back().connection = servers.connections[s];
  }
}

absl::Status Session::Join() {
  const TrainerOptions& options = layout_.options();
  const int64_t connect_deadline = DeadlineAfter(options.connect_timeout);
  const int64_t deadline = DeadlineAfter(options.join_timeout);
  const std::vector<std::string> found = LocateRun(AllServers(), options.run, connect_deadline);
  if (found != options.servers) SetServers(ConnectTo(found));
  Incarnation incarnation;
  if (options.rank == 0) {
    STIEFEL_ASSIGN_OR_RETURN(incarnation, OpenOrTakeOver(connect_deadline, deadline));
  } else {
    STIEFEL_ASSIGN_OR_RETURN(const Survey survey,
                             AwaitOpen(AllServers(), layout_, connect_deadline, deadline));
    incarnation = Incarnation(survey.generation, RandomId());
  }
  Servers servers = AllServers();
  const std::vector<std::string> before = servers.addresses;
  STIEFEL_ASSIGN_OR_RETURN(
      const std::vector<v1::JoinRunResponse> answers,
      JoinNewest(&servers, incarnation, options.applied_step, /*epoch=*/1, deadline));
  if (servers.addresses != before) SetServers(servers);
  STIEFEL_RETURN_IF_ERROR(layout_.SetCuts(answers[0].cuts()));
  if (answers[0].owners_size() != static_cast<int>(layout_.shards().size())) {
    return absl::FailedPreconditionError(absl::StrCat("run \"", options.run, "\" has ",
                                                      layout_.shards().size(), " shards, but ",
                                                      answers[0].owners_size(), " owners"));
  }
  {
    MutexLock lock(&mutex_);
    sender_.set_run_uid(answers[0].run_uid());
    sender_.set_placement_epoch(answers[0].placement_epoch());
    sender_.set_rank(options.rank);
    *sender_.mutable_incarnation() = incarnation.ToProto();
    largest_epoch_ = std::max(largest_epoch_, answers[0].placement_epoch());
  }
  StartTrainer(answers);
  return absl::OkStatus();
}

absl::StatusOr<Incarnation> Session::OpenOrTakeOver(int64_t connect_deadline, int64_t deadline) {
  const Servers servers = AllServers();
  STIEFEL_ASSIGN_OR_RETURN(const Survey survey, AskServers(servers, layout_, connect_deadline));
  const Incarnation incarnation(survey.generation, RandomId());
  if (survey.HeldAnywhere()) {
    STIEFEL_RETURN_IF_ERROR(TakeOverAll(survey, incarnation, deadline));
    return incarnation;
  }
  STIEFEL_ASSIGN_OR_RETURN(
      const v1::OpenRunRequest opened,
      OpenRun(servers, layout_, survey, RandomId(), incarnation, connect_deadline));
  MutexLock lock(&mutex_);
  leader_ =
      LeaderMachine::Opened(static_cast<int32_t>(servers.addresses.size()), opened.start_step());
  leader_->KnowShards(opened);
  opened_ = opened;
  return incarnation;
}

// Takes the run over on every server that any record names, and completes what is found. In the end
// servers_ are those of the placement in force.
absl::Status Session::TakeOverAll(const Survey& survey, const Incarnation& incarnation,
                                  int64_t deadline) {
  Servers servers = AllServers();
  STIEFEL_ASSIGN_OR_RETURN(std::vector<v1::TakeOverResponse> records,
                           TakeOver(servers, layout_, survey, incarnation, deadline));
  STIEFEL_RETURN_IF_ERROR(TakeOverOthers(
      layout_, incarnation, deadline,
      [this](const std::vector<std::string>& addresses) { return ConnectTo(addresses); }, &servers,
      &records));
  SetServers(servers);
  const auto newest = std::max_element(
      records.begin(), records.end(),
      [](const auto& a, const auto& b) { return a.placement_epoch() < b.placement_epoch(); });
  {
    MutexLock lock(&mutex_);
    opened_ = newest->opened();
    if (opened_.has_moves_in() &&
        opened_.moves_in().placement().epoch() == newest->placement_epoch())
      SetPlacement(opened_.moves_in().placement(), &opened_);
    opened_.clear_moves_in();
    sender_.set_run_uid(opened_.run_uid());
    sender_.set_placement_epoch(newest->placement_epoch());
    *sender_.mutable_incarnation() = incarnation.ToProto();
    lease_ = static_cast<int64_t>(opened_.lease_seconds() * 1e6);
    step_timeout_ = static_cast<int64_t>(opened_.step_timeout_seconds() * 1e6);
    leader_ = LeaderMachine::TakingOver(static_cast<int32_t>(records.size()));
  }
  STIEFEL_RETURN_IF_ERROR(FinishTakeOver(records, deadline));
  const std::vector<std::string> in_force = [this] {
    MutexLock lock(&mutex_);
    return std::vector<std::string>(opened_.servers().begin(), opened_.servers().end());
  }();
  if (servers.addresses == in_force) return absl::OkStatus();
  // Servers are numbered anew, as of the placement.
  STIEFEL_RETURN_IF_ERROR(LeaveLinks());
  SetServers(ConnectTo(in_force));
  MutexLock lock(&mutex_);
  largest_epoch_ = std::max(largest_epoch_, leader_->largest_epoch());
  leader_ =
      LeaderMachine::Opened(static_cast<int32_t>(in_force.size()), newest->consumed_step() + 1);
  leader_->KnowShards(opened_);
  return absl::OkStatus();
}

// Rule 13: what an older leader decided anywhere is completed everywhere before this one joins.
absl::Status Session::FinishTakeOver(const std::vector<v1::TakeOverResponse>& records,
                                     int64_t deadline) {
  thread_ = std::thread([this] { RunThread(); });
  MutexLock lock(&mutex_);
  links_wanted_ = true;
  for (int32_t s = 0; s < static_cast<int32_t>(servers_.size()); ++s) OpenLink(s);
  for (int32_t s = 0; s < static_cast<int32_t>(records.size()); ++s) {
    LeaderSends sends;
    leader_->OnRecord(s, records[s], &sends);
    Perform(std::move(sends));
  }
  while (!leader_->ready()) {
    if (!fatal_.ok()) return fatal_;
    if (!leader_->failure().ok()) return leader_->failure();
    if (!changed_.WaitUntilMicros(&mutex_, deadline)) {
      return absl::DeadlineExceededError(absl::StrCat(
          "taking over run \"", layout_.options().run, "\": waiting for ", leader_->Awaited(),
          " (servers: ", absl::StrJoin(layout_.options().servers, ", "), ")"));
    }
  }
  return absl::OkStatus();
}

void Session::StartTrainer(const std::vector<v1::JoinRunResponse>& answers) {
  lease_ = static_cast<int64_t>(answers[0].lease_seconds() * 1e6);
  step_timeout_ = static_cast<int64_t>(answers[0].step_timeout_seconds() * 1e6);
  chunk_bytes_ = layout_.options().chunk_bytes;
  for (const v1::JoinRunResponse& answer : answers) {
    if (answer.credit_window_bytes() > 0) {
      chunk_bytes_ = std::min(chunk_bytes_, answer.credit_window_bytes());
    }
  }
  // Memory for updates is written to before the first of them arrives: page faults would cost the
  // first step more than the copying itself.
  std::vector<std::shared_ptr<Buffer>> buffers;
  for (const WireBlock& block : layout_.wire_pull()) {
    buffers.push_back(std::make_shared<Buffer>());
    buffers.back()->bytes = std::make_unique<char[]>(static_cast<size_t>(block.bytes()));
  }
  if (!thread_.joinable()) thread_ = std::thread([this] { RunThread(); });
  MutexLock lock(&mutex_);
  pulled_.resize(buffers.size());
  for (size_t i = 0; i < buffers.size(); ++i) pulled_[i].buffer = std::move(buffers[i]);
  owners_.assign(answers[0].owners().begin(), answers[0].owners().end());
  std::vector<TrainerBlock> push, pull;
  MachineBlocks(&push, &pull);
  trainer_.emplace(static_cast<int32_t>(servers_.size()), std::move(push), std::move(pull));
  for (int32_t s = 0; s < static_cast<int32_t>(servers_.size()); ++s) {
    servers_[s].consumed = answers[s].consumed_step();
    servers_[s].weights_needed = answers[s].weights_needed();
    servers_[s].heard = Now();
    trainer_->OnJoined(s, layout_.options().applied_step, answers[s].consumed_step());
  }
  links_wanted_ = true;
  for (int32_t s = 0; s < static_cast<int32_t>(servers_.size()); ++s) {
    if (!servers_[s].link) {
      OpenLink(s);
    } else if (!servers_[s].link->closing) {
      OpenDataStreams(s);
    }
  }
  for (const auto& [server, message] : early_) HandleControl(server, message);
  early_.clear();
  wake_.NotifyAll();
  mover_ended_ = false;
  mover_ = std::thread([this] {
    RunMover();
    MutexLock mover_lock(&mutex_);
    mover_ended_ = true;
    changed_.NotifyAll();
  });
}

void Session::MachineBlocks(std::vector<TrainerBlock>* push,
                            std::vector<TrainerBlock>* pull) const {
  const auto to_machine = [this](const WireBlock& block) {
    mutex_.AssertHeld();
    TrainerBlock machine;
    machine.matrix = block.shard;
    machine.server = owners_[block.shard];
    machine.elements = block.elements();
    machine.element_bytes = static_cast<int32_t>(DTypeSize(block.dtype));
    machine.parts = block.parts;
    machine.piece_elements = chunk_bytes_ / machine.element_bytes;
    return machine;
  };
  for (const WireBlock& block : layout_.wire_push()) push->push_back(to_machine(block));
  for (const WireBlock& block : layout_.wire_pull()) pull->push_back(to_machine(block));
}

absl::Status Session::FinalError() const {
  if (closed_) return absl::FailedPreconditionError("the trainer was closed");
  if (cancelled_) return Cancelled();
  if (!fatal_.ok()) return fatal_;
  return trainer_->fatal();
}

Session::~Session() {
  Cancel();
  {
    MutexLock lock(&mutex_);
    while (callers_ > 0) no_callers_.Wait(&mutex_);
    stopping_ = true;
    changed_.NotifyAll();
  }
  // A call that it begins now is cancelled too.
  for (bool ended = false; !ended;) {
    Cancel();
    MutexLock lock(&mutex_);
    if (!mover_ended_) changed_.WaitUntilMicros(&mutex_, Now() + kCancelAgainMicros);
    ended = mover_ended_;
  }
  if (mover_.joinable()) mover_.join();
  {
    MutexLock lock(&mutex_);
    links_wanted_ = false;
    wake_.NotifyAll();
  }
  if (thread_.joinable()) thread_.join();
  std::vector<ServerState> servers;  // connections wait for their calls
  {
    MutexLock lock(&mutex_);
    servers.swap(servers_);
    calling_.clear();
  }
  servers.clear();
  // Streams are gone, so what is left ends with the sockets.
  while (!borrowed_->WaitReturned(Now() + 1000000)) {
  }
}

void Session::Cancel() {
  std::vector<std::shared_ptr<ServerConnection>> connections = AllServers().connections;
  {
    MutexLock lock(&mutex_);
    cancelled_ = true;
    connections.insert(connections.end(), calling_.begin(), calling_.end());
    changed_.NotifyAll();
  }
  for (const auto& connection : connections) connection->CancelCalls();
}

absl::Status Session::Close() {
  Caller caller(this);
  v1::CloseRunRequest request;
  {
    MutexLock lock(&mutex_);
    if (closed_) return absl::OkStatus();
    if (cancelled_) return Cancelled();
    closed_ = true;
    changed_.NotifyAll();
    // A move that is under way ends first: it is cancelled, or where it cannot be, completed.
    const int64_t deadline = Now() + kCloseMicros;
    while ((moving_ || leading_) && Now() < deadline) changed_.WaitUntilMicros(&mutex_, deadline);
    *request.mutable_sender() = sender_;
    request.set_applied_step(trainer_->applied());
  }
  absl::Status first;
  for (const absl::StatusOr<std::string>& answer :
       CallEach(AllServers(), "CloseRun", request.SerializeAsString(), kCloseMicros)) {
    // A server that let the run go has nothing left to close.
    if (first.ok() && !absl::IsNotFound(answer.status())) first = answer.status();
  }
  if (trace_) first.Update(trace_->trace()->Flush());
  MutexLock lock(&mutex_);
  links_wanted_ = false;
  wake_.NotifyAll();
  return first;
}

}  // namespace stiefel
