// The golden sequences of docs/mathematics.md section 7 through a real server.
#include <algorithm>
#include <cmath>
#include <cstdio>

#include "gtest/gtest.h"
#include "tests/e2e/grpc_cluster.h"
#include "tests/vectors/golden.h"

namespace stiefel {
namespace {

TEST(VectorsTest, GoldenSequencesThroughAServer) {
  std::vector<GoldenCase> golden = GoldenCases();
  const int cases = static_cast<int>(golden.size());
  ASSERT_EQ(cases, 26);
  std::vector<ParameterSpec> parameters;
  for (GoldenCase& sequence : golden) {
    if (sequence.rule.period > 1) {
      ASSERT_TRUE(SetOption(sequence.rule, "phase", std::to_string(sequence.phase)).ok());
    }
    ParameterSpec parameter;
    parameter.name = "case" + std::to_string(parameters.size());
    parameter.shape = {sequence.rows, sequence.cols};
    parameter.rule = sequence.rule;
    parameters.push_back(std::move(parameter));
  }
  GrpcCluster cluster(1);
  auto trainer = Trainer::Connect(cluster.Options(0, 1), parameters);
  ASSERT_TRUE(trainer.ok()) << trainer.status();
  double worst = 0;
  for (int64_t step = 1; step <= 4; ++step) {
    ASSERT_TRUE((*trainer)->Begin(step).ok());
    std::vector<std::vector<float>> gradients;
    for (const ParameterSpec& parameter : parameters) {
      const Dense g = GoldenGradient(step - 1, parameter.rows(), parameter.cols());
      gradients.emplace_back(g.values.begin(), g.values.end());
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
      const Dense& expected = golden[b].deltas[step - 1];
      const double largest = MaxAbs(expected);
      double error = 0;
      for (const double value : expected.values) {
        error = std::max(error, std::abs(static_cast<double>(*got++) - value));
      }
      EXPECT_LE(error, 2e-5 * largest) << golden[b].name << " step " << step;
      worst = std::max(worst, error / largest);
    }
    ASSERT_TRUE((*trainer)->Done().ok());
  }
  std::printf("%d sequences, 4 steps: error at most %.2g of the largest delta\n", cases, worst);
}

}  // namespace
}  // namespace stiefel
