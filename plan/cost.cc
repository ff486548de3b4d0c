#include "plan/cost.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

namespace stiefel {
namespace {

constexpr double kElementFlops = 8;
constexpr double kStateReadAndWrite = 8;      // fp32 in and out.
constexpr double kDirectionReadAndWrite = 8;  // fp32, between the momentum pass and the scale pass.
constexpr double kReadFp32 = 4;
constexpr double kPowerIterationPasses = 10;
constexpr double kSumBytes = 8;  // of an element of an fp32 sum over owners: out, and in again

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

// Of T iterations with r restarts on an m x n X, symmetric products counted half.
double SymmetricFlops(double m, double n, PolarForm form, double t, double r) {
  const double square = m * m * m;  // One m^3.
  const double oblong = m * m * n;  // alpha m^3.
  if (form == PolarForm::kStandard) return t * (3 * oblong + square);
  return (4 * t - 3) * square + 3 * oblong + r * 3 * (oblong - square);
}

double UnitFlops(const Rule& rule, int64_t rows, int64_t cols) {
  const FormChoice choice = ChooseForm(rule, rows, cols, rule.compute == ComputeType::kBf16);
  return choice.form == PolarForm::kGram ? choice.gram_flops : choice.standard_flops;
}

// Of a rows x cols matrix in tile x tile pieces: whole ones, and what is left at the edges.
double TiledFlops(const Rule& rule, int64_t rows, int64_t cols, int64_t tile) {
  const int64_t down = rows / tile, across = cols / tile;
  const int64_t bottom = rows % tile, right = cols % tile;
  double flops = 0;
  const auto add = [&](int64_t count, int64_t tile_rows, int64_t tile_cols) {
    if (count == 0 || tile_rows == 0 || tile_cols == 0) return;
    flops += static_cast<double>(count) * UnitFlops(rule, tile_rows, tile_cols);
  };
  add(down * across, tile, tile);
  add(across, bottom, tile);
  add(down, tile, right);
  add(1, bottom, right);
  return flops;
}

double ShapingFlops(const Rule& rule, int64_t rows, int64_t cols) {
  const auto m = static_cast<double>(std::min(rows, cols));
  const auto n = static_cast<double>(std::max(rows, cols));
  const auto k = static_cast<double>(ShapedDirections(rule, std::min(rows, cols)));
  const double apply = 4 * k * m * n;
  return kSubspaceRounds * (apply + 2 * k * k * (m + n)) + apply;
}

// Of a split, or of the selected part of a matrix.
double SplitFlops(const Rule& rule, int64_t rows, int64_t cols, StepKind kind) {
  const int64_t tile = TileAtStep(rule, rows, cols, std::numeric_limits<int64_t>::max(), kind);
  if (tile > 0) return TiledFlops(rule, rows, cols, tile);
  const bool shaped = rule.gain != 1 && kind == StepKind::kRefresh;
  return UnitFlops(rule, rows, cols) + (shaped ? ShapingFlops(rule, rows, cols) : 0);
}

double PoloraFlops(const Rule& rule, int64_t rows, int64_t cols) {
  const auto r = static_cast<double>(RankOf(rule, rows, cols));
  const double d = static_cast<double>(rows) * static_cast<double>(cols) / r;
  return UnitFlops(rule, rows, cols) + kPoloraProducts * r * r * d + kPoloraSmall * r * r * r;
}

// The kind of step that this really is: without a period every step is a refresh.
StepKind Kind(const Rule& rule, StepKind kind) {
  return rule.period == 1 ? StepKind::kRefresh : kind;
}

// Whether the vectors that a row-wise step normalises are cut by the shards.
bool RowWiseCrossesShards(const PlanMatrix& shard) {
  const bool rows_are_cut = shard.whole_rows >= shard.whole_cols;
  switch (shard.rule.row_axis) {
    case RowAxis::kRows:
      return !rows_are_cut;
    case RowAxis::kCols:
      return rows_are_cut;
    case RowAxis::kLong:
      return false;
    default:
      return shard.whole_rows != shard.whole_cols;
  }
}

// Products and traffic of a shard of a spectral rule's matrix.
void AddSharded(const PlanMatrix& shard, StepKind kind, Cost* cost) {
  const int64_t m = std::min(shard.whole_rows, shard.whole_cols);
  const int64_t n = std::max(shard.whole_rows, shard.whole_cols);
  const auto values = static_cast<double>(m);
  const auto shards = static_cast<double>(shard.shards);
  // Whole bytes, so that units stay integers.
  const auto sent = [&](double bytes) { return std::ceil(2 * (shards - 1) / shards * bytes); };
  if (kind == StepKind::kOffRefresh) {
    if (!RowWiseCrossesShards(shard)) return;
    cost->peer_bytes += sent(8 * (values + 1));  // and how many shards have a gradient
    cost->collectives += 1;
    return;
  }
  const Rule& rule = shard.rule;
  const int64_t longest = (n + shard.shards - 1) / shard.shards;  // of even shards
  const FormChoice choice = ChooseShardedForm(rule, shard.whole_rows, shard.whole_cols, longest);
  const auto sums =
      static_cast<double>(RefreshSums(rule, shard.whole_rows, shard.whole_cols, longest));
  const int64_t length = shard.whole_rows >= shard.whole_cols ? shard.rows : shard.cols;
  cost->flops +=
      ShardPolarFlops(m, length, choice.form, static_cast<int64_t>(PolarCoefficients(rule).size()),
                      static_cast<int64_t>(choice.restarts.size()));
  cost->peer_bytes += sums * sent(4 * values * values);
  cost->collectives += 1 + sums;
}

bool Orthogonalises(const Rule& rule, StepKind kind) {
  return rule.family == RuleFamily::kSpectral &&
         (kind == StepKind::kRefresh || rule.off_refresh == OffRefresh::kTiled);
}

}  // namespace

double PolarFlops(int64_t rows, int64_t cols, PolarForm form, int64_t steps, int64_t restarts,
                  bool symmetric_products) {
  const auto m = static_cast<double>(std::min(rows, cols));
  const auto n = static_cast<double>(std::max(rows, cols));
  const auto t = static_cast<double>(steps);
  const auto r = static_cast<double>(restarts);
  if (symmetric_products) return SymmetricFlops(m, n, form, t, r);
  const double square = m * m * m, oblong = m * m * n;
  return form == PolarForm::kStandard
             ? t * (4 * oblong + 2 * square)
             : (8 * t - 6) * square + 4 * oblong + r * (4 * oblong - 6 * square);
}

double ShardPolarFlops(int64_t m, int64_t n, PolarForm form, int64_t steps, int64_t restarts) {
  return SymmetricFlops(static_cast<double>(m), static_cast<double>(n), form,
                        static_cast<double>(steps), static_cast<double>(restarts));
}

FormChoice ChooseForm(const Rule& rule, int64_t rows, int64_t cols, bool low_precision) {
  const auto steps = static_cast<int64_t>(PolarCoefficients(rule).size());
  FormChoice choice;
  choice.restarts = GramRestarts(rule, std::min(rows, cols), low_precision);
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

FormChoice ChooseShardedForm(const Rule& rule, int64_t rows, int64_t cols, int64_t longest) {
  const int64_t m = std::min(rows, cols);
  const auto steps = static_cast<int64_t>(PolarCoefficients(rule).size());
  FormChoice choice;
  choice.restarts = GramRestarts(rule, m, /*low_precision=*/false);
  const auto restarts = static_cast<int64_t>(choice.restarts.size());
  choice.standard_flops = ShardPolarFlops(m, longest, PolarForm::kStandard, steps, 0);
  choice.gram_flops = ShardPolarFlops(m, longest, PolarForm::kGram, steps, restarts);
  const double of_sum =
      kFlopsPerPeerByte * kSumBytes * static_cast<double>(m) * static_cast<double>(m);
  const double standard = choice.standard_flops + static_cast<double>(steps) * of_sum;
  const double gram = choice.gram_flops + static_cast<double>(1 + restarts) * of_sum;
  if (rule.form != PolarForm::kAuto) {
    choice.form = rule.form;
    choice.reason = "the rule names the form";
  } else if (LongestRun(steps, choice.restarts) > kMaxGramRun) {
    choice.reason = "too many iterations between restarts for the Gram form's accuracy";
  } else if (gram >= standard) {
    choice.reason = "the Gram form would not save what its products cost";
  } else {
    choice.form = PolarForm::kGram;
    choice.reason = "the Gram form takes fewer sums over the shards";
  }
  return choice;
}

int64_t RefreshSums(const Rule& rule, int64_t rows, int64_t cols, int64_t longest) {
  if (rule.family != RuleFamily::kSpectral) return 0;
  const FormChoice choice = ChooseShardedForm(rule, rows, cols, longest);
  return choice.form == PolarForm::kGram ? 1 + static_cast<int64_t>(choice.restarts.size())
                                         : static_cast<int64_t>(PolarCoefficients(rule).size());
}

double ProductFlops(const Rule& rule, int64_t rows, int64_t cols, StepKind asked) {
  const StepKind kind = Kind(rule, asked);
  if (rule.family == RuleFamily::kPolora) return PoloraFlops(rule, rows, cols);
  if (!Orthogonalises(rule, kind)) return 0;
  if (rule.select_fraction < 1) {
    return SelectsColumns(rule, rows, cols)
               ? SplitFlops(rule, rows, SelectedVectors(rule, cols), kind)
               : SplitFlops(rule, SelectedVectors(rule, rows), cols, kind);
  }
  double flops = 0;
  for (int64_t split : SplitRows(rule, rows)) flops += SplitFlops(rule, split, cols, kind);
  return flops;
}

Cost StepCost(const PlanMatrix& matrix, StepKind asked) {
  const Rule& rule = matrix.rule;
  const StepKind kind = Kind(rule, asked);
  const double elements = static_cast<double>(matrix.rows) * static_cast<double>(matrix.cols);
  double state = 0;
  for (const StateBuffer& buffer : RuleState(rule, matrix.rows, matrix.cols)) {
    state += static_cast<double>(buffer.rows) * static_cast<double>(buffer.cols);
  }
  const auto push = static_cast<double>(DTypeSize(matrix.push_dtype));
  const auto pull = static_cast<double>(DTypeSize(matrix.pull_dtype));
  Cost cost;
  cost.flops = kElementFlops * elements;
  if (matrix.IsShard() && rule.family == RuleFamily::kSpectral) {
    AddSharded(matrix, kind, &cost);
  } else {
    cost.flops += ProductFlops(rule, matrix.rows, matrix.cols, kind);
  }
  cost.bytes = elements * (push + pull) + kStateReadAndWrite * state;
  if (rule.family == RuleFamily::kPolora) {
    cost.bytes += elements * (push + kStateReadAndWrite + kDirectionReadAndWrite);
  }
  if (rule.family != RuleFamily::kSpectral) return cost;
  const bool orthogonalises = Orthogonalises(rule, kind);
  const bool selects = rule.select_fraction < 1;
  if (orthogonalises || selects) cost.bytes += elements * kDirectionReadAndWrite;
  if (selects) cost.bytes += elements * kReadFp32;  // the norms
  if (orthogonalises && rule.row_variance_beta2.has_value()) {
    cost.bytes += elements * rule.select_fraction * kReadFp32;
  }
  if (!orthogonalises && rule.row_spectral_max > 0) {
    cost.flops += kPowerIterationPasses * 2 * elements;
    cost.bytes += kPowerIterationPasses * elements * kReadFp32;
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
