#include "plan/cost.h"

#include <algorithm>
#include <numeric>

namespace stiefel {
namespace {

constexpr double kElementFlops = 8;
constexpr double kStateReadAndWrite = 8;      // fp32 in and out.
constexpr double kDirectionReadAndWrite = 8;  // fp32, between the momentum pass and the scale pass.

double RulePolarFlops(const Rule& rule, int64_t rows, int64_t cols, PolarForm form) {
  const auto steps = static_cast<int64_t>(PolarCoefficients(rule).size());
  const auto restarts =
      static_cast<int64_t>(GramRestarts(rule, rule.compute == ComputeType::kBf16).size());
  return PolarFlops(rows, cols, form, steps, restarts, /*symmetric_products=*/true);
}

}  // namespace

double PolarFlops(int64_t rows, int64_t cols, PolarForm form, int64_t steps, int64_t restarts,
                  bool symmetric_products) {
  const auto m = static_cast<double>(std::min(rows, cols));
  const auto n = static_cast<double>(std::max(rows, cols));
  const auto t = static_cast<double>(steps);
  const auto r = static_cast<double>(restarts);
  const double square = m * m * m;  // One m^3.
  const double oblong = m * m * n;  // alpha m^3.
  if (form == PolarForm::kStandard) {
    return symmetric_products ? t * (3 * oblong + square) : t * (4 * oblong + 2 * square);
  }
  return symmetric_products ? (4 * t - 3) * square + 3 * oblong + r * 3 * (oblong - square)
                            : (8 * t - 6) * square + 4 * oblong + r * (4 * oblong - 6 * square);
}

PolarForm ChosenForm(const Rule& rule, int64_t rows, int64_t cols) {
  if (rule.form != PolarForm::kAuto) return rule.form;
  if (rows == cols) return PolarForm::kStandard;
  return RulePolarFlops(rule, rows, cols, PolarForm::kGram) <
                 RulePolarFlops(rule, rows, cols, PolarForm::kStandard)
             ? PolarForm::kGram
             : PolarForm::kStandard;
}

Cost StepCost(const PlanMatrix& matrix, StepKind kind) {
  const double elements = static_cast<double>(matrix.rows) * static_cast<double>(matrix.cols);
  const auto state_buffers = static_cast<double>(RuleState(matrix.rule).size());
  Cost cost;
  cost.flops = kElementFlops * elements;
  cost.bytes = elements * (static_cast<double>(DTypeSize(matrix.push_dtype)) +
                           static_cast<double>(DTypeSize(matrix.pull_dtype)) +
                           kStateReadAndWrite * state_buffers);
  const bool spectral = matrix.rule.family == RuleFamily::kSpectral;
  if (spectral && (kind == StepKind::kRefresh || matrix.rule.period == 1)) {
    const PolarForm form = ChosenForm(matrix.rule, matrix.rows, matrix.cols);
    cost.flops += RulePolarFlops(matrix.rule, matrix.rows, matrix.cols, form);
    cost.bytes += elements * kDirectionReadAndWrite;
  }
  return cost;
}

int64_t CycleSteps(const std::vector<PlanMatrix>& matrices) {
  int64_t cycle = 1;
  for (const PlanMatrix& matrix : matrices) {
    // Both factors are at most kMaxCycleSteps here, so the product is small.
    if (matrix.rule.period > kMaxCycleSteps) return kMaxCycleSteps;
    cycle = std::lcm(cycle, matrix.rule.period);
    if (cycle > kMaxCycleSteps) return kMaxCycleSteps;
  }
  return cycle;
}

}  // namespace stiefel
