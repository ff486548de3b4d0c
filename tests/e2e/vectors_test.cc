// The golden sequences of docs/RULES.md section 7 through a real server.
#include <cmath>
#include <cstdio>
#include <fstream>

#include "gtest/gtest.h"
#include "nlohmann/json.hpp"
#include "tests/e2e/grpc_cluster.h"

namespace stiefel {
namespace {

using nlohmann::json;

float GoldenGradient(int64_t s, int64_t i, int64_t j) {
  return static_cast<float>((7 * i + 3 * j * j + 5 + 11 * s + s * i * j) % 13 - 6) / 4;
}

TEST(VectorsTest, GoldenSequencesThroughAServer) {
  std::ifstream file("tests/vectors/rules.json");
  ASSERT_TRUE(file.good());
  const json vectors = json::parse(file);
  int cases = 0;
  std::vector<ParameterSpec> parameters;
  std::vector<const json*> golden;
  for (const json& sequence : vectors["cases"]) {
    std::string preset = sequence["preset"];
    const bool phase1 = preset == "periodic_rowwise_muon_phase1";
    if (phase1) preset = "periodic_rowwise_muon";
    absl::StatusOr<Rule> rule = PresetRule(preset);
    if (!rule.ok()) continue;  // a preset of a later version
    if (rule->period > 1) {
      ASSERT_TRUE(SetOption(*rule, "phase", phase1 ? "1" : "0").ok());
    }
    ParameterSpec parameter;
    parameter.name = "case" + std::to_string(cases++);
    parameter.shape = {sequence["rows"], sequence["cols"]};
    parameter.rule = *std::move(rule);
    parameters.push_back(std::move(parameter));
    golden.push_back(&sequence);
  }
  ASSERT_EQ(cases, 14);
  GrpcCluster cluster(1);
  auto trainer = Trainer::Connect(cluster.Options(0, 1), parameters);
  ASSERT_TRUE(trainer.ok()) << trainer.status();
  double worst = 0;
  for (int64_t step = 1; step <= 4; ++step) {
    ASSERT_TRUE((*trainer)->Begin(step).ok());
    std::vector<std::vector<float>> gradients;
    for (const ParameterSpec& parameter : parameters) {
      gradients.emplace_back();
      for (int64_t i = 0; i < parameter.rows(); ++i) {
        for (int64_t j = 0; j < parameter.cols(); ++j) {
          gradients.back().push_back(GoldenGradient(step - 1, i, j));
        }
      }
    }
    for (int b = 0; b < cases; ++b) {
      ASSERT_TRUE((*trainer)
                      ->Push(b, {gradients[b].data(), ElementType::kFp32, parameters[b].shape, {}})
                      .ok());
    }
    ASSERT_TRUE((*trainer)->EndPush().ok());
    const auto outcome = (*trainer)->Wait();
    ASSERT_TRUE(outcome.ok()) << outcome.status();
    ASSERT_EQ(outcome->outcome, Outcome::kCommit) << outcome->reason;
    for (int b = 0; b < cases; ++b) {
      const auto delta = (*trainer)->Delta(b);
      ASSERT_TRUE(delta.ok()) << delta.status();
      const float* got = static_cast<const float*>(delta->data);
      double error = 0;
      double largest = 0;
      for (const json& row : (*golden[b])["deltas"][step - 1]) {
        for (const json& value : row) {
          error = std::max(error, std::abs(static_cast<double>(*got++) - value.get<double>()));
          largest = std::max(largest, std::abs(value.get<double>()));
        }
      }
      EXPECT_LE(error, 2e-5 * largest) << parameters[b].rule.preset << " step " << step;
      worst = std::max(worst, error / largest);
    }
    ASSERT_TRUE((*trainer)->Done().ok());
  }
  std::printf("%d sequences, 4 steps: error at most %.2g of the largest delta\n", cases, worst);
}

}  // namespace
}  // namespace stiefel
