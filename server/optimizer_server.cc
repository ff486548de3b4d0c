#include "server/optimizer_server.h"

#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <fstream>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/status.h"
#include "kernels/cpu/cpu_backend.h"
#include "proto/protocol.h"
#include "spdlog/spdlog.h"

namespace stiefel {
namespace {

constexpr int64_t kLoadMicros = 1000000;
constexpr int kPeerThreads = 2;  // they add and copy at memory speed

// Pages of this process that are in memory, in bytes; 0 where the system does not say.
int64_t ResidentBytes() {
  std::ifstream statm("/proc/self/statm");
  int64_t total = 0, resident = 0;
  statm >> total >> resident;
  return resident * sysconf(_SC_PAGESIZE);
}

absl::Status Resolve(ServerOptions* options) {
  if (options->threads == 0)
    options->threads = std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
  if (options->threads < 1 || options->threads > 1024)
    return absl::InvalidArgumentError(
        absl::StrCat("threads = ", options->threads, " is not within [1, 1024]"));
  if (options->matrices_in_flight == 0) options->matrices_in_flight = std::min(options->threads, 8);
  if (options->matrices_in_flight < 1 || options->matrices_in_flight > 1024)
    return absl::InvalidArgumentError(absl::StrCat(
        "matrices in flight = ", options->matrices_in_flight, " is not within [1, 1024]"));
  if (options->memory_limit_bytes < 0)
    return absl::InvalidArgumentError(
        absl::StrCat("memory limit of ", options->memory_limit_bytes, " bytes"));
  if (options->credit_window_bytes < kMaxMessageBytes)
    return absl::InvalidArgumentError(
        absl::StrCat("credit window of ", options->credit_window_bytes,
                     " bytes is below one message, ", kMaxMessageBytes));
  if (options->max_streams < 1 || options->max_streams_per_rank < 1)
    return absl::InvalidArgumentError(absl::StrCat("stream limits ", options->max_streams, " and ",
                                                   options->max_streams_per_rank,
                                                   " must be at least 1"));
  if (!(options->speed > 0) || !std::isfinite(options->speed))
    return absl::InvalidArgumentError(
        absl::StrCat("speed ", options->speed, " is not positive and finite"));
  if (!(options->grace_seconds >= 0) || !std::isfinite(options->grace_seconds))
    return absl::InvalidArgumentError(
        absl::StrCat("grace of ", options->grace_seconds, " s is not finite and >= 0"));
  return absl::OkStatus();
}

std::string Describe(const v1::OpenRunRequest& opened) {
  return absl::StrCat("run \"", opened.name(), "\" (uid ", opened.run_uid(), ", from step ",
                      opened.start_step(), ")");
}

}  // namespace

absl::StatusOr<std::unique_ptr<OptimizerServer>> OptimizerServer::Create(ServerOptions options,
                                                                         const Clock* clock,
                                                                         PeerTransport* peers) {
  STIEFEL_RETURN_IF_ERROR(Resolve(&options));
  STIEFEL_ASSIGN_OR_RETURN(std::unique_ptr<Backend> backend, CreateCpuBackend(options.threads));
  if (options.memory_limit_bytes == 0)
    options.memory_limit_bytes = backend->Info().memory_bytes / 5 * 4;
  std::unique_ptr<OptimizerServer> server(new OptimizerServer(std::move(options), clock, peers));
  if (const std::string& file = server->options_.trace_file; !file.empty()) {
    STIEFEL_ASSIGN_OR_RETURN(server->trace_, Trace::Create(file, "server"));
  }
  server->backend_ = std::move(backend);
  server->workers_ =
      std::make_unique<PeerWorkers>(std::min(server->options_.threads, kPeerThreads));
  STIEFEL_ASSIGN_OR_RETURN(
      server->engine_,
      Engine::Create(server->backend_, server->options_.matrices_in_flight, clock));
  return server;
}

OptimizerServer::~OptimizerServer() {
  Disconnect(absl::UnavailableError("the server stops"));
  std::shared_ptr<RunHost> run;
  {
    MutexLock lock(&mutex_);
    run.swap(run_);
  }
  if (run != nullptr) run->Stop();
  // Jobs that run share the run, and so do collectives; none may be left when it goes.
  engine_.reset();
  workers_.reset();
}

void OptimizerServer::set_address(std::string address) {
  if (trace_ != nullptr) trace_->set_process(absl::StrCat("server ", address));
  MutexLock lock(&mutex_);
  address_ = std::move(address);
}

std::shared_ptr<RunHost> OptimizerServer::LiveRun() const {
  std::shared_ptr<RunHost> run;
  {
    MutexLock lock(&mutex_);
    run = run_;
  }
  return run != nullptr && !run->ended() ? run : nullptr;
}

v1::ServerInfo OptimizerServer::Info() const {
  v1::ServerInfo info;
  info.set_software_version(kSoftwareVersion);
  info.set_protocol_version(kProtocolVersion);
  const DeviceInfo& device = backend_->Info();
  info.set_device(absl::StrCat(device.kind, ": ", device.name, ", ", device.instruction_set));
  info.set_threads(options_.threads);
  info.set_memory_limit_bytes(options_.memory_limit_bytes);
  info.set_speed(options_.speed);
  // What a run must fit with: where the server chooses, lazy is good enough.
  info.set_staging(std::string(StagingName(options_.staging.value_or(Staging::kLazy))));
  info.set_credit_window_bytes(options_.credit_window_bytes);
  {
    MutexLock lock(&mutex_);
    info.set_draining(draining_);
  }
  if (const std::shared_ptr<RunHost> run = LiveRun()) run->FillHeldRun(info.add_runs());
  return info;
}

absl::StatusOr<v1::OpenRunResponse> OptimizerServer::OpenRun(const v1::OpenRunRequest& request) {
  MutexLock lock(&mutex_);
  if (draining_) return absl::UnavailableError("this server is draining: it opens no run");
  v1::OpenRunResponse response;
  if (run_ != nullptr && !run_->ended()) {
    const std::shared_ptr<const RunSpec> spec = run_->spec();
    const v1::OpenRunRequest& held = spec->opened();
    if (held.SerializeAsString() == request.SerializeAsString()) {
      response.set_already_open(true);
      return response;
    }
  }
  if (run_ != nullptr && run_->MayBeReplacedBy(request)) {
    run_->Disconnect(absl::AbortedError(absl::StrCat("replaced by ", Describe(request))));
    Forget();
  }
  if (run_ != nullptr && !run_->ended()) {
    const std::shared_ptr<const RunSpec> spec = run_->spec();
    const v1::OpenRunRequest& held = spec->opened();
    const double seconds = run_->ReleaseSeconds();
    const bool same = held.run_uid() == request.run_uid();
    return absl::FailedPreconditionError(absl::StrCat(
        "this server holds ", Describe(held), ", not ", Describe(request),
        same ? " with the same fields; a new leader takes a run over with TakeOver" : "", "; ",
        seconds > 0 ? absl::StrCat("without trainers it is released in ", seconds, " s")
                    : std::string("its trainers live")));
  }
  Forget();
  STIEFEL_ASSIGN_OR_RETURN(run_, RunHost::Open({options_, backend_, engine_.get(), clock_,
                                                trace_.get(), peers_, workers_.get()},
                                               request));
  spdlog::info("opened {}: {} of {} matrices here, {} trainers", Describe(request),
               run_->spec()->owned().size(), request.parameters_size(), request.world_size());
  return response;
}

absl::Status OptimizerServer::NotOpen(const std::string& asked) const {
  const bool held = run_ != nullptr && !run_->ended();
  return absl::NotFoundError(
      absl::StrCat(asked, " is not open on this server, which holds ",
                   held ? Describe(run_->spec()->opened()) : std::string("no run")));
}

absl::StatusOr<std::shared_ptr<RunHost>> OptimizerServer::FindRun(const std::string& name) const {
  MutexLock lock(&mutex_);
  if (run_ != nullptr && !run_->ended() && run_->spec()->opened().name() == name) return run_;
  return NotOpen(absl::StrCat("run \"", name, "\""));
}

absl::StatusOr<std::shared_ptr<RunHost>> OptimizerServer::FindRun(uint64_t run_uid) const {
  MutexLock lock(&mutex_);
  if (run_ != nullptr && !run_->ended() && run_->spec()->opened().run_uid() == run_uid) return run_;
  return NotOpen(absl::StrCat("run with uid ", run_uid));
}

absl::StatusOr<v1::CloseRunResponse> OptimizerServer::CloseRun(const v1::CloseRunRequest& request) {
  absl::StatusOr<std::shared_ptr<RunHost>> run = FindRun(request.sender().run_uid());
  if (run.ok()) return (*run)->CloseRun(request);
  MutexLock lock(&mutex_);
  const bool was_last =
      (run_ != nullptr && run_->spec()->opened().run_uid() == request.sender().run_uid()) ||
      (last_ended_uid_ != 0 && last_ended_uid_ == request.sender().run_uid());
  if (!was_last) return run.status();
  v1::CloseRunResponse response;
  response.set_run_ended(true);
  return response;
}

v1::ServerStatus OptimizerServer::StatusNow() const {
  v1::ServerStatus status;
  status.set_software_version(kSoftwareVersion);
  const DeviceInfo& device = backend_->Info();
  status.set_device(absl::StrCat(device.kind, ": ", device.name, ", ", device.instruction_set));
  status.set_threads(options_.threads);
  status.set_uptime_seconds(static_cast<double>(clock_->NowMicros() - started_at_) / 1e6);
  status.set_resident_bytes(ResidentBytes());
  status.set_memory_limit_bytes(options_.memory_limit_bytes);
  status.set_engine_queue(engine_->pending());
  {
    MutexLock lock(&mutex_);
    status.set_address(address_);
    status.set_draining(draining_);
    status.set_load(load_);
  }
  if (const std::shared_ptr<RunHost> run = LiveRun()) {
    run->FillStatus(status.add_runs());
    status.set_declared_bytes(run->declared_bytes());
  }
  return status;
}

void OptimizerServer::GetStatus(const v1::GetStatusRequest& request,
                                std::function<void(v1::ServerStatus)> done) const {
  const std::shared_ptr<RunHost> run = LiveRun();
  if (!request.state_hash() || run == nullptr) return done(StatusNow());
  run->HashState([this, done = std::move(done)](const std::map<int32_t, uint64_t>& hashes) {
    v1::ServerStatus status = StatusNow();
    if (status.runs_size() == 0) return done(std::move(status));
    // A sum, so that it does not matter which server holds which matrix.
    uint64_t sum = 0;
    for (const auto& [matrix, hash] : hashes) sum += hash;
    status.mutable_runs(0)->set_state_hash(sum);
    for (v1::MatrixStatus& matrix : *status.mutable_runs(0)->mutable_matrices()) {
      const auto hash = hashes.find(matrix.index());
      if (hash != hashes.end()) matrix.set_state_hash(hash->second);
    }
    done(std::move(status));
  });
}

void OptimizerServer::Tick() {
  std::shared_ptr<RunHost> run;
  {
    MutexLock lock(&mutex_);
    run = run_;
    const int64_t now = clock_->NowMicros();
    if (now - load_at_ >= kLoadMicros) {
      const int64_t busy = engine_->busy_micros();
      load_ = static_cast<double>(busy - load_busy_) /
              static_cast<double>((now - load_at_) * engine_->workers());
      load_at_ = now;
      load_busy_ = busy;
    }
  }
  if (trace_ != nullptr) {
    const absl::Status written = trace_->FlushIfDue();
    if (!written.ok()) spdlog::warn("the trace is not written: {}", std::string(written.message()));
  }
  if (run == nullptr) return;
  run->Tick();
  if (!run->ended()) return;
  MutexLock lock(&mutex_);
  if (run_ == run) Forget();
}

// The run is over: what it held in the engine is free for the next.
void OptimizerServer::Forget() {
  if (run_ == nullptr) return;
  last_ended_uid_ = run_->spec()->opened().run_uid();
  run_.reset();
  engine_->SetWorkspaces({});
}

bool OptimizerServer::AskToLeave() {
  const std::shared_ptr<RunHost> run = LiveRun();
  if (run == nullptr || !run->AskToLeave()) return false;
  MutexLock lock(&mutex_);
  draining_ = true;
  return true;
}

bool OptimizerServer::Leaving() const {
  const std::shared_ptr<RunHost> run = LiveRun();
  return run != nullptr && run->Leaving();
}

bool OptimizerServer::Away() const {
  const std::shared_ptr<RunHost> run = LiveRun();
  return run != nullptr && run->Away();
}

bool OptimizerServer::Left() const {
  const std::shared_ptr<RunHost> run = LiveRun();
  return run == nullptr || run->Left();
}

void OptimizerServer::Drain() {
  std::shared_ptr<RunHost> run;
  {
    MutexLock lock(&mutex_);
    draining_ = true;
    run = run_;
  }
  if (run != nullptr) run->Drain();
}

bool OptimizerServer::Drained() const {
  const std::shared_ptr<RunHost> run = LiveRun();
  return run == nullptr || run->Drained();
}

void OptimizerServer::Disconnect(const absl::Status& status) {
  std::shared_ptr<RunHost> run;
  {
    MutexLock lock(&mutex_);
    run = run_;
  }
  if (run != nullptr) run->Disconnect(status);
}

}  // namespace stiefel
