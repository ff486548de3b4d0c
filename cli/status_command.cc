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
#include "common/status.h"
#include "stiefel/v1/status.grpc.pb.h"

namespace stiefel {
namespace {

absl::Status Check(const StatusCommandOptions& options) {
  if (options.servers.empty()) {
    return absl::InvalidArgumentError("no server: name one or more as host:port");
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

  // Waits for news; the newest status of every server once all have sent one, in their order.
  // UNAVAILABLE if a stream broke or a server sent nothing in time; nothing if a server ended its stream.
  absl::StatusOr<std::optional<std::vector<v1::ServerStatus>>> Next();

 private:
  struct Stream {
    grpc::ClientContext context;
    std::optional<v1::ServerStatus> newest;  // guarded by mutex_
    std::thread thread;
  };
  void Follow(size_t index);

  const StatusCommandOptions options_;
  const int64_t first_deadline_micros_;
  std::vector<std::unique_ptr<Stream>> streams_;  // constant after construction
  Mutex mutex_;
  CondVar changed_;
  size_t answered_ ABSL_GUARDED_BY(mutex_) = 0;
  bool news_ ABSL_GUARDED_BY(mutex_) = false;
  bool ended_ ABSL_GUARDED_BY(mutex_) = false;
  absl::Status failure_ ABSL_GUARDED_BY(mutex_);
};
