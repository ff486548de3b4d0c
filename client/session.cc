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
    all.connections.push_back(server.connection.get());
  }
  return all;
}

absl::StatusOr<std::unique_ptr<Session>> Session::Connect(Layout layout, Transport* transport) {
  std::unique_ptr<Session> session(new Session(std::move(layout), transport));
  STIEFEL_ASSIGN_OR_RETURN(session->trace_, SessionTrace::Create(&session->layout_));
  STIEFEL_RETURN_IF_ERROR(session->Join());
  return session;
}

absl::Status Session::Join() {
  const TrainerOptions& options = layout_.options();
  const int64_t connect_deadline = DeadlineAfter(options.connect_timeout);
  const int64_t deadline = DeadlineAfter(options.join_timeout);
  const Servers servers = AllServers();
  Incarnation incarnation;
  if (options.rank == 0) {
    STIEFEL_ASSIGN_OR_RETURN(incarnation, OpenOrTakeOver(servers, connect_deadline, deadline));
  } else {
    STIEFEL_ASSIGN_OR_RETURN(const Survey survey,
                             AwaitOpen(servers, layout_, connect_deadline, deadline));
    incarnation = Incarnation(survey.generation, RandomId());
  }
  STIEFEL_ASSIGN_OR_RETURN(const std::vector<v1::JoinRunResponse> answers,
                           JoinRun(servers, layout_, incarnation, deadline));
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
  }
  StartTrainer(answers);
  return absl::OkStatus();
}

absl::StatusOr<Incarnation> Session::OpenOrTakeOver(const Servers& servers,
                                                    int64_t connect_deadline, int64_t deadline) {
  STIEFEL_ASSIGN_OR_RETURN(const Survey survey, AskServers(servers, layout_, connect_deadline));
  const Incarnation incarnation(survey.generation, RandomId());
  const int32_t count = static_cast<int32_t>(servers.addresses.size());
  if (!survey.HeldAnywhere()) {
    STIEFEL_ASSIGN_OR_RETURN(
        const v1::OpenRunRequest opened,
        OpenRun(servers, layout_, survey, RandomId(), incarnation, connect_deadline));
    MutexLock lock(&mutex_);
    leader_ = LeaderMachine::Opened(count, opened.start_step());
    leader_->KnowShards(opened);
    return incarnation;
  }
  STIEFEL_ASSIGN_OR_RETURN(const std::vector<v1::TakeOverResponse> records,
                           TakeOver(servers, layout_, survey, incarnation, deadline));
  {
    MutexLock lock(&mutex_);
    sender_.set_run_uid(records[0].opened().run_uid());
    sender_.set_placement_epoch(records[0].placement_epoch());
    *sender_.mutable_incarnation() = incarnation.ToProto();
    lease_ = static_cast<int64_t>(records[0].opened().lease_seconds() * 1e6);
    step_timeout_ = static_cast<int64_t>(records[0].opened().step_timeout_seconds() * 1e6);
    leader_ = LeaderMachine::TakingOver(count);
  }
  STIEFEL_RETURN_IF_ERROR(FinishTakeOver(records, deadline));
  return incarnation;
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
  owners_.assign(answers[0].owners().begin(), answers[0].owners().end());
  for (const v1::JoinRunResponse& answer : answers) {
    if (answer.credit_window_bytes() > 0) {
      chunk_bytes_ = std::min(chunk_bytes_, answer.credit_window_bytes());
    }
  }
  const auto to_machine = [&](const WireBlock& block) {
    TrainerBlock machine;
    machine.matrix = block.shard;
    machine.server = answers[0].owners(block.shard);
    machine.elements = block.elements();
    machine.element_bytes = static_cast<int32_t>(DTypeSize(block.dtype));
    machine.parts = block.parts;
    machine.piece_elements = chunk_bytes_ / machine.element_bytes;
    return machine;
  };
  std::vector<TrainerBlock> push;
  std::vector<TrainerBlock> pull;
  for (const WireBlock& block : layout_.wire_push()) push.push_back(to_machine(block));
  for (const WireBlock& block : layout_.wire_pull()) pull.push_back(to_machine(block));
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
    links_wanted_ = false;
    wake_.NotifyAll();
  }
  if (thread_.joinable()) thread_.join();
  {
    MutexLock lock(&mutex_);
    servers_.clear();  // connections wait for their calls
  }
  // Streams are gone, so what is left ends with the sockets.
  while (!borrowed_->WaitReturned(Now() + 1000000)) {
  }
}

void Session::Cancel() {
  const Servers servers = AllServers();
  {
    MutexLock lock(&mutex_);
    cancelled_ = true;
    changed_.NotifyAll();
  }
  for (ServerConnection* connection : servers.connections) connection->CancelCalls();
}

absl::Status Session::Close() {
  Caller caller(this);
  v1::CloseRunRequest request;
  {
    MutexLock lock(&mutex_);
    if (closed_) return absl::OkStatus();
    if (cancelled_) return Cancelled();
    closed_ = true;
    *request.mutable_sender() = sender_;
    request.set_applied_step(trainer_->applied());
    changed_.NotifyAll();
  }
  absl::Status first;
  for (const absl::Status& status :
       CallEach(AllServers(), "CloseRun", request.SerializeAsString(), kCloseMicros)) {
    // A server that let the run go has nothing left to close.
    if (first.ok() && !absl::IsNotFound(status)) first = status;
  }
  if (trace_) first.Update(trace_->trace()->Flush());
  MutexLock lock(&mutex_);
  links_wanted_ = false;
  wake_.NotifyAll();
  return first;
}

}  // namespace stiefel
