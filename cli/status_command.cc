#include "cli/status_command.h"

#include <grpcpp/grpcpp.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <memory>
#include <optional>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "cli/status_report.h"
#include "common/clock.h"
#include "common/mutex.h"
#include "common/server_address.h"
#include "common/status.h"
#include "stiefel/v1/status.grpc.pb.h"

namespace stiefel {
namespace {

absl::Status Check(const StatusCommandOptions& options) {
  if (options.servers.empty()) {
    return absl::InvalidArgumentError("no server: name one or more as host:port");
  }
  for (const std::string& server : options.servers) {
    STIEFEL_RETURN_IF_ERROR(CheckServerAddress(server));
  }
  if (options.watch && options.state_hash) {
    return absl::InvalidArgumentError(
        "--state-hash reads all state and cannot be combined with --watch");
  }
  if (!(options.timeout_seconds > 0) || !(options.interval_seconds > 0)) {
    return absl::InvalidArgumentError(absl::StrCat("timeout ", options.timeout_seconds,
                                                   " s, interval ", options.interval_seconds,
                                                   " s: both must be above 0"));
  }
  return absl::OkStatus();
}

std::unique_ptr<v1::Status::Stub> StubOf(const std::string& server) {
  return v1::Status::NewStub(grpc::CreateChannel(server, grpc::InsecureChannelCredentials()));
}

std::chrono::system_clock::time_point After(double seconds) {
  return std::chrono::system_clock::now() +
         std::chrono::microseconds(static_cast<int64_t>(seconds * 1e6));
}

std::string Describe(const std::string& server, const grpc::Status& status) {
  return absl::StrCat("server ", server, " gives no status: ", status.error_message(), " (code ",
                      static_cast<int>(status.error_code()), ")");
}

std::string Render(const StatusCommandOptions& options,
                   const std::vector<v1::ServerStatus>& statuses) {
  if (!options.json) return StatusText(statuses);
  return StatusJson(statuses).dump(options.watch ? -1 : 2) + "\n";
}

absl::Status ReportOnce(const StatusCommandOptions& options,
                        const std::function<void(const std::string&)>& write) {
  std::vector<v1::ServerStatus> statuses;
  std::string failures;
  v1::GetStatusRequest request;
  request.set_state_hash(options.state_hash);
  for (const std::string& server : options.servers) {
    grpc::ClientContext context;
    context.set_deadline(After(options.timeout_seconds));
    v1::ServerStatus answer;
    const grpc::Status status = StubOf(server)->GetStatus(&context, request, &answer);
    if (status.ok()) {
      statuses.push_back(std::move(answer));
    } else {
      absl::StrAppend(&failures, failures.empty() ? "" : "; ", Describe(server, status));
    }
  }
  if (!statuses.empty()) write(Render(options, statuses));
  return failures.empty() ? absl::OkStatus() : absl::UnavailableError(failures);
}

// Follows the status streams of all servers, one thread each, and keeps the newest of each.
class Watcher {
 public:
  explicit Watcher(const StatusCommandOptions& options);
  // Ends the streams and waits for their threads.
  ~Watcher();

  // Waits for news; then the newest status of every server, in their order, once all have sent one.
  // Nothing if then a server ends its stream. UNAVAILABLE names a server whose stream broke, or
  // those that sent nothing in time.
  absl::StatusOr<std::optional<std::vector<v1::ServerStatus>>> Next();

 private:
  void Follow(size_t index);
  absl::Status SilentServers() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const StatusCommandOptions options_;
  const int64_t first_deadline_micros_;
  std::vector<std::unique_ptr<grpc::ClientContext>> contexts_;  // constant after construction
  std::vector<std::thread> threads_;                            // constant after construction
  Mutex mutex_;
  CondVar changed_;
  std::vector<std::optional<v1::ServerStatus>> newest_ ABSL_GUARDED_BY(mutex_);  // by server
  size_t answered_ ABSL_GUARDED_BY(mutex_) = 0;
  bool news_ ABSL_GUARDED_BY(mutex_) = false;
  bool ended_ ABSL_GUARDED_BY(mutex_) = false;
  absl::Status failure_ ABSL_GUARDED_BY(mutex_);
};

Watcher::Watcher(const StatusCommandOptions& options)
    : options_(options),
      first_deadline_micros_(RealClock().NowMicros() +
                             static_cast<int64_t>(options.timeout_seconds * 1e6)),
      newest_(options.servers.size()) {
  for (size_t i = 0; i < options_.servers.size(); ++i) {
    contexts_.push_back(std::make_unique<grpc::ClientContext>());
  }
  for (size_t i = 0; i < options_.servers.size(); ++i) {
    threads_.emplace_back([this, i] { Follow(i); });
  }
}

Watcher::~Watcher() {
  for (const auto& context : contexts_) context->TryCancel();
  for (std::thread& thread : threads_) thread.join();
}

void Watcher::Follow(size_t index) {
  const auto stub = StubOf(options_.servers[index]);
  v1::WatchStatusRequest request;
  request.set_min_interval_seconds(options_.interval_seconds);
  const auto reader = stub->WatchStatus(contexts_[index].get(), request);
  v1::ServerStatus status;
  while (reader->Read(&status)) {
    MutexLock lock(&mutex_);
    if (!newest_[index].has_value()) ++answered_;
    newest_[index] = status;
    news_ = true;
    changed_.NotifyAll();
  }
  const grpc::Status end = reader->Finish();
  MutexLock lock(&mutex_);
  ended_ = true;
  if (!end.ok() && failure_.ok()) {
    failure_ = absl::UnavailableError(Describe(options_.servers[index], end));
  }
  changed_.NotifyAll();
}

absl::Status Watcher::SilentServers() const {
  std::string names;
  for (size_t i = 0; i < newest_.size(); ++i) {
    if (newest_[i].has_value()) continue;
    absl::StrAppend(&names, names.empty() ? "" : ", ", options_.servers[i]);
  }
  return absl::UnavailableError(
      absl::StrCat("no status from ", names, " within ", options_.timeout_seconds, " s"));
}

absl::StatusOr<std::optional<std::vector<v1::ServerStatus>>> Watcher::Next() {
  MutexLock lock(&mutex_);
  for (;;) {
    STIEFEL_RETURN_IF_ERROR(failure_);
    if (news_ && answered_ == newest_.size()) break;
    // A stream that ended says nothing of the servers that have not answered yet.
    if (ended_ && answered_ == newest_.size()) return std::nullopt;
    if (answered_ == newest_.size()) {
      changed_.Wait(&mutex_);
    } else if (!changed_.WaitUntilMicros(&mutex_, first_deadline_micros_)) {
      return SilentServers();
    }
  }
  news_ = false;
  std::vector<v1::ServerStatus> statuses;
  for (const auto& status : newest_) statuses.push_back(*status);
  return statuses;
}

absl::Status Watch(const StatusCommandOptions& options,
                   const std::function<void(const std::string&)>& write) {
  Watcher watcher(options);
  for (;;) {
    STIEFEL_ASSIGN_OR_RETURN(const auto statuses, watcher.Next());
    if (!statuses.has_value()) return absl::OkStatus();
    write(Render(options, *statuses));
  }
}

// Writes a report; on a terminal a watched one replaces the one before.
void Print(const StatusCommandOptions& options, const std::string& report) {
  if (options.watch && !options.json) {
    std::fputs(isatty(STDOUT_FILENO) ? "\x1b[H\x1b[2J" : "\n", stdout);
  }
  std::fputs(report.c_str(), stdout);
  std::fflush(stdout);
}

}  // namespace

absl::Status RunStatusCommand(const StatusCommandOptions& options,
                              const std::function<void(const std::string&)>& write) {
  STIEFEL_RETURN_IF_ERROR(Check(options));
  return options.watch ? Watch(options, write) : ReportOnce(options, write);
}

void AddStatusCommand(CLI::App* app, absl::Status* result) {
  CLI::App* command = app->add_subcommand("status", "what servers hold, do and wait for");
  auto options = std::make_shared<StatusCommandOptions>();
  command->add_option("address,--servers", options->servers, "host:port of the servers")
      ->delimiter(',');
  command->add_flag("--watch", options->watch, "again after every change");
  command->add_flag("--json", options->json,
                    "one JSON object instead of tables; with --watch one a line");
  command->add_flag("--state-hash", options->state_hash, "also hash all optimizer state");
  command->add_option("--timeout", options->timeout_seconds, "seconds for a server to answer")
      ->capture_default_str();
  command->add_option("--interval", options->interval_seconds, "seconds between watched reports")
      ->capture_default_str();
  command->callback([options, result] {
    *result =
        RunStatusCommand(*options, [&](const std::string& report) { Print(*options, report); });
  });
}

}  // namespace stiefel
