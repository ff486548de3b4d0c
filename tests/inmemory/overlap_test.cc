// Work of different matrices of one step overlaps, the trace shows it, and the order of work does
// not change what comes out.
#include <fstream>
#include <thread>

#include "common/clock.h"
#include "nlohmann/json.hpp"
#include "server/testing/state_hashes.h"
#include "tests/inmemory/cluster.h"

namespace stiefel::testing {
namespace {

using nlohmann::json;

std::string PathOf(const std::string& name) { return ::testing::TempDir() + "/" + name; }

// The spans of a trace by track and name; of a transfer "to rank 0" the name is the matrix's.
std::map<std::pair<std::string, std::string>, json> Spans(const std::string& path) {
  std::map<std::pair<std::string, std::string>, json> spans;
  const json trace = json::parse(std::ifstream(path));
  for (const json& event : trace["traceEvents"]) {
    if (event["ph"] != "X") continue;
    const std::string name = event["name"];
    spans[{event["cat"], name.substr(0, name.find(" to rank"))}] = event;
  }
  return spans;
}

int64_t Begin(const json& span) { return span["ts"]; }
int64_t End(const json& span) { return Begin(span) + int64_t{span["dur"]}; }

// The push of the first layer is held in the middle until the update of the last layer has come
// back: so its refresh and its pull lie within that push.
void RunHeldPush(const std::string& server_trace, const std::string& trainer_trace) {
  ServerOptions server = SmallServer();
  server.trace_file = server_trace;
  MemoryCluster cluster(1, server);
  const std::vector<ParameterSpec> parameters = {Param("first", {32, 48}, "muon"),
                                                 Param("last", {32, 48}, "muon")};
  TrainerOptions options = cluster.Options(0, 1);
  options.trace_file = trainer_trace;
  options.data_streams = 1;  // chunks arrive as they were pushed
  options.push = WholePushBlocks(parameters);
  options.push[0].parts = 2;
  auto trainer = MustConnect(cluster, options, parameters);
  ASSERT_NE(trainer, nullptr);
  const std::vector<float> gradient = Gradient(32 * 48, 1, 0, 0);
  std::vector<float> first(32 * 48, 1.0f), last(32 * 48, 1.0f);
  ASSERT_OK(trainer->Begin(1));
  ASSERT_OK(trainer->Push(0, View(gradient, {32, 48}), 0));
  ASSERT_OK(trainer->Push(1, View(gradient, {32, 48})));
  const int64_t deadline = RealClock().NowMicros() + 60000000;
  while (trainer->timings().bytes_pulled < 32 * 48 * 4) {
    ASSERT_LT(RealClock().NowMicros(), deadline) << "the last layer's update does not come";
    std::this_thread::yield();
  }
  ASSERT_OK(trainer->Push(0, View(gradient, {32, 48}), 1));
  ASSERT_OK(trainer->EndPush());
  ASSERT_OK(trainer->Wait().status());
  ASSERT_OK(trainer->Apply(0, MutableTensorView{first.data(), ElementType::kFp32, {32, 48}, {}}));
  ASSERT_OK(trainer->Apply(1, MutableTensorView{last.data(), ElementType::kFp32, {32, 48}, {}}));
  ASSERT_OK(trainer->Done());
  ASSERT_OK(trainer->Close());
}

TEST(OverlapTest, TheTraceShowsRefreshAndPullOfOneMatrixWithinThePushOfAnother) {
  const std::string server_path = PathOf("server.json"), trainer_path = PathOf("trainer.json");
  RunHeldPush(server_path, trainer_path);
  auto server = Spans(server_path);
  const json push = server[{"push", "first"}], refresh = server[{"compute", "last"}];
  ASSERT_FALSE(push.is_null());
  ASSERT_FALSE(refresh.is_null());
  EXPECT_EQ(refresh["args"]["detail"], "refresh");
  EXPECT_EQ(push["args"]["bytes"], 2 * 32 * 48 * 4);
  EXPECT_LE(Begin(push), Begin(refresh));
  EXPECT_GE(End(push), End(refresh));
  EXPECT_GE(Begin(server[{"compute", "first"}]), End(push));
  EXPECT_EQ((server[{"pull", "last"}]["args"]["bytes"]), 32 * 48 * 4);
  EXPECT_GE(Begin(server[{"decision", "COMMIT"}]), End(server[{"compute", "first"}]));

  // One clock: what the trainer saw fits what the server did.
  auto trainer = Spans(trainer_path);
  EXPECT_GE(End(trainer[{"pull", "last"}]), End(refresh));
  EXPECT_LE(End(trainer[{"pull", "last"}]), End(push));
  EXPECT_LE(Begin(trainer[{"push", "last"}]), Begin(refresh));
  EXPECT_GE(End(trainer[{"decision", "COMMIT"}]), End(server[{"compute", "first"}]));
  EXPECT_GE(Begin(trainer[{"apply", "first"}]), End(trainer[{"pull", "first"}]));
  EXPECT_LE(Begin(trainer[{"step", "step 1"}]), Begin(push));
  EXPECT_GE(End(trainer[{"step", "step 1"}]), End(trainer[{"apply", "last"}]));
}

TEST(OverlapTest, ATraceThatCannotBeWrittenIsRefusedAtTheStart) {
  ServerOptions server = SmallServer();
  server.trace_file = PathOf("no/such/folder/t.json");
  EXPECT_EQ(OptimizerServer::Create(server, &RealClock()).status().code(),
            absl::StatusCode::kNotFound);
  MemoryCluster cluster(1);
  TrainerOptions options = cluster.Options(0, 1);
  options.trace_file = server.trace_file;
  EXPECT_STATUS(Trainer::Connect(options, {Param("a", {3, 3})}, cluster.transport()).status(),
                kNotFound, "no/such/folder");
}

// Three steps with updates wanted in one order or the other.
std::map<int32_t, uint64_t> HashesWithPulls(bool reversed,
                                            std::vector<std::vector<float>>* weights) {
  MemoryCluster cluster(1);
  std::vector<ParameterSpec> parameters;
  for (int p = 0; p < 5; ++p) parameters.push_back(Param(absl::StrCat("w", p), {16, 40}, "muon"));
  TrainerOptions options = cluster.Options(0, 1);
  options.pull = WholePullBlocks(parameters);
  if (reversed) std::reverse(options.pull.begin(), options.pull.end());
  weights->assign(5, std::vector<float>(16 * 40, 1.0f));
  auto trainer = MustConnect(cluster, options, parameters);
  for (int64_t step = 1; trainer != nullptr && step <= 3; ++step) {
    EXPECT_TRUE(trainer->Begin(step).ok());
    std::vector<std::vector<float>> gradients;
    for (int p = 0; p < 5; ++p) gradients.push_back(Gradient(16 * 40, step, 0, p));
    for (int p = 4; p >= 0; --p) EXPECT_TRUE(trainer->Push(p, View(gradients[p], {16, 40})).ok());
    EXPECT_TRUE(trainer->EndPush().ok());
    EXPECT_TRUE(trainer->Wait().ok());
    for (int p = 0; p < 5; ++p) {
      const MutableTensorView view{(*weights)[p].data(), ElementType::kFp32, {16, 40}, {}};
      EXPECT_TRUE(trainer->Apply(parameters[p].name, view).ok());
    }
    EXPECT_TRUE(trainer->Done().ok());
  }
  std::map<int32_t, uint64_t> hashes;
  AddStateHashes(cluster.server(0).core(), &hashes);
  return hashes;
}

TEST(OverlapTest, TheOrderOfWorkDoesNotChangeTheResult) {
  std::vector<std::vector<float>> weights, reversed_weights;
  const std::map<int32_t, uint64_t> hashes = HashesWithPulls(false, &weights);
  EXPECT_EQ(hashes.size(), 5);
  EXPECT_EQ(HashesWithPulls(true, &reversed_weights), hashes);
  EXPECT_EQ(reversed_weights, weights);
}

}  // namespace
}  // namespace stiefel::testing
