#include "common/trace.h"

#include <unistd.h>

#include <fstream>
#include <string>

#include "gtest/gtest.h"
#include "nlohmann/json.hpp"

namespace stiefel {
namespace {

using nlohmann::json;

std::string PathOf(const std::string& name) { return ::testing::TempDir() + "/" + name; }

json Read(const std::string& path) { return json::parse(std::ifstream(path)); }

std::vector<json> Spans(const json& trace) {
  std::vector<json> spans;
  for (const json& event : trace["traceEvents"]) {
    if (event["ph"] == "X") spans.push_back(event);
  }
  return spans;
}

TEST(TraceTest, IsThereAtOnceAndCompleteAtTheEnd) {
  const std::string path = PathOf("trace.json");
  {
    auto trace = *Trace::Create(path, "server");
    EXPECT_EQ(Spans(Read(path)).size(), 0);
    trace->Add({"push", "h.0.w", 100, 250, 7, 4096, ""});
    trace->Add({"compute", "h.0.w", 250, 300, 7, 0, "refresh"});
  }
  const json trace = Read(path);
  const std::vector<json> spans = Spans(trace);
  ASSERT_EQ(spans.size(), 2);
  EXPECT_EQ(spans[0]["cat"], "push");
  EXPECT_EQ(spans[0]["ts"], 100);
  EXPECT_EQ(spans[0]["dur"], 150);
  EXPECT_EQ(spans[0]["pid"], getpid());
  EXPECT_EQ(spans[0]["args"], json({{"step", 7}, {"bytes", 4096}}));
  EXPECT_EQ(spans[1]["args"], json({{"step", 7}, {"detail", "refresh"}}));
  EXPECT_NE(spans[0]["tid"], spans[1]["tid"]);
  EXPECT_EQ(trace["traceEvents"][0]["args"]["name"], "server");
}

// Viewers nest events of one row by time: those that overlap without nesting need rows of their
// own.
TEST(TraceTest, OverlappingSpansOfATrackGetRowsOfTheirOwn) {
  const std::string path = PathOf("rows.json");
  auto trace = *Trace::Create(path, "server");
  trace->Add({"pull", "c", 20, 40, 1, 0, ""});
  trace->Add({"pull", "a", 0, 20, 1, 0, ""});
  trace->Add({"pull", "b", 10, 30, 1, 0, ""});
  ASSERT_TRUE(trace->Flush().ok());
  std::map<std::string, int> row;
  for (const json& span : Spans(Read(path))) row[span["name"]] = span["tid"];
  EXPECT_EQ(row["a"], row["c"]);
  EXPECT_NE(row["a"], row["b"]);
}

TEST(TraceTest, WritesAtTheEndOfAStepOnly) {
  const std::string path = PathOf("due.json");
  auto trace = *Trace::Create(path, "server");
  trace->Add({"push", "w", 0, 1, 1, 0, ""});
  ASSERT_TRUE(trace->FlushIfDue().ok());
  EXPECT_EQ(Spans(Read(path)).size(), 0);
  trace->EndStep();
  ASSERT_TRUE(trace->FlushIfDue().ok());
  EXPECT_EQ(Spans(Read(path)).size(), 1);
}

TEST(TraceTest, KeepsTheNewestSpansAndSaysHowManyAreGone) {
  const std::string path = PathOf("bound.json");
  auto trace = *Trace::Create(path, "server");
  const int64_t more = 3, all = static_cast<int64_t>(Trace::kMaxSpans) + more;
  for (int64_t i = 0; i < all; ++i) trace->Add({"push", "w", i, i + 1, i, 0, ""});
  ASSERT_TRUE(trace->Flush().ok());
  const json written = Read(path);
  const std::vector<json> spans = Spans(written);
  EXPECT_EQ(spans.size(), Trace::kMaxSpans);
  EXPECT_EQ(spans.front()["ts"], more);
  EXPECT_EQ(spans.back()["ts"], all - 1);
  EXPECT_EQ(written["otherData"]["spans_left_out"], more);
}

TEST(TraceTest, APathThatCannotBeWrittenIsAnError) {
  EXPECT_EQ(Trace::Create(PathOf("no/such/folder/t.json"), "server").status().code(),
            absl::StatusCode::kNotFound);
  EXPECT_EQ(Trace::Create("", "server").status().code(), absl::StatusCode::kInvalidArgument);
}

TEST(TransferSpansTest, LastFromTheFirstPieceToTheLastOnAnyStream) {
  const std::string path = PathOf("transfers.json");
  auto trace = *Trace::Create(path, "server");
  TransferSpans pulls(trace.get(), "pull");
  pulls.Begin(3, "h.3.w", 5, 100);
  pulls.Enter(1, 3, 64, false);
  pulls.Begin(3, "h.3.w", 5, 110);  // another piece of the same block
  pulls.Enter(2, 3, 36, true);
  pulls.Leave(1, 120);
  ASSERT_TRUE(trace->Flush().ok());
  EXPECT_EQ(Spans(Read(path)).size(), 0);
  pulls.Leave(2, 130);
  pulls.Begin(4, "h.4.w", 5, 140);
  pulls.Enter(2, 4, 8, true);
  pulls.Forget(2);  // broke: no span
  pulls.Leave(2, 150);
  pulls.Begin(4, "h.4.w", 6, 160);  // comes again in the next step
  pulls.Take(4, 8, true, 170);
  ASSERT_TRUE(trace->Flush().ok());
  const std::vector<json> spans = Spans(Read(path));
  ASSERT_EQ(spans.size(), 2);
  EXPECT_EQ(spans[0]["name"], "h.3.w");
  EXPECT_EQ(spans[0]["ts"], 100);
  EXPECT_EQ(spans[0]["dur"], 30);
  EXPECT_EQ(spans[0]["args"]["bytes"], 100);
  EXPECT_EQ(spans[1]["ts"], 160);
  EXPECT_EQ(spans[1]["args"]["step"], 6);
}

}  // namespace
}  // namespace stiefel
