#include "plan/cost.h"

#include <algorithm>
#include <numeric>

namespace stiefel {
namespace {

constexpr double kElementFlops = 8;
constexpr double kStateReadAndWrite = 8;      // fp32 in and out.
constexpr double kDirectionReadAndWrite = 8;  // fp32, between the momentum pass and the scale pass.

// Share of the standard form's operations that the Gram form must not exceed to be chosen.
constexpr double kGramShare = 0.9;

// Longest run of iterations between restarts.
int64_t LongestRun(int64_t steps, const std::vector<int64_t>& restarts) {
  int64_t longest = 0, from = 0;
  for (int64_t restart : restarts) {
    longest = std::max(longest, restart - from);
    from = restart;
  }
  return std::max(longest, steps - from);
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

FormChoice ChooseForm(const Rule& rule, int64_t rows, int64_t cols, bool low_precision) {
  const auto steps = static_cast<int64_t>(PolarCoefficients(rule).size());
  FormChoice choice;
  choice.restarts = GramRestarts(rule, low_precision);
  choice.standard_flops = PolarFlops(rows, cols, PolarForm::kStandard, steps, 0, true);
  choice.gram_flops = PolarFlops(rows, cols, PolarForm::kGram, steps,
                                 static_cast<int64_t>(choice.restarts.size()), true);
  if (rule.form != PolarForm::kAuto) {
    choice.form = rule.form;
    choice.reason = "the rule names the form";
  } else if (std::min(rows, cols) < kMinGramShortSide) {
    choice.reason = "the short side is too small for the Gram form to pay";
  } else if (LongestRun(steps, choice.restarts) > kMaxGramRun) {
    choice.reason = "too many iterations between restarts for the Gram form's accuracy";
  } else if (choice.gram_flops >= kGramShare * choice.standard_flops) {
    choice.reason = "the Gram form would save less than a tenth";
  } else {
    choice.form = PolarForm::kGram;
    choice.reason = "the Gram form saves more than a tenth";
  }
  return choice;
}

Cost StepCost(const PlanMatrix& matrix, StepKind kind) {
  const double elements = static_cast<double>(matrix.rows) * static_cast<double>(matrix.cols);
  double state = 0;
  for (const StateBuffer& buffer : RuleState(matrix.rule, matrix.rows, matrix.cols)) {
    state += static_cast<double>(buffer.rows) * static_cast<double>(buffer.cols);
  }
  Cost cost;
  cost.flops = kElementFlops * elements;
  cost.bytes = elements * (static_cast<double>(DTypeSize(matrix.push_dtype)) +
                           static_cast<double>(DTypeSize(matrix.pull_dtype))) +
               kStateReadAndWrite * state;
  const bool spectral = matrix.rule.family == RuleFamily::kSpectral;
  if (spectral && (kind == StepKind::kRefresh || matrix.rule.period == 1)) {
    const FormChoice choice = ChooseForm(matrix.rule, matrix.rows, matrix.cols,
                                         matrix.rule.compute == ComputeType::kBf16);
    cost.flops += choice.form == PolarForm::kGram ? choice.gram_flops : choice.standard_flops;
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
