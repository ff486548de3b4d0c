#include "plan/phases.h"

#include <algorithm>
#include <functional>
#include <map>
#include <queue>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/errors.h"
#include "common/status.h"
#include "plan/cost.h"

namespace stiefel {
namespace {

struct Dealt {
  int64_t index;
  double cost;
};

// What a residue costs more than the others because the matrix refreshes there.
double RefreshSurplus(const PlanMatrix& matrix) {
  return StepCost(matrix, StepKind::kRefresh).Units() -
         StepCost(matrix, StepKind::kOffRefresh).Units();
}

// Deals the staggered matrices of one period. `fixed` is what residues bear already. Residues
// beyond the number of matrices and fixed ones are never reached, so that a huge period costs
// nothing.
void Deal(std::vector<Dealt> dealt, const std::map<int64_t, double>& fixed, int64_t period,
          std::vector<int64_t>* phases) {
  std::stable_sort(dealt.begin(), dealt.end(),
                   [](const Dealt& a, const Dealt& b) { return a.cost > b.cost; });
  using Residue = std::pair<double, int64_t>;  // Cost so far, residue.
  std::priority_queue<Residue, std::vector<Residue>, std::greater<Residue>> residues;
  const int64_t reachable =
      std::min<int64_t>(period, static_cast<int64_t>(dealt.size() + fixed.size()));
  for (int64_t residue = 0; residue < reachable; ++residue) {
    const auto it = fixed.find(residue);
    residues.emplace(it == fixed.end() ? 0.0 : it->second, residue);
  }
  for (const Dealt& next : dealt) {
    const auto [cost, residue] = residues.top();
    residues.pop();
    (*phases)[next.index] = residue;
    residues.emplace(cost + next.cost, residue);
  }
}

absl::Status Check(const PlanMatrix& matrix) {
  if (matrix.rows <= 0 || matrix.cols <= 0) {
    return BadShape(matrix.name, matrix.rows, matrix.cols);
  }
  const Rule& rule = matrix.rule;
  if (rule.period < 1) {
    return absl::InvalidArgumentError(
        absl::StrCat(matrix.name, ": period ", rule.period, " is below 1"));
  }
  if (rule.phase_mode == PhaseMode::kNumber && (rule.phase < 0 || rule.phase >= rule.period)) {
    return absl::InvalidArgumentError(
        absl::StrCat(matrix.name, ": phase ", rule.phase, " is outside [0, ", rule.period, ")"));
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::vector<int64_t>> AssignPhases(const std::vector<PlanMatrix>& matrices) {
  std::vector<int64_t> phases(matrices.size(), 0);
  std::map<int64_t, std::vector<Dealt>> staggered;     // By period.
  std::map<int64_t, std::map<int64_t, double>> fixed;  // By period, then residue.
  for (size_t i = 0; i < matrices.size(); ++i) {
    STIEFEL_RETURN_IF_ERROR(Check(matrices[i]));
    const Rule& rule = matrices[i].rule;
    if (rule.period == 1) continue;
    if (rule.phase_mode == PhaseMode::kStaggered) {
      staggered[rule.period].push_back({static_cast<int64_t>(i), RefreshSurplus(matrices[i])});
    } else {
      phases[i] = rule.phase_mode == PhaseMode::kNumber ? rule.phase : 0;
      fixed[rule.period][phases[i]] += RefreshSurplus(matrices[i]);
    }
  }
  for (auto& [period, dealt] : staggered) {
    Deal(std::move(dealt), fixed[period], period, &phases);
  }
  return phases;
}

}  // namespace stiefel
