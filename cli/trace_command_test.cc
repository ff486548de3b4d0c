#include "cli/trace_command.h"

#include "gtest/gtest.h"
#include "nlohmann/json.hpp"

namespace stiefel {
namespace {

using nlohmann::json;

std::string TraceOf(const std::string& host, int64_t day_minus_clock, int pid, int64_t ts) {
  const json trace = {
      {"traceEvents",
       {{{"ph", "M"}, {"name", "process_name"}, {"pid", pid}, {"args", {{"name", host}}}},
        {{"ph", "X"}, {"name", "w"}, {"pid", pid}, {"tid", 0}, {"ts", ts}, {"dur", 5}}}},
      {"otherData", {{"host", host}, {"time_of_day_minus_clock", day_minus_clock}}}};
  return trace.dump();
}

TEST(TraceCommandTest, OneHostHasOneClockAndOthersAreMovedOntoIt) {
  const auto merged = MergeTraces(
      {TraceOf("a", 1000, 1, 50), TraceOf("a", 1007, 2, 60), TraceOf("b", 400, 3, 700)});
  ASSERT_TRUE(merged.ok()) << merged.status();
  const json events = json::parse(*merged)["traceEvents"];
  ASSERT_EQ(events.size(), 6);
  EXPECT_EQ(events[1]["ts"], 50);
  EXPECT_EQ(events[3]["ts"], 60);   // the difference is in when the time of day was read
  EXPECT_EQ(events[5]["ts"], 100);  // 700 + 400 - 1000
  EXPECT_EQ(events[5]["pid"], 3);
}

TEST(TraceCommandTest, ProcessesOfOnePidStayApart) {
  const auto merged = MergeTraces({TraceOf("a", 0, 9, 1), TraceOf("b", 0, 9, 2)});
  ASSERT_TRUE(merged.ok());
  const json events = json::parse(*merged)["traceEvents"];
  EXPECT_EQ(events[0]["pid"], events[1]["pid"]);
  EXPECT_EQ(events[2]["pid"], events[3]["pid"]);
  EXPECT_NE(events[0]["pid"], events[2]["pid"]);
}

TEST(TraceCommandTest, WhatIsNoTraceIsRefusedByNumber) {
  const std::string good = TraceOf("a", 0, 1, 1);
  for (
      const std::string& bad :
      {std::string("no json"), std::string("[]"), std::string("{}"),
       std::string(R"({"traceEvents":[],"otherData":{"host":1,"time_of_day_minus_clock":0}})"),
       std::string(
           R"({"traceEvents":[{"ts":1}],"otherData":{"host":"a","time_of_day_minus_clock":0}})"),
       std::string(
           R"({"traceEvents":[{"pid":1,"ts":"x"}],"otherData":{"host":"a","time_of_day_minus_clock":0}})")}) {
    const auto merged = MergeTraces({good, bad});
    EXPECT_EQ(merged.status().code(), absl::StatusCode::kInvalidArgument) << bad;
    EXPECT_EQ(std::string(merged.status().message()).substr(0, 8), "trace 2:") << bad;
  }
}

}  // namespace
}  // namespace stiefel
