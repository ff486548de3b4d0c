#include "cli/replan_command.h"

#include <grpcpp/grpcpp.h>

#include <chrono>
#include <cmath>
#include <cstdio>
#include <map>
#include <memory>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "common/status.h"
#include "stiefel/v1/optimizer.grpc.pb.h"

namespace stiefel {
namespace {

constexpr double kAnswerSeconds = 5;

absl::Status Check(const ReplanCommandOptions& options) {
  if (options.server.empty())
    return absl::InvalidArgumentError("no server: name one of the run's as host:port");
  if (options.add.empty() && options.drain.empty() && !options.drain_server)
    return absl::InvalidArgumentError("nothing to do: give --add or --drain");
  if (!(options.wait_seconds >= 0) || !(options.wait_seconds <= 3600)) {
    return absl::InvalidArgumentError(
        absl::StrCat("a wait of ", options.wait_seconds, " s is not within [0, 3600]"));
  }
  return absl::OkStatus();
}

absl::Status ToStatus(const std::string& server, const grpc::Status& status) {
  return absl::Status(static_cast<absl::StatusCode>(status.error_code()),
                      absl::StrCat("server ", server, ": ", status.error_message()));
}

void SetDeadline(grpc::ClientContext* context, double seconds) {
  context->set_deadline(std::chrono::system_clock::now() +
                        std::chrono::microseconds(std::llround(seconds * 1e6)));
}

// The run on that server.
absl::StatusOr<v1::ServerInfo::HeldRun> FindRun(const ReplanCommandOptions& options,
                                                v1::Optimizer::Stub* stub) {
  grpc::ClientContext context;
  SetDeadline(&context, kAnswerSeconds);
  v1::ServerInfo info;
  const grpc::Status status = stub->GetServerInfo(&context, v1::GetServerInfoRequest(), &info);
  if (!status.ok()) return ToStatus(options.server, status);
  for (const v1::ServerInfo::HeldRun& run : info.runs()) {
    if (options.run.empty() || run.name() == options.run) return run;
  }
  return absl::NotFoundError(
      absl::StrCat("server ", options.server, " holds ",
                   options.run.empty() ? "no run" : absl::StrCat("no run \"", options.run, "\"")));
}

std::string Describe(const v1::Placement& placement) {
  std::map<int32_t, int64_t> owned;
  for (const int32_t owner : placement.owners()) ++owned[owner];
  std::string text = absl::StrCat("placement ", placement.epoch(), "\n");
  for (int32_t s = 0; s < placement.servers_size(); ++s) {
    const int64_t count = owned[s];
    absl::StrAppend(&text, "  ", placement.servers(s), "  ", count,
                    count == 1 ? " shard\n" : " shards\n");
  }
  return text;
}

}  // namespace

absl::Status RunReplanCommand(const ReplanCommandOptions& options,
                              const std::function<void(const std::string&)>& write) {
  STIEFEL_RETURN_IF_ERROR(Check(options));
  const auto stub = v1::Optimizer::NewStub(
      grpc::CreateChannel(options.server, grpc::InsecureChannelCredentials()));
  STIEFEL_ASSIGN_OR_RETURN(const v1::ServerInfo::HeldRun run, FindRun(options, stub.get()));
  v1::ReplanRequest request;
  request.set_name(run.name());
  request.set_wait_seconds(options.wait_seconds);
  for (const std::string& server : options.add) request.add_add(server);
  for (const std::string& server : options.drain) request.add_drain(server);
  if (options.drain_server) {
    if (run.server_index() < 0 || run.server_index() >= run.servers_size()) {
      return absl::FailedPreconditionError(
          absl::StrCat("server ", options.server, " has no part in run \"", run.name(),
                       "\" any more; it is on ", absl::StrJoin(run.servers(), ", ")));
    }
    request.add_drain(run.servers(run.server_index()));
  }
  grpc::ClientContext context;
  SetDeadline(&context, options.wait_seconds + kAnswerSeconds);
  v1::ReplanResponse response;
  const grpc::Status status = stub->Replan(&context, request, &response);
  if (!status.ok()) return ToStatus(options.server, status);
  write(absl::StrCat("run \"", run.name(), "\": ", Describe(response.placement())));
  return absl::OkStatus();
}

void AddReplanCommands(CLI::App* app, absl::Status* result) {
  const auto add = [&](const char* name, const char* what) {
    CLI::App* command = app->add_subcommand(name, what);
    auto options = std::make_shared<ReplanCommandOptions>();
    command->add_option("--run", options->run,
                        "name of the run, where the server may hold another");
    command
        ->add_option("--wait", options->wait_seconds,
                     "seconds to wait for the change; 0: only ask for it")
        ->capture_default_str();
    command->callback([options, result] {
      *result = RunReplanCommand(*options, [](const std::string& report) {
        std::fputs(report.c_str(), stdout);
        std::fflush(stdout);
      });
    });
    return std::make_pair(command, options);
  };
  const auto [replan, replan_options] = add("replan", "adds servers to a run, or empties some");
  replan->add_option("server", replan_options->server, "host:port of any server of the run")
      ->required();
  replan->add_option("--add", replan_options->add, "servers to take in, as trainers reach them")
      ->delimiter(',');
  replan->add_option("--drain", replan_options->drain, "servers to empty, as the run names them")
      ->delimiter(',');
  const auto [drain, drain_options] =
      add("drain", "moves everything off a server of a run, which may then stop");
  drain->add_option("server", drain_options->server, "host:port of the server to empty")
      ->required();
  drain_options->drain_server = true;
}

}  // namespace stiefel
