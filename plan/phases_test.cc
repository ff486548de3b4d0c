#include "plan/phases.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <numeric>
#include <random>

#include "plan/cost.h"
#include "plan/model.h"

namespace stiefel {
namespace {

PlanMatrix Matrix(int64_t rows, int64_t cols, int64_t period) {
  PlanMatrix matrix{"w", rows, cols, *PresetRule("periodic_rowwise_muon")};
  matrix.rule.period = period;
  return matrix;
}

double Surplus(const PlanMatrix& matrix) {
  return StepCost(matrix, StepKind::kRefresh).Units() -
         StepCost(matrix, StepKind::kOffRefresh).Units();
}

// Of one period: what each residue costs more, and the dearest matrix.
void ExpectLevelled(const std::vector<PlanMatrix>& matrices, const std::vector<int64_t>& phases,
                    int64_t period) {
  std::vector<double> residues(period, 0);
  double dearest = 0;
  for (size_t i = 0; i < matrices.size(); ++i) {
    if (matrices[i].rule.period != period) continue;
    ASSERT_GE(phases[i], 0);
    ASSERT_LT(phases[i], period);
    residues[phases[i]] += Surplus(matrices[i]);
    dearest = std::max(dearest, Surplus(matrices[i]));
  }
  const auto k = static_cast<double>(period);
  const double mean = std::accumulate(residues.begin(), residues.end(), 0.0) / k;
  EXPECT_LE(*std::max_element(residues.begin(), residues.end()), mean + (1 - 1 / k) * dearest);
}

TEST(AssignPhases, EveryStepCostsTheSameOnRealModels) {
  for (const char* name : {"gpt2_124m", "llama3_8b", "mixtral_like"}) {
    const auto matrices = Matrices(*ReadModel(std::string("plan/models/") + name + ".json"));
    const auto phases = *AssignPhases(matrices);
    ExpectLevelled(matrices, phases, 3);
    std::vector<double> residues(3, 0);
    for (size_t i = 0; i < matrices.size(); ++i) {
      if (matrices[i].rule.period == 3) residues[phases[i]] += Surplus(matrices[i]);
    }
    const double mean = (residues[0] + residues[1] + residues[2]) / 3;
    EXPECT_LE(*std::max_element(residues.begin(), residues.end()), 1.02 * mean) << name;
  }
}

TEST(AssignPhases, LevelsEachPeriodOfRandomModels) {
  std::mt19937 random(5);
  for (int round = 0; round < 200; ++round) {
    std::vector<PlanMatrix> matrices;
    for (size_t i = 0, n = random() % 60; i < n; ++i) {
      matrices.push_back(Matrix(1 + random() % 500, 1 + random() % 500, 1 + random() % 4));
    }
    const auto phases = *AssignPhases(matrices);
    for (int64_t period = 1; period <= 4; ++period) ExpectLevelled(matrices, phases, period);
  }
}

TEST(AssignPhases, ModesAndNumbers) {
  std::vector<PlanMatrix> matrices(3, Matrix(64, 64, 3));
  for (PlanMatrix& matrix : matrices) matrix.rule.phase_mode = PhaseMode::kSynchronised;
  EXPECT_EQ(*AssignPhases(matrices), (std::vector<int64_t>{0, 0, 0}));
  for (PlanMatrix& matrix : matrices) matrix.rule.phase_mode = PhaseMode::kStaggered;
  EXPECT_EQ(*AssignPhases(matrices), (std::vector<int64_t>{0, 1, 2}));
  // A fixed one is counted in the deal of the others.
  matrices[2].rule.phase_mode = PhaseMode::kNumber;
  matrices[2].rule.phase = 0;
  EXPECT_EQ(*AssignPhases(matrices), (std::vector<int64_t>{1, 2, 0}));
}

TEST(AssignPhases, NamesDoNotMatter) {
  auto matrices = Matrices(*ReadModel("plan/models/llama3_8b.json"));
  const auto phases = *AssignPhases(matrices);
  for (size_t i = 0; i < matrices.size(); ++i) matrices[i].name = std::to_string(i * 7919 % 1000);
  EXPECT_EQ(*AssignPhases(matrices), phases);
}

TEST(AssignPhases, AHugePeriodCostsNothing) {
  const std::vector<PlanMatrix> matrices(3, Matrix(8, 8, 1000000));
  EXPECT_EQ(*AssignPhases(matrices), (std::vector<int64_t>{0, 1, 2}));
}

TEST(AssignPhases, RefusesBadRulesAndSizes) {
  std::vector<PlanMatrix> matrices = {Matrix(8, 8, 0)};
  EXPECT_EQ(AssignPhases(matrices).status().code(), absl::StatusCode::kInvalidArgument);
  matrices = {Matrix(8, -8, 3)};  // CASES A21
  EXPECT_EQ(AssignPhases(matrices).status().code(), absl::StatusCode::kInvalidArgument);
  matrices = {Matrix(8, 8, 3)};
  matrices[0].rule.phase_mode = PhaseMode::kNumber;
  matrices[0].rule.phase = 3;
  EXPECT_EQ(AssignPhases(matrices).status().code(), absl::StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace stiefel
