#include "client/session.h"

#include <algorithm>
#include <cmath>
#include <random>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "client/open_run.h"
#include "common/clock.h"
#include "common/errors.h"
#include "common/status.h"

namespace stiefel {
namespace {

// How often Done looks whether the trainer was cancelled.
constexpr int64_t kLookMicros = 50000;
constexpr int64_t kCloseMicros = 5000000;

int64_t Now() { return RealClock().NowMicros(); }

uint64_t RandomId() {
  std::random_device device;
  uint64_t id = 0;
  while (id == 0) id = (uint64_t{device()} << 32) | device();
  return id;
}

absl::Status Cancelled() { return absl::CancelledError("the trainer was cancelled"); }

absl::StatusOr<v1::BeginStep> ToBeginStep(const Layout& layout, const StepOptions& options) {
  v1::BeginStep begin;
  if (!(options.weight >= 0) || !std::isfinite(options.weight)) {
    return absl::InvalidArgumentError(
        absl::StrCat("weight ", options.weight, " is not finite and >= 0"));
  }
  begin.set_weight(options.weight);
  v1::CommonFields& common = *begin.mutable_common();
  for (const auto& [group, fields] : options.groups) {
    const auto& parameters = layout.parameters();
    if (std::none_of(parameters.begin(), parameters.end(),
                     [g = group](const ParameterSpec& p) { return p.group == g; })) {
      return absl::InvalidArgumentError(absl::StrCat("no parameter is in group ", group));
    }
    v1::CommonFields::Group& wire = (*common.mutable_groups())[group];
    if (fields.lr) wire.set_lr(*fields.lr);
    if (fields.weight_decay) wire.set_weight_decay(*fields.weight_decay);
    if (fields.beta) wire.set_beta(*fields.beta);
    if (fields.kind) {
      wire.set_kind(*fields.kind == StepKind::kRefresh ? v1::REFRESH : v1::OFF_REFRESH);
    }
  }
  if (options.max_grad_norm) common.set_max_grad_norm(*options.max_grad_norm);
  if (options.grad_scale) common.set_grad_scale(*options.grad_scale);
  if (options.commit == CommitMode::kPerMatrix) common.set_commit(v1::PER_MATRIX);
  return begin;
}

}  // namespace

// ---------------------------------------------------------------- connecting

Session::Session(Layout layout, Transport* transport)
    : layout_(std::move(layout)), transport_(transport) {
  const TrainerOptions& options = layout_.options();
  size_t sources = 0;
  for (const LayoutBlock& block : layout_.push()) {
    first_source_.push_back(sources);
    sources += static_cast<size_t>(block.parts);
  }
  MutexLock lock(&mutex_);
  sources_.resize(sources);
  pulled_.resize(layout_.pull().size());
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
    STIEFEL_RETURN_IF_ERROR(
        OpenRun(servers, layout_, survey, RandomId(), incarnation, connect_deadline));
    MutexLock lock(&mutex_);
    leader_ = LeaderMachine::Opened(count, layout_.options().applied_step.value_or(0) + 1);
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
  const auto to_machine = [&](const LayoutBlock& block) {
    TrainerBlock machine;
    machine.matrix = block.parameter;
    machine.server = answers[0].owners(block.parameter);
    machine.elements = block.elements();
    machine.element_bytes = static_cast<int32_t>(DTypeSize(block.dtype));
    machine.parts = block.parts;
    machine.piece_elements = chunk_bytes_ / machine.element_bytes;
    return machine;
  };
  std::vector<TrainerBlock> push;
  std::vector<TrainerBlock> pull;
  for (const LayoutBlock& block : layout_.push()) push.push_back(to_machine(block));
  for (const LayoutBlock& block : layout_.pull()) pull.push_back(to_machine(block));
  // Memory for updates is written to before the first of them arrives: page faults would cost the
  // first step more than the copying itself.
  std::vector<std::shared_ptr<Buffer>> buffers;
  for (const LayoutBlock& block : layout_.pull()) {
    buffers.push_back(std::make_shared<Buffer>());
    buffers.back()->bytes = std::make_unique<char[]>(static_cast<size_t>(block.bytes()));
  }
  if (!thread_.joinable()) thread_ = std::thread([this] { RunThread(); });
  MutexLock lock(&mutex_);
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
  MutexLock lock(&mutex_);
  links_wanted_ = false;
  wake_.NotifyAll();
  return first;
}

// ---------------------------------------------------------------- a step

absl::Status Session::FinalError() const {
  if (closed_) return absl::FailedPreconditionError("the trainer was closed");
  if (cancelled_) return Cancelled();
  if (!fatal_.ok()) return fatal_;
  return trainer_->fatal();
}

bool Session::weights_needed() const {
  Caller caller(this);
  MutexLock lock(&mutex_);
  return std::any_of(servers_.begin(), servers_.end(),
                     [](const ServerState& server) { return server.weights_needed; });
}

int64_t Session::next_step() const {
  Caller caller(this);
  MutexLock lock(&mutex_);
  return trainer_->target();
}

absl::Status Session::Begin(int64_t step, const StepOptions& options) {
  Caller caller(this);
  STIEFEL_ASSIGN_OR_RETURN(v1::BeginStep begin, ToBeginStep(layout_, options));
  {
    MutexLock lock(&mutex_);
    STIEFEL_RETURN_IF_ERROR(FinalError());
    TrainerSends sends;
    STIEFEL_RETURN_IF_ERROR(trainer_->Begin(step, std::move(begin), &sends));
    step_options_ = options;
    for (Source& source : sources_) source.data = nullptr;
    timings_ = StepTimings();
    begun_at_ = Now();
    awaiting_since_ = 0;
    push_ended_ = false;
    Perform(std::move(sends));
  }
  PumpAll();
  return absl::OkStatus();
}

absl::Status Session::Push(int32_t block, int32_t part, const TensorView* gradient) {
  Caller caller(this);
  if (block < 0 || block >= static_cast<int32_t>(layout_.push().size())) {
    return IndexOutOfRange("push block", block, layout_.push().size());
  }
  const LayoutBlock& spec = layout_.push()[block];
  if (part < 0 || part >= spec.parts) {
    return IndexOutOfRange("part of " + layout_.Describe(spec), part, spec.parts);
  }
  const size_t index = first_source_[block] + static_cast<size_t>(part);
  const char* data = nullptr;
  std::unique_ptr<char[]> staging;
  bool staged = false;
  if (gradient != nullptr) {
    STIEFEL_ASSIGN_OR_RETURN(const Walk2d walk,
                             CheckView(*gradient, spec.rect.rows(), spec.rect.cols(),
                                       "gradient of " + layout_.Describe(spec)));
    staged = !walk.contiguous || walk.type != ToElementType(spec.dtype);
    data = walk.data;
    if (staged) {
      {
        // Taken out, so that a second Push of the same part cannot write under the first one.
        MutexLock lock(&mutex_);
        staging = std::move(sources_[index].staging);
        if (sources_[index].data != nullptr) {
          sources_[index].staging = std::move(staging);
          return absl::FailedPreconditionError(
              absl::StrCat(layout_.Describe(spec), " part ", part, " was pushed before"));
        }
      }
      if (staging == nullptr) staging.reset(new char[static_cast<size_t>(spec.bytes())]);
      CopyAs(walk, spec.dtype, staging.get());
      data = staging.get();
    }
  }
  int32_t server = 0;
  {
    MutexLock lock(&mutex_);
    STIEFEL_RETURN_IF_ERROR(FinalError());
    const absl::Status pushed = trainer_->Push(block, part, gradient == nullptr);
    if (!pushed.ok()) {
      return absl::Status(pushed.code(),
                          absl::StrCat(layout_.Describe(spec), ": ", pushed.message()));
    }
    if (staged) sources_[index].staging = std::move(staging);
    sources_[index].data = data;
    if (staged) timings_.bytes_staged += spec.bytes();
    server = owners_[spec.parameter];
  }
  Pump(server);
  return absl::OkStatus();
}

absl::Status Session::EndPush(double local_sum_squares, bool local_finite) {
  Caller caller(this);
  if (!(local_sum_squares >= 0) || !std::isfinite(local_sum_squares)) {
    return absl::InvalidArgumentError(absl::StrCat(
        "local_sum_squares ", local_sum_squares,
        " is not finite and >= 0; say local_finite = false of a gradient that is not"));
  }
  MutexLock lock(&mutex_);
  STIEFEL_RETURN_IF_ERROR(FinalError());
  v1::EndPush fields;
  fields.set_local_sum_squares(local_sum_squares);
  if (!local_finite) fields.set_local_finite(false);
  TrainerSends sends;
  STIEFEL_RETURN_IF_ERROR(trainer_->EndPush(std::move(fields), &sends));
  push_ended_ = true;
  NotePushed();
  Perform(std::move(sends));
  return absl::OkStatus();
}

absl::Status Session::Done() {
  Caller caller(this);
  int64_t deadline = 0;
  {
    MutexLock lock(&mutex_);
    STIEFEL_RETURN_IF_ERROR(FinalError());
    if (!trainer_->End()) {
      return absl::FailedPreconditionError(
          absl::StrCat("step ", trainer_->target(), " has not ended; Wait for it first"));
    }
    deadline = Now() + step_timeout_;
  }
  // The step is decided, so no more chunks are made of its gradients.
  while (!borrowed_->WaitReturned(std::min(deadline, Now() + kLookMicros))) {
    MutexLock lock(&mutex_);
    STIEFEL_RETURN_IF_ERROR(FinalError());
    if (Now() < deadline) continue;
    return absl::DeadlineExceededError(absl::StrCat(borrowed_->loans(), " chunks of step ",
                                                    trainer_->target(),
                                                    " are still being sent from gradient memory"));
  }
  MutexLock lock(&mutex_);
  TrainerSends sends;
  STIEFEL_RETURN_IF_ERROR(trainer_->Applied(&sends));
  for (Source& source : sources_) source.data = nullptr;
  for (Pulled& pulled : pulled_) {
    pulled.step = 0;
    pulled.absent = pulled.applied = false;
  }
  if (decided_ && decided_->step() <= trainer_->applied()) decided_.reset();
  awaiting_since_ = 0;
  Perform(std::move(sends));
  return absl::OkStatus();
}

StepTimings Session::timings() const {
  Caller caller(this);
  MutexLock lock(&mutex_);
  return timings_;
}

}  // namespace stiefel
