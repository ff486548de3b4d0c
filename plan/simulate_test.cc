#include "plan/simulate.h"

#include <gtest/gtest.h>

#include <chrono>
#include <cstdlib>
#include <string>

#include "plan/cost.h"
#include "plan/model.h"

namespace stiefel {
namespace {

bool FullScale() {
  const char* scale = std::getenv("STIEFEL_TEST_SCALE");
  return scale != nullptr && std::string(scale) == "full";
}

PlanRequest RequestOf(const std::string& name) {
  PlanRequest request;
  request.matrices = Matrices(*ReadModel("plan/models/" + name + ".json"));
  request.memory.staging = Staging::kLazy;
  return request;
}

TEST(Simulate, TheFormulasByHand) {
  PlanRequest request;
  request.matrices.assign(
      3, PlanMatrix{"w", 100, 100, *PresetRule("muon"), DType::kBf16, DType::kBf16});
  Machine machine;
  machine.flops_per_second = machine.memory_bytes_per_second = 1e6;
  machine.trainer_flops_per_second = machine.trainer_memory_bytes_per_second = 2e6;
  machine.network_bytes_per_second = 1e5;
  machine.backward_seconds = 0;
  machine.trainers = 2;
  const auto simulated = Simulate(request, machine, {1, 2});
  ASSERT_TRUE(simulated.ok()) << simulated.status();
  const Cost cost = StepCost(request.matrices[0], StepKind::kRefresh);
  const double one = (cost.flops + cost.bytes) / 1e6;
  const SimulatedCount& two = (*simulated)[1];
  EXPECT_EQ(two.machines, 2);
  EXPECT_DOUBLE_EQ(two.planned.compute_seconds, 2 * one);
  EXPECT_DOUBLE_EQ(two.planned.balance, 4.0 / 3);
  // Two of three matrices are pushed once and pulled by both trainers.
  EXPECT_DOUBLE_EQ(two.planned.link_bytes, 2 * 60000);
  EXPECT_NEAR(two.planned.exposed_seconds, 2 * one + 1.2, 1e-9);
  EXPECT_DOUBLE_EQ(two.round_robin.compute_seconds, 2 * one);
  // Every rank does all three, and receives half of 60 kB.
  EXPECT_DOUBLE_EQ(two.all_gather.compute_seconds, 3 * one / 2);
  EXPECT_DOUBLE_EQ(two.all_gather.exposed_seconds, 3 * one / 2 + 0.3);
  EXPECT_DOUBLE_EQ(two.all_gather.link_bytes, 60000);
  // One rank owns two: it receives half of their gradients and half of the third's update.
  EXPECT_DOUBLE_EQ(two.owners.compute_seconds, 2 * one / 2);
  EXPECT_DOUBLE_EQ(two.owners.link_bytes, 2 * 30000);
  EXPECT_DOUBLE_EQ(two.owners.exposed_seconds, one + 0.3);
  // Alone nobody sends anything.
  EXPECT_EQ((*simulated)[0].all_gather.link_bytes, 0);
  EXPECT_EQ((*simulated)[0].owners.link_bytes, 0);
}

TEST(Simulate, PlanningIsNeverWorseThanTakingTurns) {
  Machine machine;
  machine.network_bytes_per_second = 1e12;
  const auto simulated = Simulate(RequestOf("llama3_8b"), machine, {1, 4, 16, 64});
  ASSERT_TRUE(simulated.ok()) << simulated.status();
  for (const SimulatedCount& count : *simulated) {
    EXPECT_LE(count.planned.compute_seconds, count.round_robin.compute_seconds * (1 + 1e-9));
    EXPECT_LE(count.owners.compute_seconds, count.all_gather.compute_seconds * (1 + 1e-9));
  }
  EXPECT_LT(simulated->back().planned.exposed_seconds,
            0.7 * simulated->back().round_robin.exposed_seconds);
}

// Tens of thousands of matrices: figures on paper, and the time it takes to plan.
TEST(MakePlan, AModelOfATrillionParameters) {
  using Clock = std::chrono::steady_clock;
  PlanRequest request = RequestOf("moe_1t");
  double elements = 0;
  for (const PlanMatrix& matrix : request.matrices) {
    elements += static_cast<double>(matrix.rows) * static_cast<double>(matrix.cols);
  }
  EXPECT_GT(elements, 1e12);
  EXPECT_GT(request.matrices.size(), 60000u);
  for (const size_t servers :
       FullScale() ? std::vector<size_t>{1, 64, 256, 1024} : std::vector<size_t>{16}) {
    request.servers.assign(servers, ServerSpec());
    const auto start = Clock::now();
    const absl::StatusOr<Plan> plan = MakePlan(request);
    const std::chrono::duration<double> seconds = Clock::now() - start;
    ASSERT_TRUE(plan.ok()) << plan.status();
    const Explanation loads = LoadsOfPlan(request, *plan, Machine());
    double refresh = 0;
    for (const StepLoad& step : loads.cycle) refresh = std::max(refresh, step.refresh_balance);
    printf(
        "%zu matrices, %.3g parameters on %zu servers: planned in %.2f s, balance %.4f, "
        "refresh balance %.4f, %lld matrices cut\n",
        request.matrices.size(), elements, servers, seconds.count(), loads.balance, refresh,
        static_cast<long long>(loads.cut_matrices));
    // Beyond, a refresh of the largest matrix, nearly square, takes longer than a server's fair
    // part however it is cut.
    if (servers > 256) continue;
    EXPECT_LE(loads.balance, 1.05);
    EXPECT_LE(refresh, 1.05);
  }
}

}  // namespace
}  // namespace stiefel
