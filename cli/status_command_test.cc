#include "cli/status_command.h"

#include <grpcpp/grpcpp.h>

#include <memory>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "nlohmann/json.hpp"
#include "stiefel/v1/status.grpc.pb.h"

namespace stiefel {
namespace {

using ::testing::HasSubstr;

// Answers with its name; its stream has two reports and then ends.
class FakeStatus final : public v1::Status::Service {
 public:
  explicit FakeStatus(std::string name) : name_(std::move(name)) {}

 private:
  grpc::Status GetStatus(grpc::ServerContext*, const v1::GetStatusRequest* request,
                         v1::ServerStatus* status) override {
    status->set_address(name_);
    if (request->state_hash()) status->add_runs()->set_state_hash(0xABCD);
    return grpc::Status::OK;
  }
  grpc::Status WatchStatus(grpc::ServerContext*, const v1::WatchStatusRequest*,
                           grpc::ServerWriter<v1::ServerStatus>* writer) override {
    v1::ServerStatus status;
    status.set_address(name_);
    writer->Write(status);
    status.set_draining(true);
    writer->Write(status);
    return grpc::Status::OK;
  }

  const std::string name_;
};

// A process-local server on a port of the system's choice.
class Server {
 public:
  explicit Server(std::string name) : service_(std::move(name)) {
    grpc::ServerBuilder builder;
    builder.AddListeningPort("127.0.0.1:0", grpc::InsecureServerCredentials(), &port_);
    builder.RegisterService(&service_);
    server_ = builder.BuildAndStart();
  }
  std::string address() const { return absl::StrCat("127.0.0.1:", port_); }

 private:
  FakeStatus service_;
  int port_ = 0;
  std::unique_ptr<grpc::Server> server_;
};

struct Result {
  absl::Status status;
  std::vector<std::string> reports;
};

Result Reports(const StatusCommandOptions& options) {
  Result result;
  result.status = RunStatusCommand(
      options, [&](const std::string& report) { result.reports.push_back(report); });
  return result;
}

TEST(StatusCommandTest, ReportsAllServersInTheirOrder) {
  const Server a("a"), b("b");
  StatusCommandOptions options;
  options.servers = {b.address(), a.address()};
  options.json = true;
  options.state_hash = true;
  const Result result = Reports(options);
  ASSERT_TRUE(result.status.ok()) << result.status;
  ASSERT_EQ(result.reports.size(), 1u);
  const auto json = nlohmann::json::parse(result.reports[0]);
  EXPECT_EQ(json["servers"][0]["address"], "b");
  EXPECT_EQ(json["servers"][1]["address"], "a");
  EXPECT_EQ(json["servers"][1]["runs"][0]["state_hash"], "000000000000abcd");
}

TEST(StatusCommandTest, UnreachableServerIsNamedAndTheOthersAreShown) {
  const Server a("a");
  StatusCommandOptions options;
  options.servers = {"127.0.0.1:1", a.address(), "no-such-host.invalid:2"};
  const Result result = Reports(options);
  EXPECT_EQ(result.status.code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(result.status.ToString(), HasSubstr("server 127.0.0.1:1 gives no status"));
  EXPECT_THAT(result.status.ToString(), HasSubstr("no-such-host.invalid:2"));
  ASSERT_EQ(result.reports.size(), 1u);
  EXPECT_THAT(result.reports[0], HasSubstr("server a"));
}

// Reports may be merged where changes come fast, but the last state is always shown.
TEST(StatusCommandTest, WatchShowsTheLastChangeAndEndsWithTheStream) {
  const Server a("a");
  StatusCommandOptions options;
  options.servers = {a.address()};
  options.watch = true;
  options.json = true;
  const Result result = Reports(options);
  EXPECT_TRUE(result.status.ok()) << result.status;
  ASSERT_GE(result.reports.size(), 1u);
  EXPECT_EQ(nlohmann::json::parse(result.reports.back())["servers"][0]["draining"], true);
}

TEST(StatusCommandTest, WatchOfAnUnreachableServerIsAnError) {
  const Server a("a");
  StatusCommandOptions options;
  options.servers = {a.address(), "127.0.0.1:1"};
  options.watch = true;
  const Result result = Reports(options);
  EXPECT_EQ(result.status.code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(result.status.ToString(), HasSubstr("127.0.0.1:1"));
}

TEST(StatusCommandTest, OptionsThatMakeNoSenseAreRefused) {
  StatusCommandOptions none;
  EXPECT_EQ(Reports(none).status.code(), absl::StatusCode::kInvalidArgument);
  StatusCommandOptions both;
  both.servers = {"127.0.0.1:1"};
  both.watch = both.state_hash = true;
  EXPECT_EQ(Reports(both).status.code(), absl::StatusCode::kInvalidArgument);
  StatusCommandOptions never;
  never.servers = {"127.0.0.1:1"};
  never.timeout_seconds = 0;
  EXPECT_EQ(Reports(never).status.code(), absl::StatusCode::kInvalidArgument);
}

TEST(StatusCommandTest, AddressesComeAsListOrOneByOne) {
  const Server a("a"), b("b");
  for (const std::string& line : {absl::StrCat("status --servers=", a.address(), ",", b.address()),
                                  absl::StrCat("status ", a.address(), " ", b.address())}) {
    CLI::App app;
    absl::Status result;
    AddStatusCommand(&app, &result);
    testing::internal::CaptureStdout();
    app.parse(line);
    const std::string out = testing::internal::GetCapturedStdout();
    EXPECT_TRUE(result.ok()) << result;
    EXPECT_THAT(out, HasSubstr("server a"));
    EXPECT_THAT(out, HasSubstr("server b"));
  }
}

}  // namespace
}  // namespace stiefel
