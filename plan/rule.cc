#include "plan/rule.h"

#include <algorithm>
#include <cmath>

#include "absl/strings/str_cat.h"

namespace stiefel {
namespace {

bool Damps(const Rule& rule) { return rule.select_fraction < 1 || rule.damping != 1; }

// The state of a spectral rule beside its momentum.
void AddSpectralState(const Rule& rule, int64_t rows, int64_t cols,
                      std::vector<StateBuffer>* state) {
  if (Damps(rule)) {
    const bool columns = SelectsColumns(rule, rows, cols);
    state->push_back({"selected", columns ? 1 : rows, columns ? cols : 1, false});
  }
  if (rule.row_variance_beta2.has_value()) state->push_back({"row_variance", rows, 1, false});
  if (rule.gain != 1) {
    int64_t entries = 0;
    for (int64_t split : SplitRows(rule, rows)) {
      const int64_t d = std::min(split, cols);
      entries += ShapedDirections(rule, d) * d;
    }
    state->push_back({"leading_directions", 1, entries, false});
  }
}

}  // namespace

StepKind KindAtStep(const Rule& rule, int64_t phase, int64_t step) {
  return (step - 1) % rule.period == phase ? StepKind::kRefresh : StepKind::kOffRefresh;
}

std::vector<StateBuffer> RuleState(const Rule& rule, int64_t rows, int64_t cols) {
  std::vector<StateBuffer> state;
  if (rule.family != RuleFamily::kSgd || rule.beta > 0) {
    state.push_back({"momentum", rows, cols, true});
  }
  if (rule.family == RuleFamily::kAdamw) state.push_back({"variance", rows, cols, true});
  if (rule.family == RuleFamily::kSpectral) AddSpectralState(rule, rows, cols, &state);
  if (rule.family == RuleFamily::kPolora) {
    const bool a = FactorOf(rule, rows, cols).value_or(PoloraFactor::kA) == PoloraFactor::kA;
    state.push_back({"factor_variance", a ? 1 : rows, a ? cols : 1, false});
  }
  return state;
}

double ScaleFactor(const Rule& rule, int64_t rows, int64_t cols) {
  if (rule.family != RuleFamily::kSpectral) return 1;
  const double r = static_cast<double>(rows), c = static_cast<double>(cols);
  switch (rule.scale) {
    case ScaleKind::kNone:
      return 1;
    case ScaleKind::kOriginal:
      return std::sqrt(std::max(1.0, r / c));
    case ScaleKind::kMatchRmsAdamw:
      return 0.2 * std::sqrt(std::max(r, c));
    case ScaleKind::kSpectral:
      return std::sqrt(r / c);
    case ScaleKind::kSpectralMax:
      return std::sqrt(std::max(r, c));
    case ScaleKind::kNumber:
      return rule.scale_number;
  }
  return 1;
}

std::vector<int64_t> SplitRows(const Rule& rule, int64_t rows) {
  if (!rule.splits.empty()) return rule.splits;
  return std::vector<int64_t>(rule.num_heads, rows / rule.num_heads);
}

Rule RuleOfSplit(const Rule& rule, int64_t rows, int64_t cols) {
  Rule alone = rule;
  alone.splits.clear();
  alone.num_heads = 1;
  if (rule.family == RuleFamily::kSpectral && rule.scale_of == ScaleOf::kFull) {
    alone.scale = ScaleKind::kNumber;
    alone.scale_number = ScaleFactor(rule, rows, cols);
    alone.scale_of = ScaleOf::kSplit;
  }
  return alone;
}

int64_t TileAtStep(const Rule& rule, int64_t rows, int64_t cols, int64_t step, StepKind kind) {
  const bool tiled_kind = rule.off_refresh == OffRefresh::kTiled ? StepKind::kOffRefresh == kind
                                                                 : StepKind::kRefresh == kind;
  int64_t tile = 0;
  for (const TileFrom& from : rule.tiles) {
    if (tiled_kind && from.step <= step) tile = from.tile;
  }
  if (tile == 0) return 0;
  return cols <= tile * tile / rows ? 0 : tile;  // rows * cols <= tile * tile, without overflow
}

double StepScale(const Rule& rule, int64_t rows, int64_t cols, int64_t step, StepKind kind) {
  const int64_t tile =
      rule.scale_of == ScaleOf::kTile ? TileAtStep(rule, rows, cols, step, kind) : 0;
  const double scale = tile > 0 ? ScaleFactor(rule, tile, tile) : ScaleFactor(rule, rows, cols);
  return kind == StepKind::kOffRefresh ? scale * rule.off_refresh_lr_ratio : scale;
}

int64_t SelectedVectors(const Rule& rule, int64_t vectors) {
  const auto wanted =
      static_cast<int64_t>(std::ceil(rule.select_fraction * static_cast<double>(vectors)));
  return std::clamp<int64_t>(wanted, 1, vectors);
}

bool SelectsColumns(const Rule& rule, int64_t rows, int64_t cols) {
  return rule.select_axis == SelectAxis::kShort && cols < rows;
}

int64_t ShapedDirections(const Rule& rule, int64_t d) {
  const auto published =
      static_cast<int64_t>(std::floor(32 * std::sqrt(static_cast<double>(d) / 512)));
  return std::clamp<int64_t>(rule.shaped_directions.value_or(published), 1, d);
}

double ShapingWeight(const Rule& rule, int64_t step) {
  if (rule.warmup == 0 || step >= rule.warmup) return 1;
  const double done = static_cast<double>(step) / static_cast<double>(rule.warmup);
  return (1 - std::cos(std::acos(-1.0) * done)) / 2;
}

absl::StatusOr<PoloraFactor> FactorOf(const Rule& rule, int64_t rows, int64_t cols) {
  if (rule.factor.has_value()) return *rule.factor;
  if (rows == cols) {
    return absl::InvalidArgumentError(absl::StrCat(
        "a square factor of ", rows, " x ", cols,
        " can be either side of the product: set factor to a (r x d_in) or b (d_out x r)"));
  }
  return rows < cols ? PoloraFactor::kA : PoloraFactor::kB;
}

int64_t RankOf(const Rule& rule, int64_t rows, int64_t cols) {
  return FactorOf(rule, rows, cols).value_or(PoloraFactor::kA) == PoloraFactor::kA ? rows : cols;
}

bool NeedsWeights(const Rule& rule) { return rule.family == RuleFamily::kPolora; }

std::vector<Coefficients> PolarCoefficients(const Rule& rule) {
  if (rule.coefficients == CoefficientTable::kList) {
    return Schedule(rule.coefficient_list,
                    rule.steps.value_or(static_cast<int64_t>(rule.coefficient_list.size())),
                    rule.safety.value_or(1));
  }
  const CoefficientTableInfo& info = CoefficientTableOf(rule.coefficients);
  return Schedule(info.triples, rule.steps.value_or(info.default_steps),
                  rule.safety.value_or(info.default_safety));
}

std::vector<int64_t> GramRestarts(const Rule& rule, int64_t short_side, bool low_precision) {
  if (rule.restarts.has_value()) return *rule.restarts;
  std::vector<int64_t> restarts = {2};
  if (low_precision) {
    restarts = {2, 4};
  } else if (rule.coefficients == CoefficientTable::kPolarExpress) {
    restarts = short_side < 64 ? std::vector<int64_t>{1, 2, 3} : std::vector<int64_t>{3};
  }
  const auto steps = static_cast<int64_t>(PolarCoefficients(rule).size());
  restarts.erase(
      std::remove_if(restarts.begin(), restarts.end(), [&](int64_t t) { return t >= steps; }),
      restarts.end());
  return restarts;
}

std::string DescribeRule(const Rule& rule) {
  std::string text = rule.preset;
  for (const auto& [key, value] : ChangedOptions(rule))
    absl::StrAppend(&text, " ", key, "=", value);
  return text;
}

}  // namespace stiefel
