#include "cli/status_report.h"

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace stiefel {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

v1::ServerStatus Example() {
  v1::ServerStatus server;
  server.set_address("127.0.0.1:7070");
  server.set_device("cpu: oneDNN 2.6");
  server.set_threads(4);
  server.set_resident_bytes(int64_t{3} << 30);
  v1::RunStatus* run = server.add_runs();
  run->set_name("gpt2");
  run->set_run_uid(0xFFFFFFFFFFFFFFFFu);
  run->set_server_index(1);
  run->set_consumed_step(812);
  run->set_open_step(813);
  run->set_phase("collecting");
  run->set_awaited("gradients of rank 3");
  run->set_skipped_steps(2);
  run->set_last_skip_reason("step 700: 3 non-finite gradient elements in h.3.w, rank 1");
  v1::RankStatus* rank = run->add_ranks();
  rank->set_rank(3);
  rank->set_joined(true);
  for (int owner : {0, 1}) {
    v1::MatrixStatus* matrix = run->add_matrices();
    matrix->set_index(owner);
    matrix->set_name(owner == 1 ? "h.3.w" : "h.2.w");
    matrix->set_rows(768);
    matrix->set_cols(3072);
    matrix->set_rule("periodic_rowwise_muon");
    matrix->set_owner(owner);
    matrix->set_last_kind("row_wise");
    matrix->set_last_refresh_step(811);
    matrix->set_residual(0.1875);
    matrix->set_row_wise_spectral(3.25);
    matrix->set_skips(2);
  }
  return server;
}

// What DESIGN.md section 12 promises for each matrix, and who is awaited.
TEST(StatusReportTest, TextShowsTheRunAndTheMatricesOfThisServerOnly) {
  const std::string text = StatusText({Example()});
  for (const char* part :
       {"server 127.0.0.1:7070", "cpu: oneDNN 2.6", "3.00 GiB resident", "run gpt2",
        "step 812 decided, step 813 attempt 0 collecting", "waiting for gradients of rank 3",
        "skipped 2", "3 non-finite gradient elements in h.3.w", "768x3072", "periodic_rowwise_muon",
        "row_wise", "811", "0.188", "3.25", "lost"}) {
    EXPECT_THAT(text, HasSubstr(part));
  }
  EXPECT_THAT(text, Not(HasSubstr("h.2.w")));
  EXPECT_THAT(text, Not(HasSubstr("state hash")));
}

TEST(StatusReportTest, UnsetFiguresAreDashesNotZeros) {
  v1::ServerStatus server = Example();
  v1::MatrixStatus* matrix = server.mutable_runs(0)->mutable_matrices(1);
  matrix->clear_residual();
  matrix->clear_row_wise_spectral();
  matrix->clear_last_kind();
  matrix->clear_last_refresh_step();
  const std::string text = StatusText({server});
  EXPECT_THAT(text, ::testing::ContainsRegex("periodic_rowwise_muon +- +- +- +- +-"));
}

TEST(StatusReportTest, StateHashIsShownWhereTheServerGaveIt) {
  v1::ServerStatus server = Example();
  server.mutable_runs(0)->set_state_hash(0xABCD);
  server.mutable_runs(0)->mutable_matrices(1)->set_state_hash(0xEF01);
  const std::string text = StatusText({server});
  EXPECT_THAT(text, HasSubstr("state hash 000000000000abcd"));
  EXPECT_THAT(text, HasSubstr("000000000000ef01"));
}

TEST(StatusReportTest, IdleServersSaySo) {
  v1::ServerStatus idle;
  idle.set_address("a:1");
  EXPECT_THAT(StatusText({idle, Example()}), HasSubstr("idle: no run"));
}

TEST(StatusReportTest, JsonHasEveryFieldUnderItsProtoName) {
  const nlohmann::ordered_json json = StatusJson({Example(), v1::ServerStatus()});
  ASSERT_EQ(json["servers"].size(), 2u);
  const auto& server = json["servers"][0];
  EXPECT_EQ(server["resident_bytes"], int64_t{3} << 30);
  EXPECT_EQ(server["draining"], false);
  const auto& run = server["runs"][0];
  EXPECT_EQ(run["run_uid"], "ffffffffffffffff");
  EXPECT_EQ(run["consumed_step"], 812);
  EXPECT_EQ(run["awaited"], "gradients of rank 3");
  EXPECT_EQ(run["matrices"].size(), 2u);
  EXPECT_EQ(run["matrices"][1]["residual"], 0.1875);
  EXPECT_FALSE(run["matrices"][1].contains("update_rms"));
  EXPECT_FALSE(run.contains("state_hash"));
  EXPECT_EQ(json["servers"][1]["runs"].size(), 0u);
  // Every field of the message is there, also ones that a later version adds.
  EXPECT_EQ(static_cast<int>(server.size()), v1::ServerStatus::descriptor()->field_count());
}

}  // namespace
}  // namespace stiefel
