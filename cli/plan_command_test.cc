#include "cli/plan_command.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>

#include "absl/strings/str_cat.h"

namespace stiefel {
namespace {

using ::testing::HasSubstr;

// As main does: parses the line, runs the command. What it prints goes to *output.
absl::Status RunCommand(const std::vector<std::string>& arguments, std::string* output) {
  CLI::App app;
  absl::Status result;
  AddPlanCommand(&app, &result);
  // CLI11 takes them last first.
  std::vector<std::string> reversed(arguments.rbegin(), arguments.rend());
  testing::internal::CaptureStdout();
  try {
    app.parse(reversed);
  } catch (const CLI::ParseError& error) {
    result = absl::InvalidArgumentError(error.what());
  }
  *output = testing::internal::GetCapturedStdout();
  return result;
}

TEST(PlanCommand, JsonHasThePlanAndItsNumbers) {
  std::string output;
  ASSERT_TRUE(RunCommand({"plan", "plan/models/gpt2_124m.json", "--servers=2", "--preset",
                          "periodic_rowwise_muon", "--set", "period=4", "--set", "lr=0.01",
                          "--staging=lazy", "--trainers=3", "--window=1m", "--shards",
                          "wte.weight=2", "--json"},
                         &output)
                  .ok());
  const nlohmann::json json = nlohmann::json::parse(output);
  EXPECT_EQ(json["model"], "gpt2_124m");
  EXPECT_EQ(json["parameters"], 124439808);
  ASSERT_EQ(json["servers"].size(), 2);
  EXPECT_EQ(json["cycle"].size(), 4);
  ASSERT_EQ(json["matrices"].size(), 148);
  int64_t parameters = 0;
  for (const auto& server : json["servers"]) {
    parameters += server["parameters"].get<int64_t>();
    EXPECT_EQ(server["staged_bytes"], 0);
    EXPECT_EQ(server["stream_bytes"], 3 << 20);
    int64_t sum = 0;
    for (const char* part : {"state_bytes", "staged_bytes", "weights_bytes", "push_bytes",
                             "payload_bytes", "workspace_bytes", "held_bytes", "stream_bytes"}) {
      sum += server[part].get<int64_t>();
    }
    EXPECT_EQ(server["total_bytes"], sum);
  }
  EXPECT_EQ(parameters, 124439808);
  ASSERT_EQ(json["shards"].size(), 149);
  EXPECT_EQ(json["shards"][1]["matrix"], "wte.weight");
  EXPECT_EQ(json["shards"][1]["shard"], 1);
  EXPECT_EQ(json["shards"][1]["rows"], nlohmann::json({25129, 50257}));
  EXPECT_EQ(json["shards"][1]["cols"], nlohmann::json({0, 768}));
  EXPECT_EQ(json["pull_bytes_per_step"], 3.0 * 2 * 124439808);
  EXPECT_THAT(json["matrices"][4]["rule"].get<std::string>(), HasSubstr("lr=0.01"));
}

// The figures that a plan is judged by.
TEST(PlanCommand, RealModelsAreLevelOverServersAndSteps) {
  const std::pair<const char*, const char*> cases[] = {{"llama3_8b", "--servers=8"},
                                                       {"mixtral_like", "--servers=16"}};
  for (const auto& [model, servers] : cases) {
    std::string output;
    const std::string path = absl::StrCat("plan/models/", model, ".json");
    ASSERT_TRUE(RunCommand({"plan", path, servers, "--json"}, &output).ok());
    const nlohmann::json json = nlohmann::json::parse(output);
    printf("%s %s: balance %.4f, refresh by phase %s\n", model, servers,
           json["balance"].get<double>(), json["refresh_balance_by_phase"].dump().c_str());
    EXPECT_LE(json["balance"].get<double>(), 1.05) << model;
    ASSERT_EQ(json["refresh_balance_by_phase"].size(), 3u);
    for (const auto& phase : json["refresh_balance_by_phase"]) {
      EXPECT_LE(phase.get<double>(), 1.05) << model;
      EXPECT_GE(phase.get<double>(), 0.95) << model;
    }
    EXPECT_DOUBLE_EQ(json["bytes_per_step"].get<double>(),
                     json["push_bytes_per_step"].get<double>() +
                         json["pull_bytes_per_step"].get<double>() +
                         json["peer_bytes_per_step"].get<double>());
    EXPECT_GE(json["shards"].size(), json["matrices"].size());
  }
}

TEST(PlanCommand, Simulates) {
  std::string output;
  const std::string model = "plan/models/gpt2_124m.json";
  ASSERT_TRUE(RunCommand({"plan", model, "--simulate=1,4", "--json"}, &output).ok());
  const nlohmann::json json = nlohmann::json::parse(output);
  ASSERT_EQ(json["simulated"].size(), 2u);
  EXPECT_EQ(json["simulated"][1]["machines"], 4);
  for (const char* way : {"planned", "round_robin", "all_gather", "owners"}) {
    EXPECT_GT(json["simulated"][1][way]["compute_seconds"].get<double>(), 0) << way;
  }
  ASSERT_TRUE(RunCommand({"plan", model, "--simulate=1,4"}, &output).ok());
  EXPECT_THAT(output, HasSubstr("in turn: max/mean"));
}

TEST(PlanCommand, TextExplainsItself) {
  std::string output;
  ASSERT_TRUE(RunCommand({"plan", "plan/models/llama3_8b.json", "--servers=8"}, &output).ok());
  for (const char* part :
       {"llama3_8b: 291 matrices, 8.03 G parameters on 8 servers", "bytes/param", "max/mean",
        "dearest matrix", "exposed time per step", "servers that hide all of it",
        "the same rules inside each trainer", "pay", "refresh max/mean", "with overlap",
        "busiest link", "assumed: server 1e+12 flop/s", "matrices cut"}) {
    EXPECT_THAT(output, HasSubstr(part));
  }
}

TEST(PlanCommand, RulesThatReadWeightsNeedServersThatHoldThem) {
  const std::string path = testing::TempDir() + "/pair.json";
  std::ofstream(path) << R"({"parameters": [
      {"name": "a", "shape": [2, 6], "preset": "polora", "set": {"pair": "b"}},
      {"name": "b", "shape": [6, 2], "preset": "polora", "set": {"pair": "a"}}]})";
  std::string output;
  const absl::Status status = RunCommand({"plan", path}, &output);
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(status.message()), HasSubstr("a: polora reads the weights"));
  EXPECT_TRUE(RunCommand({"plan", path, "--weights"}, &output).ok());
}

TEST(PlanCommand, RefusesWithTheReason) {
  const std::string model = "plan/models/gpt2_124m.json";
  const struct {
    std::vector<std::string> arguments;
    absl::StatusCode code;
    const char* part;
  } cases[] = {
      {{"plan", model, "--servers=0"}, absl::StatusCode::kInvalidArgument, "--servers=0"},
      {{"plan", model, "--servers=two"}, absl::StatusCode::kInvalidArgument, "two"},
      {{"plan", model, "--servers=2", "--speeds=1,2,3"},
       absl::StatusCode::kInvalidArgument,
       "3 values"},
      {{"plan", model, "--servers=2", "--speeds=1,-2"}, absl::StatusCode::kInvalidArgument, "-2"},
      {{"plan", model, "--set", "lr"}, absl::StatusCode::kInvalidArgument, "key=value"},
      {{"plan", model, "--set", "period=0"}, absl::StatusCode::kInvalidArgument, "period"},
      {{"plan", model, "--preset", "moun"}, absl::StatusCode::kInvalidArgument, "muon"},
      {{"plan", model, "--shards", "wte=2"}, absl::StatusCode::kInvalidArgument, "no matrix"},
      {{"plan", model, "--shards", "wte.weight=0"}, absl::StatusCode::kInvalidArgument, "positive"},
      {{"plan", model, "--shards", "wte.weight=50258"},
       absl::StatusCode::kInvalidArgument,
       "50257 x 768 matrix cannot be cut into 50258"},
      {{"plan", model, "--staging=eager"}, absl::StatusCode::kInvalidArgument, "eager"},
      {{"plan", model, "--servers=3", "--memory=1g,2g"},
       absl::StatusCode::kInvalidArgument,
       "2 values"},
      {{"plan", model, "--pull-copies=2"}, absl::StatusCode::kInvalidArgument, "1 trainers"},
      {{"plan", model, "--simulate=0"}, absl::StatusCode::kInvalidArgument, "--simulate=0"},
      {{"plan", model, "--memory=1m"}, absl::StatusCode::kResourceExhausted, "1048576"},
      {{"plan", "none.json"}, absl::StatusCode::kNotFound, "none.json"},
      {{"plan"}, absl::StatusCode::kInvalidArgument, "model"},
  };
  for (const auto& bad : cases) {
    std::string output;
    const absl::Status status = RunCommand(bad.arguments, &output);
    EXPECT_EQ(status.code(), bad.code) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr(bad.part));
    EXPECT_EQ(output, "");
  }
}

}  // namespace
}  // namespace stiefel
