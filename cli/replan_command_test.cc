#include "cli/replan_command.h"

#include <grpcpp/grpcpp.h>

#include <memory>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "stiefel/v1/optimizer.grpc.pb.h"

namespace stiefel {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

// Holds run "r" as the second of two servers, and does whatever is asked.
class FakeOptimizer final : public v1::Optimizer::Service {
 public:
  v1::ReplanRequest asked;
  grpc::Status answer = grpc::Status::OK;
  int server_index = 1;

 private:
  grpc::Status GetServerInfo(grpc::ServerContext*, const v1::GetServerInfoRequest*,
                             v1::ServerInfo* info) override {
    v1::ServerInfo::HeldRun* run = info->add_runs();
    run->set_name("r");
    run->add_servers("a:1");
    run->add_servers("b:2");
    run->set_server_index(server_index);
    return grpc::Status::OK;
  }
  grpc::Status Replan(grpc::ServerContext*, const v1::ReplanRequest* request,
                      v1::ReplanResponse* response) override {
    asked = *request;
    response->mutable_placement()->set_epoch(3);
    response->mutable_placement()->add_servers("a:1");
    response->mutable_placement()->add_owners(0);
    return answer;
  }
};

class ReplanCommandTest : public ::testing::Test {
 protected:
  ReplanCommandTest() {
    grpc::ServerBuilder builder;
    int port = 0;
    builder.AddListeningPort("127.0.0.1:0", grpc::InsecureServerCredentials(), &port);
    builder.RegisterService(&service_);
    server_ = builder.BuildAndStart();
    options_.server = absl::StrCat("127.0.0.1:", port);
  }
  absl::Status Run() {
    return RunReplanCommand(options_, [this](const std::string& text) { report_ += text; });
  }

  FakeOptimizer service_;
  std::unique_ptr<grpc::Server> server_;
  ReplanCommandOptions options_;
  std::string report_;
};

TEST_F(ReplanCommandTest, DrainNamesTheServerAsTheRunDoes) {
  options_.drain_server = true;
  options_.wait_seconds = 7;
  const absl::Status status = Run();
  ASSERT_TRUE(status.ok()) << status;
  EXPECT_EQ(service_.asked.name(), "r");
  EXPECT_THAT(service_.asked.drain(), ElementsAre("b:2"));
  EXPECT_EQ(service_.asked.wait_seconds(), 7);
  EXPECT_EQ(report_, "run \"r\": placement 3\n  a:1  1 shard\n");
}

TEST_F(ReplanCommandTest, ReplanPassesOnWhatIsAsked) {
  options_.run = "r";
  options_.add = {"c:3"};
  options_.drain = {"a:1"};
  ASSERT_TRUE(Run().ok());
  EXPECT_THAT(service_.asked.add(), ElementsAre("c:3"));
  EXPECT_THAT(service_.asked.drain(), ElementsAre("a:1"));
}

TEST_F(ReplanCommandTest, RefusalsSayWhy) {
  EXPECT_THAT(std::string(Run().message()), HasSubstr("nothing to do"));
  options_.drain_server = true;
  options_.run = "other";
  EXPECT_EQ(Run().code(), absl::StatusCode::kNotFound);
  options_.run.clear();
  service_.server_index = -1;
  EXPECT_THAT(std::string(Run().message()), HasSubstr("a:1, b:2"));
  service_.server_index = 1;
  service_.answer = grpc::Status(grpc::StatusCode::FAILED_PRECONDITION, "nobody leads");
  const absl::Status refused = Run();
  EXPECT_EQ(refused.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(refused.message()), HasSubstr("nobody leads"));
  EXPECT_EQ(report_, "");
  options_.wait_seconds = -1;
  EXPECT_EQ(Run().code(), absl::StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace stiefel
