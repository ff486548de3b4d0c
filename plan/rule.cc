#include "plan/rule.h"

#include <algorithm>
#include <cmath>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "plan/nearest.h"

namespace stiefel {
namespace {

struct Preset {
  PresetInfo info;
  Rule (*make)();
};

Rule Spectral(MomentumKind momentum, double lr, double weight_decay, ScaleKind scale) {
  Rule rule;
  rule.family = RuleFamily::kSpectral;
  rule.momentum = momentum;
  rule.beta = 0.95;
  rule.nesterov = true;
  rule.lr = lr;
  rule.weight_decay = weight_decay;
  rule.scale = scale;
  return rule;
}

Rule Elementwise(RuleFamily family, double lr, double beta1, double beta2, double eps) {
  Rule rule;
  rule.family = family;
  rule.momentum = MomentumKind::kHeavyBall;
  rule.lr = lr;
  rule.beta1 = beta1;
  rule.beta2 = beta2;
  rule.eps = eps;
  return rule;
}

// Section 6. A preset is data: another one is another row here.
const std::vector<Preset>& PresetTable() {
  static const auto& table = *new std::vector<Preset>{
      {{"muon", "momentum, then an orthogonalised update every step",
        "github.com/KellerJordan/Muon"},
       [] { return Spectral(MomentumKind::kEma, 0.02, 0, ScaleKind::kOriginal); }},
      {{"muon_torch", "as torch.optim.Muon", "PyTorch 2.9 torch/optim/_muon.py"},
       [] {
         Rule rule = Spectral(MomentumKind::kEma, 1e-3, 0.1, ScaleKind::kOriginal);
         rule.eps_mode = EpsMode::kClamp;
         rule.eps = 1e-7;
         return rule;
       }},
      {{"muon_moonlight", "Muon scaled to AdamW's update RMS",
        "arXiv 2502.16982; github.com/MoonshotAI/Moonlight"},
       [] {
         Rule rule = Spectral(MomentumKind::kHeavyBall, 1e-3, 0.1, ScaleKind::kMatchRmsAdamw);
         rule.eps_mode = EpsMode::kAdd;
         rule.eps = 1e-7;
         return rule;
       }},
      {{"periodic_rowwise_muon", "muon every third step, row-normalised momentum in between",
        "arXiv 2608.20818"},
       [] {
         Rule rule = Spectral(MomentumKind::kEma, 0.02, 0, ScaleKind::kOriginal);
         rule.period = 3;
         return rule;
       }},
      {{"adamw", "bias-corrected Adam with decoupled weight decay", "arXiv 1711.05101"},
       [] { return Elementwise(RuleFamily::kAdamw, 1e-3, 0.9, 0.95, 1e-8); }},
      {{"lion", "sign of an interpolated momentum", "arXiv 2302.06675"},
       [] { return Elementwise(RuleFamily::kLion, 1e-4, 0.9, 0.99, 0); }},
      {{"sgd", "gradient descent with heavy-ball momentum", "Polyak 1964; torch.optim.SGD"},
       [] { return Elementwise(RuleFamily::kSgd, 0.1, 0, 0, 0); }},
  };
  return table;
}

// Presets of the update rules that this version does not have, so that asking for one says so.
constexpr std::string_view kLaterPresets[] = {"muonbp", "samuon", "samuon_lite", "cmuon",
                                              "dion2",  "dion3",  "normuon",     "turbo_muon",
                                              "himuon", "polora"};

absl::Status Contradiction(const Rule& rule) {
  if (rule.family == RuleFamily::kSpectral) {
    if (rule.phase_mode == PhaseMode::kNumber && rule.phase >= rule.period) {
      return absl::InvalidArgumentError(
          absl::StrCat("phase=", rule.phase, " is not below period=", rule.period));
    }
    if (rule.row_scale == RowScale::kRms && rule.row_rms <= 0) {
      return absl::InvalidArgumentError("row_scale=rms needs row_rms > 0");
    }
    if (rule.row_scale != RowScale::kRms && rule.row_rms != 0) {
      return absl::InvalidArgumentError(
          absl::StrCat("row_rms=", rule.row_rms, " has no effect unless row_scale=rms"));
    }
    if (rule.eps_mode == EpsMode::kNone && rule.eps != 0) {
      return absl::InvalidArgumentError(absl::StrCat(
          "eps=", rule.eps,
          " has no effect while eps_mode=none; set eps_mode to add or clamp, or eps=0"));
    }
    if (rule.coefficients == CoefficientTable::kList && rule.coefficient_list.empty()) {
      return absl::InvalidArgumentError("coefficients is a list without entries");
    }
    const bool list = rule.coefficients == CoefficientTable::kList;
    const int64_t entries =
        list ? static_cast<int64_t>(rule.coefficient_list.size())
             : static_cast<int64_t>(CoefficientTableOf(rule.coefficients).triples.size());
    const bool repeats = !list && CoefficientTableOf(rule.coefficients).last_repeats;
    if (rule.steps.has_value() && *rule.steps > entries && !repeats) {
      return absl::InvalidArgumentError(absl::StrCat("steps=", *rule.steps,
                                                     ", but the coefficient table has ", entries,
                                                     " entries and does not repeat"));
    }
    const int64_t steps = static_cast<int64_t>(PolarCoefficients(rule).size());
    for (int64_t restart : rule.restarts.value_or(std::vector<int64_t>{})) {
      if (restart >= steps) {
        return absl::InvalidArgumentError(absl::StrCat("restart before iteration ", restart,
                                                       ", but the last iteration is ", steps - 1));
      }
    }
  }
  return absl::OkStatus();
}

}  // namespace

const std::vector<PresetInfo>& Presets() {
  static const auto& infos = *[] {
    auto* infos = new std::vector<PresetInfo>();
    for (const Preset& preset : PresetTable()) infos->push_back(preset.info);
    return infos;
  }();
  return infos;
}

absl::StatusOr<Rule> PresetRule(std::string_view name) {
  std::vector<std::string_view> names;
  for (const Preset& preset : PresetTable()) {
    if (preset.info.name == name) {
      Rule rule = preset.make();
      rule.preset = std::string(name);
      return rule;
    }
    names.push_back(preset.info.name);
  }
  const std::string known =
      absl::StrJoin(names, ", ", [](std::string* out, std::string_view n) { out->append(n); });
  if (std::find(std::begin(kLaterPresets), std::end(kLaterPresets), name) !=
      std::end(kLaterPresets)) {
    return absl::InvalidArgumentError(
        absl::StrCat("preset \"", std::string(name), "\" is not in this version; it has ", known));
  }
  return absl::InvalidArgumentError(
      absl::StrCat("unknown preset \"", PrintableName(name), "\"; did you mean \"",
                   std::string(NearestName(name, names)), "\"? Known: ", known));
}

absl::Status ValidateRule(const Rule& rule, int64_t rows, int64_t cols, int dimensions) {
  int64_t elements = 0;
  if (rows <= 0 || cols <= 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("a matrix of ", rows, " x ", cols, " has no elements"));
  }
  if (__builtin_mul_overflow(rows, cols, &elements) || elements > (int64_t{1} << 58)) {
    return absl::InvalidArgumentError(
        absl::StrCat("the size of a matrix of ", rows, " x ", cols, " overflows"));
  }
  // Each option through its own check, since a Rule can also be filled by hand.
  absl::StatusOr<Rule> again = PresetRule(rule.preset);
  if (!again.ok()) return again.status();
  if (again->family != rule.family) {
    return absl::InvalidArgumentError(
        absl::StrCat("the family of rule ", rule.preset, " was changed"));
  }
  for (const auto& [key, value] : Options(rule)) {
    if (absl::Status status = SetOption(*again, key, value); !status.ok()) return status;
  }
  if (absl::Status status = Contradiction(rule); !status.ok()) return status;
  if (rule.family == RuleFamily::kSpectral && dimensions < 2) {
    return absl::InvalidArgumentError(absl::StrCat(
        "preset ", rule.preset, " orthogonalises matrices, but this parameter has ", dimensions,
        " dimension; use adamw, lion or sgd for it (or register it as a matrix)"));
  }
  return absl::OkStatus();
}

StepKind KindAtStep(const Rule& rule, int64_t phase, int64_t step) {
  return (step - 1) % rule.period == phase ? StepKind::kRefresh : StepKind::kOffRefresh;
}

std::vector<std::string> RuleState(const Rule& rule) {
  switch (rule.family) {
    case RuleFamily::kSpectral:
    case RuleFamily::kLion:
      return {"momentum"};
    case RuleFamily::kAdamw:
      return {"momentum", "variance"};
    case RuleFamily::kSgd:
      return rule.beta == 0 ? std::vector<std::string>{} : std::vector<std::string>{"momentum"};
  }
  return {};
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

std::vector<int64_t> GramRestarts(const Rule& rule, bool low_precision) {
  if (rule.restarts.has_value()) return *rule.restarts;
  const int64_t steps = static_cast<int64_t>(PolarCoefficients(rule).size());
  std::vector<int64_t> restarts;
  for (int64_t t : low_precision ? std::vector<int64_t>{2, 4} : std::vector<int64_t>{2}) {
    if (t < steps) restarts.push_back(t);
  }
  return restarts;
}

std::string DescribeRule(const Rule& rule) {
  std::string text = rule.preset;
  for (const auto& [key, value] : ChangedOptions(rule))
    absl::StrAppend(&text, " ", key, "=", value);
  return text;
}

}  // namespace stiefel
