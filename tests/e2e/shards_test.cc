// Matrices that are cut into shards, over gRPC: servers that compute a matrix together reach each
// other at the addresses that trainers know.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>

#include "client/trainer.h"
#include "tests/e2e/grpc_cluster.h"

namespace stiefel {
namespace {

using ::testing::HasSubstr;
using Values = std::vector<float>;

std::vector<ParameterSpec> CutInThree() {
  std::vector<ParameterSpec> model(3);
  model[0] = {"wide", {40, 150}, *PresetRule("muon")};
  model[1] = {"tall", {150, 40}, *PresetRule("periodic_rowwise_muon")};
  model[2] = {"vector", {200}, *PresetRule("adamw")};
  for (ParameterSpec& parameter : model) parameter.shards = 3;
  EXPECT_TRUE(SetOption(model[0].rule, "form", "gram").ok());
  EXPECT_TRUE(SetOption(model[1].rule, "period", "2").ok());
  EXPECT_TRUE(SetOption(model[1].rule, "phase", "0").ok());
  return model;
}

Values Gradient(const ParameterSpec& parameter, int64_t step) {
  Values values(parameter.rows() * parameter.cols());
  for (size_t i = 0; i < values.size(); ++i) {
    values[i] = static_cast<float>(
        std::sin(0.37 * static_cast<double>(i * i % 1009) + 1.7 * static_cast<double>(step)));
  }
  return values;
}

// Begins a step and pushes all of it.
absl::Status Push(Trainer* trainer, int64_t step, const std::vector<ParameterSpec>& model,
                  std::vector<Values>* gradients) {
  absl::Status status = trainer->Begin(step);
  gradients->clear();
  for (const ParameterSpec& parameter : model) gradients->push_back(Gradient(parameter, step));
  for (size_t p = 0; p < model.size(); ++p) {
    status.Update(trainer->Push(static_cast<int32_t>(p),
                                {(*gradients)[p].data(), ElementType::kFp32, model[p].shape, {}}));
  }
  status.Update(trainer->EndPush());
  return status;
}

struct Result {
  std::vector<Values> deltas;
  std::map<int32_t, uint64_t> hashes;
};

Result Train(int servers, int64_t steps) {
  GrpcCluster cluster(servers);
  Result result;
  const std::vector<ParameterSpec> model = CutInThree();
  auto connected = Trainer::Connect(cluster.Options(0, 1), model);
  EXPECT_TRUE(connected.ok()) << connected.status();
  if (!connected.ok()) return result;
  Trainer* trainer = connected->get();
  std::vector<Values> gradients;
  for (int64_t step = 1; step <= steps; ++step) {
    const absl::Status pushed = Push(trainer, step, model, &gradients);
    EXPECT_TRUE(pushed.ok()) << pushed;
    const auto outcome = trainer->Wait();
    EXPECT_TRUE(outcome.ok()) << outcome.status();
    if (!outcome.ok() || outcome->outcome != Outcome::kCommit) return result;
    for (size_t p = 0; p < model.size(); ++p) {
      const auto delta = trainer->Delta(static_cast<int32_t>(p));
      EXPECT_TRUE(delta.ok()) << delta.status();
      const auto* data = static_cast<const float*>(delta->data);
      result.deltas.emplace_back(data, data + gradients[p].size());
    }
    EXPECT_TRUE(trainer->Done().ok());
  }
  cluster.AwaitDecided(steps);
  result.hashes = cluster.StateHashes();
  EXPECT_TRUE(trainer->Close().ok());
  return result;
}

TEST(ShardsTest, ThreeServersComputeWhatOneDoes) {
  const Result one = Train(1, 4);
  ASSERT_EQ(one.deltas.size(), 12u);
  EXPECT_EQ(one.hashes.size(), 9u);
  for (const int servers : {2, 3}) {
    const Result here = Train(servers, 4);
    EXPECT_EQ(here.deltas, one.deltas) << servers << " servers";
    EXPECT_EQ(here.hashes, one.hashes) << servers << " servers";
  }
}

// One that is gone ends the wait with its address, as a drop or an error; nothing hangs.
TEST(ShardsTest, AServerThatDiesIsNamed) {
  GrpcCluster cluster(3);
  const std::vector<ParameterSpec> model = CutInThree();
  TrainerOptions options = cluster.Options(0, 1);
  options.step_timeout = absl::Seconds(3);
  auto trainer = Trainer::Connect(options, model);
  ASSERT_TRUE(trainer.ok()) << trainer.status();
  std::vector<Values> gradients;
  cluster.Kill(2);
  ASSERT_TRUE(Push(trainer->get(), 1, model, &gradients).ok());
  const auto outcome = (*trainer)->Wait();
  if (outcome.ok()) {
    EXPECT_EQ(outcome->outcome, Outcome::kDrop);
    EXPECT_THAT(outcome->reason, HasSubstr(cluster.addresses()[2]));
  } else {
    EXPECT_THAT(std::string(outcome.status().message()), HasSubstr(cluster.addresses()[2]));
  }
}

}  // namespace
}  // namespace stiefel
