#include "plan/explain.h"

#include <gtest/gtest.h>

#include "plan/cost.h"

namespace stiefel {
namespace {

// Two equal muon matrices on two servers, with numbers that are easy to follow by hand.
PlanRequest TwoMatrices() {
  PlanRequest request;
  request.matrices.assign(
      2, PlanMatrix{"w", 100, 100, *PresetRule("muon"), DType::kBf16, DType::kFp32});
  request.servers.resize(2);
  return request;
}

Machine SlowMachine() {
  Machine machine;
  machine.flops_per_second = 1e6;
  machine.memory_bytes_per_second = 1e6;
  machine.network_bytes_per_second = 1e5;
  machine.trainer_flops_per_second = 2e6;
  machine.trainer_memory_bytes_per_second = 2e6;
  machine.backward_seconds = 1;
  machine.trainers = 2;
  return machine;
}

TEST(ExplainPlan, TimesAndBytesFollowTheStatedModel) {
  const PlanRequest request = TwoMatrices();
  const Machine machine = SlowMachine();
  const Explanation e = ExplainPlan(request, *MakePlan(request), machine);
  const Cost cost = StepCost(request.matrices[0], StepKind::kRefresh);
  const double compute = (cost.flops + cost.bytes) / 1e6;

  ASSERT_EQ(e.servers.size(), 2u);
  EXPECT_EQ(e.servers[0].shards, 1);
  EXPECT_EQ(e.servers[0].push_bytes_per_step, 20000);
  EXPECT_EQ(e.servers[0].pull_bytes_per_step, 40000 * 2);  // Both trainers pull.
  EXPECT_DOUBLE_EQ(e.servers[0].BytesPerParameter(), 4 + 4 + 2 + 4);
  EXPECT_EQ(e.elements, 20000);
  ASSERT_EQ(e.cycle.size(), 1u);
  EXPECT_DOUBLE_EQ(e.cycle[0].compute_seconds, compute);
  EXPECT_DOUBLE_EQ(e.balance, 1);
  EXPECT_NEAR(e.exposed_seconds, 0.2 + compute + 0.8 - 1, 1e-9);
  EXPECT_DOUBLE_EQ(e.largest_matrix_seconds, compute);
  EXPECT_EQ(e.largest_matrix, 0);
  EXPECT_DOUBLE_EQ(e.trainer_seconds, 2 * compute / 2);
  EXPECT_DOUBLE_EQ(e.trainer_sharded_seconds, compute / 2 + 0.5 * 80000 / 1e5);
}

TEST(ExplainPlan, ATrainersOwnLinkCountsToo) {
  const PlanRequest request = TwoMatrices();
  Machine machine = SlowMachine();
  machine.trainers = 1;
  machine.backward_seconds = 0;
  const Explanation e = ExplainPlan(request, *MakePlan(request), machine);
  // It pushes and pulls what both servers get and give: 2 x (20 + 40) kB.
  EXPECT_NEAR(e.exposed_seconds, e.cycle[0].compute_seconds + 1.2, 1e-9);
  EXPECT_FALSE(e.servers_to_hide.has_value());
}

TEST(ExplainPlan, TrainersMayPullTheirPartsAlone) {
  const PlanRequest request = TwoMatrices();
  Machine machine = SlowMachine();
  machine.pull_copies = 1;
  const Explanation e = ExplainPlan(request, *MakePlan(request), machine);
  EXPECT_EQ(e.servers[0].pull_bytes_per_step, 40000);
  EXPECT_NEAR(e.exposed_seconds, 0.2 + e.cycle[0].compute_seconds + 0.4 - 1, 1e-9);
}

TEST(ExplainPlan, CountsWhatShardsSendEachOther) {
  PlanRequest request;
  request.matrices = {{"w", 128, 1024, *PresetRule("muon"), DType::kBf16, DType::kBf16}};
  request.servers.resize(2);
  request.forced_shards = {2};
  const Machine machine = SlowMachine();
  const Explanation e = LoadsOfPlan(request, *MakePlan(request), machine);
  EXPECT_EQ(e.cut_matrices, 1);
  EXPECT_EQ(e.shards, 2);
  // 1 + restarts = 2 sums of 128^2 values; each of two servers sends 2 (p - 1)/p of one.
  EXPECT_DOUBLE_EQ(e.servers[0].peer_bytes_per_step, 2 * 4 * 128 * 128);
  EXPECT_DOUBLE_EQ(e.peer_bytes_per_step, 2 * e.servers[0].peer_bytes_per_step);
  EXPECT_DOUBLE_EQ(e.BytesPerStep(),
                   e.push_bytes_per_step + e.pull_bytes_per_step + e.peer_bytes_per_step);
  EXPECT_DOUBLE_EQ(e.servers[0].exchange_seconds[0],
                   2 * 4 * 128 * 128 / 1e5 + 3 * 2 * machine.latency_seconds);
  EXPECT_DOUBLE_EQ(e.cycle[0].refresh_balance, 1);
  EXPECT_DOUBLE_EQ(e.link_balance, 1);
}

TEST(ExplainPlan, SaysHowManyServersHideIt) {
  PlanRequest request = TwoMatrices();
  request.matrices.resize(10, request.matrices[0]);
  Machine machine = SlowMachine();
  machine.network_bytes_per_second = 1e12;
  const Cost cost = StepCost(request.matrices[0], StepKind::kRefresh);
  const double one = (cost.flops + cost.bytes) / 1e6;
  // Two matrices fit into the backward pass, so five servers are needed for ten.
  machine.backward_seconds = 2.5 * one;
  EXPECT_EQ(*ExplainPlan(request, *MakePlan(request), machine).servers_to_hide, 5);
  machine.backward_seconds = 10.5 * one;
  const Explanation hidden = ExplainPlan(request, *MakePlan(request), machine);
  EXPECT_EQ(*hidden.servers_to_hide, 1);
  EXPECT_EQ(hidden.exposed_seconds, 0);
  // No number of whole-matrix owners hides a matrix that alone takes longer.
  machine.backward_seconds = 0.5 * one;
  EXPECT_FALSE(ExplainPlan(request, *MakePlan(request), machine).servers_to_hide.has_value());
}

TEST(ExplainPlan, AnIdleServerAndAnEmptyModel) {
  PlanRequest request = TwoMatrices();
  request.servers.resize(5);
  const Explanation e = ExplainPlan(request, *MakePlan(request), SlowMachine());
  EXPECT_DOUBLE_EQ(e.balance, 2.5);  // 5 servers, 2 of them busy.
  request.matrices.clear();
  const Explanation empty = ExplainPlan(request, *MakePlan(request), SlowMachine());
  EXPECT_EQ(empty.largest_matrix, -1);
  EXPECT_DOUBLE_EQ(empty.balance, 1);
  EXPECT_DOUBLE_EQ(empty.servers[0].BytesPerParameter(), 0);
}

TEST(ExplainPlan, StaggeredPhasesCutTheStepTime) {
  PlanRequest request = TwoMatrices();
  request.matrices.assign(12, PlanMatrix{"w", 100, 100, *PresetRule("periodic_rowwise_muon")});
  const Explanation staggered = ExplainPlan(request, *MakePlan(request), SlowMachine());
  ASSERT_EQ(staggered.cycle.size(), 3u);
  EXPECT_DOUBLE_EQ(staggered.cycle[0].flops, staggered.cycle[1].flops);
  EXPECT_DOUBLE_EQ(staggered.cycle[0].flops, staggered.cycle[2].flops);
  for (PlanMatrix& matrix : request.matrices) matrix.rule.phase_mode = PhaseMode::kSynchronised;
  const Explanation together = ExplainPlan(request, *MakePlan(request), SlowMachine());
  EXPECT_GT(together.cycle[0].flops, 2 * staggered.cycle[0].flops);
}

}  // namespace
}  // namespace stiefel
