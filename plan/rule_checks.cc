// What ValidateRule and ValidatePair refuse, and why.
#include <algorithm>
#include <cmath>
#include <limits>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "common/status.h"
#include "plan/nearest.h"
#include "plan/rule.h"

namespace stiefel {
namespace {

template <typename... Parts>
absl::Status Refuse(const Parts&... parts) {
  return absl::InvalidArgumentError(absl::StrCat(parts...));
}

bool Selects(const Rule& rule) { return rule.select_fraction < 1 || rule.damping != 1; }
bool IsSplit(const Rule& rule) { return !rule.splits.empty() || rule.num_heads > 1; }

// What only steps between refreshes would use, where neither the rule nor its preset has any.
absl::Status CheckWithoutPeriod(const Rule& rule, const Rule& base) {
  const struct {
    const char* option;
    bool changed;
  } options[] = {{"phase=synchronised", rule.phase_mode == PhaseMode::kSynchronised},
                 {"off_refresh_lr_ratio", rule.off_refresh_lr_ratio != base.off_refresh_lr_ratio},
                 {"row_scale", rule.row_scale != base.row_scale},
                 {"row_axis", rule.row_axis != base.row_axis},
                 {"row_spectral_max", rule.row_spectral_max != base.row_spectral_max}};
  for (const auto& [option, changed] : options) {
    if (changed) {
      return Refuse(option, " has no effect with period=1: every step is a refresh; set a period");
    }
  }
  return absl::OkStatus();
}

absl::Status CheckPeriod(const Rule& rule, const Rule& base) {
  if (rule.phase_mode == PhaseMode::kNumber && rule.phase >= rule.period) {
    return Refuse("phase=", rule.phase, " is not below period=", rule.period);
  }
  if (rule.row_scale == RowScale::kRms && rule.row_rms <= 0) {
    return Refuse("row_scale=rms needs row_rms > 0");
  }
  if (rule.row_scale != RowScale::kRms && rule.row_rms != 0) {
    return Refuse("row_rms=", rule.row_rms, " has no effect unless row_scale=rms");
  }
  if (rule.period == 1 && base.period == 1) {
    STIEFEL_RETURN_IF_ERROR(CheckWithoutPeriod(rule, base));
  }
  if (rule.off_refresh != OffRefresh::kTiled) return absl::OkStatus();
  if (rule.tiles.empty()) {
    return Refuse("off_refresh=tiled needs a tile, such as tile=512; tile=none");
  }
  if (rule.period == 1 && base.period == 1) {
    return Refuse("off_refresh=tiled has no effect with period=1: every step is a refresh");
  }
  if (rule.row_scale != RowScale::kMatchPolarFro || rule.row_axis != RowAxis::kRows ||
      rule.row_spectral_max != 0) {
    return Refuse(
        "row_scale, row_axis and row_spectral_max have no effect with off_refresh=tiled, which has "
        "no row-wise steps; leave them at match_polar_fro, rows and 0");
  }
  return absl::OkStatus();
}

absl::Status CheckMomentum(const Rule& rule, const Rule& base) {
  if (rule.momentum != MomentumKind::kAccumulate) return absl::OkStatus();
  if (rule.nesterov) {
    return Refuse(
        "nesterov=true has no meaning with momentum=accumulate, which weighs all gradients alike; "
        "set nesterov=false");
  }
  if (rule.beta != base.beta) {
    return Refuse("beta=", rule.beta,
                  " has no effect with momentum=accumulate; damping is what shrinks it");
  }
  return absl::OkStatus();
}

absl::Status CheckPolar(const Rule& rule, const Rule& base) {
  if (rule.eps_mode == EpsMode::kNone && rule.eps != 0) {
    return Refuse("eps=", rule.eps,
                  " has no effect while eps_mode=none; set eps_mode to add or clamp, or eps=0");
  }
  if (rule.eps_mode != EpsMode::kNone && base.eps_mode == EpsMode::kNone && rule.eps == 0) {
    return Refuse("eps_mode=", rule.eps_mode == EpsMode::kAdd ? "add" : "clamp",
                  " has no effect while eps=0; set eps, such as eps=1e-7");
  }
  if (rule.normalise == Normalise::kAol && rule.eps_mode != EpsMode::kNone) {
    return Refuse("eps_mode=", rule.eps_mode == EpsMode::kAdd ? "add" : "clamp",
                  " with eps=", rule.eps,
                  " acts on the Frobenius norm, by which normalise=aol does not divide; "
                  "set eps_mode=none and eps=0");
  }
  if (rule.coefficients == CoefficientTable::kList && rule.coefficient_list.empty()) {
    return Refuse("coefficients is a list without entries");
  }
  const bool list = rule.coefficients == CoefficientTable::kList;
  const int64_t entries =
      list ? static_cast<int64_t>(rule.coefficient_list.size())
           : static_cast<int64_t>(CoefficientTableOf(rule.coefficients).triples.size());
  const bool repeats = !list && CoefficientTableOf(rule.coefficients).last_repeats;
  if (rule.steps.has_value() && *rule.steps > entries && !repeats) {
    return Refuse("steps=", *rule.steps, ", but the coefficient table has ", entries,
                  " entries and does not repeat");
  }
  if (rule.form == PolarForm::kStandard && rule.restarts.has_value()) {
    return Refuse("restarts=", rule.restarts->empty() ? "none" : absl::StrJoin(*rule.restarts, ","),
                  " has no effect with form=standard, which never restarts; leave it auto");
  }
  const int64_t steps = static_cast<int64_t>(PolarCoefficients(rule).size());
  for (int64_t restart : rule.restarts.value_or(std::vector<int64_t>{})) {
    if (restart >= steps) {
      return Refuse("restart before iteration ", restart, ", but the last iteration is ",
                    steps - 1);
    }
  }
  return absl::OkStatus();
}

absl::Status CheckSplits(const Rule& rule, int64_t rows) {
  if (!rule.splits.empty() && rule.num_heads > 1) {
    return Refuse("splits=", absl::StrJoin(rule.splits, ","), " and num_heads=", rule.num_heads,
                  " both cut the rows; set one of them");
  }
  int64_t sum = 0;
  for (int64_t split : rule.splits) {
    if (__builtin_add_overflow(sum, split, &sum)) return Refuse("the sum of splits overflows");
  }
  if (!rule.splits.empty() && sum != rows) {
    return Refuse("splits=", absl::StrJoin(rule.splits, ","), " add up to ", sum,
                  ", but the matrix has ", rows, " rows");
  }
  if (rows % rule.num_heads != 0) {
    return Refuse("num_heads=", rule.num_heads, " does not divide the ", rows,
                  " rows of the matrix");
  }
  return absl::OkStatus();
}

absl::Status CheckSelection(const Rule& rule, const Rule& base) {
  if (rule.select_axis == SelectAxis::kShort && rule.select_fraction == 1 &&
      base.select_fraction == 1) {
    return Refuse("select_axis=short has no effect with select_fraction=1: all is selected");
  }
  if (!Selects(rule)) return absl::OkStatus();
  const std::string what =
      absl::StrCat("select_fraction=", rule.select_fraction, ", damping=", rule.damping);
  if (IsSplit(rule)) {
    return Refuse(what,
                  " with splits or num_heads: rows are selected over the whole matrix, so "
                  "the selected part of a split is not known beforehand; register the splits as "
                  "matrices of their own");
  }
  if (!rule.tiles.empty()) {
    return Refuse(what,
                  " with tile: selected rows do not stay on the grid of tiles; set "
                  "tile=none, or select_fraction=1 and damping=1");
  }
  if (rule.gain != 1) {
    return Refuse(what, " with gain=", rule.gain,
                  ": the leading directions of one step's rows say "
                  "nothing of the next step's; set gain=1, or select_fraction=1 and damping=1");
  }
  return absl::OkStatus();
}

// The least value of the polar map on [0.01, 1], the range that the envelopes of section 2 state.
double LeastSingularValue(const Rule& rule) {
  constexpr int kPoints = 20000;
  const std::vector<Coefficients> schedule = PolarCoefficients(rule);
  double least = std::numeric_limits<double>::infinity();
  for (int i = 0; i <= kPoints; ++i) {
    double x = std::pow(10.0, -2.0 * i / kPoints);
    for (const Coefficients& t : schedule) {
      const double square = x * x;
      x *= t.a + square * (t.b + square * t.c);
    }
    least = std::min(least, x);
  }
  return least;
}

absl::Status CheckShaping(const Rule& rule, const Rule& base) {
  if (rule.gain == 1) {
    const bool unused = rule.shaped_directions.has_value() || rule.warmup != 0 ||
                        rule.deflation != Deflation::kConsistent;
    if (unused && base.gain == 1) {
      return Refuse(
          "shaped_directions, warmup and deflation have no effect with gain=1, which shapes "
          "nothing");
    }
    return absl::OkStatus();
  }
  if (!rule.tiles.empty() && rule.off_refresh != OffRefresh::kTiled) {
    return Refuse("gain=", rule.gain,
                  " with tile: the leading directions are those of a whole "
                  "matrix; set gain=1 or tile=none, or tile only the steps between refreshes "
                  "(off_refresh=tiled)");
  }
  if (rule.normalise == Normalise::kAol) {
    return Refuse("gain=", rule.gain,
                  " with normalise=aol: the update has the directions of the "
                  "preconditioned momentum, not its own; set gain=1 or normalise=frobenius");
  }
  if (rule.deflation == Deflation::kPaper) {
    const double least = LeastSingularValue(rule);
    if (rule.gain * (1 - least) >= 1) {
      return Refuse("deflation=paper with gain=", rule.gain,
                    " can reverse the leading direction: "
                    "these coefficients leave singular values of ",
                    least, ", and ", rule.gain, " x (1 - ", least,
                    ") >= 1; set deflation=consistent, a gain below ", 1 / (1 - least),
                    ", or more steps");
    }
  }
  return absl::OkStatus();
}

absl::Status CheckSpectral(const Rule& rule, const Rule& base, int64_t rows) {
  STIEFEL_RETURN_IF_ERROR(CheckPeriod(rule, base));
  STIEFEL_RETURN_IF_ERROR(CheckMomentum(rule, base));
  STIEFEL_RETURN_IF_ERROR(CheckPolar(rule, base));
  STIEFEL_RETURN_IF_ERROR(CheckSplits(rule, rows));
  STIEFEL_RETURN_IF_ERROR(CheckSelection(rule, base));
  STIEFEL_RETURN_IF_ERROR(CheckShaping(rule, base));
  if (rule.scale_of == ScaleOf::kTile && rule.tiles.empty()) {
    return Refuse("scale_of=tile needs a tile, such as tile=512");
  }
  if (!rule.row_variance_beta2.has_value() && !base.row_variance_beta2.has_value() &&
      rule.row_variance_eps != base.row_variance_eps) {
    return Refuse("row_variance_eps=", rule.row_variance_eps,
                  " has no effect while row_variance_beta2=none");
  }
  return absl::OkStatus();
}

// What the two factors of a product must agree on: everything but the name of the other one and
// which of the two they are.
std::vector<std::pair<std::string, std::string>> SharedOptions(const Rule& rule) {
  Rule shared = rule;
  shared.pair.clear();
  shared.factor.reset();
  return Options(shared);
}

}  // namespace

absl::Status ValidateRule(const Rule& rule, int64_t rows, int64_t cols, int dimensions) {
  int64_t elements = 0;
  if (rows <= 0 || cols <= 0) {
    return Refuse("a matrix of ", rows, " x ", cols, " has no elements");
  }
  if (__builtin_mul_overflow(rows, cols, &elements) || elements > (int64_t{1} << 58)) {
    return Refuse("the size of a matrix of ", rows, " x ", cols, " overflows");
  }
  STIEFEL_ASSIGN_OR_RETURN(const Rule base, PresetRule(rule.preset));
  if (base.family != rule.family) {
    return Refuse("the family of rule ", rule.preset, " was changed");
  }
  // Each option through its own check, since a Rule can also be filled by hand.
  Rule again = base;
  for (const auto& [key, value] : Options(rule)) {
    STIEFEL_RETURN_IF_ERROR(SetOption(again, key, value));
  }
  const bool spectral = rule.family == RuleFamily::kSpectral;
  const bool polora = rule.family == RuleFamily::kPolora;
  if (spectral) STIEFEL_RETURN_IF_ERROR(CheckSpectral(rule, base, rows));
  if (polora) {
    STIEFEL_RETURN_IF_ERROR(CheckPolar(rule, base));
    STIEFEL_RETURN_IF_ERROR(FactorOf(rule, rows, cols).status());
  }
  if ((spectral || polora) && dimensions < 2) {
    return Refuse("preset ", rule.preset, " orthogonalises matrices, but this parameter has ",
                  dimensions,
                  " dimension; use adamw, lion or sgd for it (or register it as a matrix)");
  }
  return absl::OkStatus();
}

absl::Status ValidatePair(const std::string& name, const Rule& rule, int64_t rows, int64_t cols,
                          const std::string& other_name, const Rule& other, int64_t other_rows,
                          int64_t other_cols) {
  const std::string both =
      absl::StrCat("polora pair ", PrintableName(name), " (", rows, " x ", cols, ") and ",
                   PrintableName(other_name), " (", other_rows, " x ", other_cols, "): ");
  if (rule.family != RuleFamily::kPolora || other.family != RuleFamily::kPolora) {
    return Refuse(both, "the presets are ", rule.preset, " and ", other.preset,
                  "; both must be polora");
  }
  if (name == other_name) return Refuse(both, "a factor cannot be its own partner");
  if (rule.pair != other_name || other.pair != name) {
    return Refuse(both, "they must name each other, but pair is \"", PrintableName(rule.pair),
                  "\" and \"", PrintableName(other.pair), "\"");
  }
  STIEFEL_ASSIGN_OR_RETURN(const PoloraFactor factor, FactorOf(rule, rows, cols));
  STIEFEL_ASSIGN_OR_RETURN(const PoloraFactor other_factor,
                           FactorOf(other, other_rows, other_cols));
  if (factor == other_factor) {
    return Refuse(both, "both are factor ", factor == PoloraFactor::kA ? "a" : "b",
                  "; set factor=a on the one that is r x d_in and factor=b on the d_out x r one");
  }
  const bool first_is_a = factor == PoloraFactor::kA;
  const int64_t rank_of_a = first_is_a ? rows : other_rows;
  const int64_t rank_of_b = first_is_a ? other_cols : cols;
  if (rank_of_a != rank_of_b) {
    return Refuse(both, "factor a has ", rank_of_a, " rows, but factor b has ", rank_of_b,
                  " columns; both must be the rank of the product");
  }
  const auto mine = SharedOptions(rule), theirs = SharedOptions(other);
  for (size_t i = 0; i < mine.size(); ++i) {
    if (mine[i] != theirs[i]) {
      return Refuse(both, mine[i].first, " is ", mine[i].second, " and ", theirs[i].second,
                    "; the options of the two must be equal");
    }
  }
  return absl::OkStatus();
}

}  // namespace stiefel
