// The option table: one row per option name of the update rules (section 8).
#include <cmath>
#include <functional>
#include <limits>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "plan/nearest.h"
#include "plan/rule.h"

namespace stiefel {
namespace {

constexpr int64_t kMaxSteps = 64;
constexpr int64_t kMaxPeriod = 1000000;
constexpr double kInfinity = std::numeric_limits<double>::infinity();

// Families as a bit set.
constexpr unsigned Bit(RuleFamily family) { return 1u << static_cast<unsigned>(family); }
constexpr unsigned kSpectralOnly = Bit(RuleFamily::kSpectral);
constexpr unsigned kAdamwOnly = Bit(RuleFamily::kAdamw);
constexpr unsigned kLionOnly = Bit(RuleFamily::kLion);
constexpr unsigned kSgdOnly = Bit(RuleFamily::kSgd);
constexpr unsigned kAll = kSpectralOnly | kAdamwOnly | kLionOnly | kSgdOnly;

using Setter = std::function<absl::Status(Rule&, std::string_view value)>;
using Getter = std::function<std::string(const Rule&)>;

struct Option {
  std::string_view key;
  unsigned families;           // that use it
  std::string_view otherwise;  // why the others cannot
  Setter set;
  Getter get;
};

void AppendName(std::string* out, std::string_view name) { out->append(name); }

absl::Status BadValue(std::string_view value, std::string_view accepted) {
  return absl::InvalidArgumentError(
      absl::StrCat("value \"", PrintableName(value), "\" is not ", std::string(accepted)));
}

// The shortest text that reads back as the same double.
std::string NumberText(double number) {
  for (int digits = 6; digits < 17; ++digits) {
    std::string text = absl::StrFormat("%.*g", digits, number);
    double back = 0;
    if (absl::SimpleAtod(text, &back) && back == number) return text;
  }
  return absl::StrFormat("%.17g", number);
}

bool ParseNumber(std::string_view value, double* number) {
  return absl::SimpleAtod(absl::string_view(value.data(), value.size()), number) &&
         std::isfinite(*number);
}

bool ParseInteger(std::string_view value, int64_t* number) {
  return absl::SimpleAtoi(absl::string_view(value.data(), value.size()), number);
}

// A number in [low, high), or [low, infinity).
std::pair<Setter, Getter> Number(double Rule::*field, double low, double high = kInfinity) {
  return {[=](Rule& rule, std::string_view value) {
            double number = 0;
            if (!ParseNumber(value, &number) || number < low || number >= high) {
              return BadValue(value, high == kInfinity
                                         ? absl::StrCat("a finite number >= ", low)
                                         : absl::StrCat("a number in [", low, ", ", high, ")"));
            }
            rule.*field = number == 0 ? 0 : number;  // no negative zero
            return absl::OkStatus();
          },
          [=](const Rule& rule) { return NumberText(rule.*field); }};
}

template <typename E>
struct Choice {
  std::string_view name;
  E value;
};

template <typename E>
std::string ChoiceNames(const std::vector<Choice<E>>& choices) {
  return absl::StrJoin(choices, " | ", [](std::string* out, const Choice<E>& choice) {
    absl::StrAppend(out, std::string(choice.name));
  });
}

template <typename E>
std::string NameOf(const std::vector<Choice<E>>& choices, E value) {
  for (const Choice<E>& choice : choices) {
    if (choice.value == value) return std::string(choice.name);
  }
  return "?";
}

template <typename E>
std::pair<Setter, Getter> OneOf(E Rule::*field, std::vector<Choice<E>> choices) {
  return {[=](Rule& rule, std::string_view value) {
            for (const Choice<E>& choice : choices) {
              if (choice.name == value) {
                rule.*field = choice.value;
                return absl::OkStatus();
              }
            }
            return BadValue(value, absl::StrCat("one of ", ChoiceNames(choices)));
          },
          [=](const Rule& rule) { return NameOf(choices, rule.*field); }};
}

std::pair<Setter, Getter> Nesterov() {
  return {[](Rule& rule, std::string_view value) {
            if (value != "true" && value != "false" && value != "1" && value != "0") {
              return BadValue(value, "true or false");
            }
            rule.nesterov = value == "true" || value == "1";
            return absl::OkStatus();
          },
          [](const Rule& rule) { return std::string(rule.nesterov ? "true" : "false"); }};
}

std::pair<Setter, Getter> Period() {
  return {[](Rule& rule, std::string_view value) {
            int64_t number = 0;
            if (!ParseInteger(value, &number) || number < 1 || number > kMaxPeriod) {
              return BadValue(value, absl::StrCat("a number of steps from 1 to ", kMaxPeriod));
            }
            rule.period = number;
            return absl::OkStatus();
          },
          [](const Rule& rule) { return absl::StrCat(rule.period); }};
}

std::pair<Setter, Getter> Phase() {
  return {
      [](Rule& rule, std::string_view value) {
        int64_t number = 0;
        if (value == "staggered" || value == "synchronised") {
          rule.phase_mode = value == "staggered" ? PhaseMode::kStaggered : PhaseMode::kSynchronised;
          rule.phase = 0;
          return absl::OkStatus();
        }
        if (!ParseInteger(value, &number) || number < 0 || number >= kMaxPeriod) {
          return BadValue(value, "staggered, synchronised or a number from 0 to period - 1");
        }
        rule.phase_mode = PhaseMode::kNumber;
        rule.phase = number;
        return absl::OkStatus();
      },
      [](const Rule& rule) {
        if (rule.phase_mode == PhaseMode::kNumber) return absl::StrCat(rule.phase);
        return std::string(rule.phase_mode == PhaseMode::kStaggered ? "staggered" : "synchronised");
      }};
}

std::pair<Setter, Getter> OffRefresh() {
  return {[](Rule&, std::string_view value) {
            if (value == "row_wise") return absl::OkStatus();
            if (value == "tiled") {
              return absl::InvalidArgumentError(
                  "value \"tiled\" belongs to preset muonbp, which is not in this version; use "
                  "row_wise");
            }
            return BadValue(value, "row_wise");
          },
          [](const Rule&) { return std::string("row_wise"); }};
}

// "a,b,c;a,b,c"
bool ParseCoefficients(std::string_view value, std::vector<Coefficients>* triples) {
  for (absl::string_view part :
       absl::StrSplit(absl::string_view(value.data(), value.size()), ';')) {
    const std::vector<std::string> numbers = absl::StrSplit(part, ',');
    Coefficients triple;
    if (numbers.size() != 3 || !ParseNumber(numbers[0], &triple.a) ||
        !ParseNumber(numbers[1], &triple.b) || !ParseNumber(numbers[2], &triple.c)) {
      return false;
    }
    triples->push_back(triple);
  }
  return static_cast<int64_t>(triples->size()) <= kMaxSteps;
}

std::pair<Setter, Getter> CoefficientsOption() {
  return {[](Rule& rule, std::string_view value) {
            std::vector<std::string_view> names;
            for (const CoefficientTableInfo& info : CoefficientTables()) {
              names.push_back(info.name);
              if (info.name == value) {
                rule.coefficients = info.table;
                rule.coefficient_list.clear();
                return absl::OkStatus();
              }
            }
            std::vector<Coefficients> triples;
            if (!ParseCoefficients(value, &triples)) {
              return BadValue(value,
                              absl::StrCat("one of ", absl::StrJoin(names, " | ", AppendName),
                                           ", or a list \"a,b,c;a,b,c\" of at most ", kMaxSteps,
                                           " triples of finite numbers"));
            }
            rule.coefficients = CoefficientTable::kList;
            rule.coefficient_list = std::move(triples);
            return absl::OkStatus();
          },
          [](const Rule& rule) {
            if (rule.coefficients != CoefficientTable::kList) {
              return std::string(CoefficientTableOf(rule.coefficients).name);
            }
            return absl::StrJoin(
                rule.coefficient_list, ";", [](std::string* out, const Coefficients& t) {
                  absl::StrAppend(out, NumberText(t.a), ",", NumberText(t.b), ",", NumberText(t.c));
                });
          }};
}

std::pair<Setter, Getter> Steps() {
  return {[](Rule& rule, std::string_view value) {
            int64_t number = 0;
            if (!ParseInteger(value, &number) || number < 1 || number > kMaxSteps) {
              return BadValue(value, absl::StrCat("a number of iterations from 1 to ", kMaxSteps));
            }
            rule.steps = number;
            return absl::OkStatus();
          },
          [](const Rule& rule) {
            return absl::StrCat(rule.steps.value_or(PolarCoefficients(rule).size()));
          }};
}

std::pair<Setter, Getter> Safety() {
  return {[](Rule& rule, std::string_view value) {
            double number = 0;
            if (!ParseNumber(value, &number) || number < 1 || number > 2) {
              return BadValue(value, "a number from 1 to 2");
            }
            rule.safety = number;
            return absl::OkStatus();
          },
          [](const Rule& rule) {
            const bool list = rule.coefficients == CoefficientTable::kList;
            return NumberText(rule.safety.value_or(
                list ? 1 : CoefficientTableOf(rule.coefficients).default_safety));
          }};
}

std::pair<Setter, Getter> Normalise() {
  return {[](Rule&, std::string_view value) {
            if (value == "frobenius") return absl::OkStatus();
            if (value == "aol") {
              return absl::InvalidArgumentError(
                  "value \"aol\" belongs to preset turbo_muon, which is not in this version; use "
                  "frobenius");
            }
            return BadValue(value, "frobenius");
          },
          [](const Rule&) { return std::string("frobenius"); }};
}

std::pair<Setter, Getter> Restarts() {
  return {
      [](Rule& rule, std::string_view value) {
        if (value == "auto") {
          rule.restarts.reset();
          return absl::OkStatus();
        }
        std::vector<int64_t> restarts;
        if (value != "none") {
          for (absl::string_view part :
               absl::StrSplit(absl::string_view(value.data(), value.size()), ',')) {
            int64_t number = 0;
            if (!absl::SimpleAtoi(part, &number) || number < 1 || number >= kMaxSteps ||
                (!restarts.empty() && number <= restarts.back())) {
              return BadValue(value, "auto, none or an increasing list of iterations, such as 2,4");
            }
            restarts.push_back(number);
          }
        }
        rule.restarts = std::move(restarts);
        return absl::OkStatus();
      },
      [](const Rule& rule) {
        if (!rule.restarts.has_value()) return std::string("auto");
        return rule.restarts->empty() ? std::string("none") : absl::StrJoin(*rule.restarts, ",");
      }};
}

std::pair<Setter, Getter> Scale() {
  const std::vector<Choice<ScaleKind>> named = {{"none", ScaleKind::kNone},
                                                {"original", ScaleKind::kOriginal},
                                                {"match_rms_adamw", ScaleKind::kMatchRmsAdamw},
                                                {"spectral", ScaleKind::kSpectral},
                                                {"spectral_max", ScaleKind::kSpectralMax}};
  const auto by_name = OneOf(&Rule::scale, named);
  return {[=](Rule& rule, std::string_view value) {
            double number = 0;
            if (by_name.first(rule, value).ok()) {
              rule.scale_number = 1;
              return absl::OkStatus();
            }
            if (!ParseNumber(value, &number) || number <= 0) {
              return BadValue(
                  value, absl::StrCat("one of ", ChoiceNames(named), ", or a finite number > 0"));
            }
            rule.scale = ScaleKind::kNumber;
            rule.scale_number = number;
            return absl::OkStatus();
          },
          [=](const Rule& rule) {
            return rule.scale == ScaleKind::kNumber ? NumberText(rule.scale_number)
                                                    : by_name.second(rule);
          }};
}

Option Row(std::string_view key, unsigned families, std::string_view otherwise,
           std::pair<Setter, Getter> access) {
  return {key, families, otherwise, std::move(access.first), std::move(access.second)};
}

constexpr std::string_view kNoPolar = "it works element by element and orthogonalises nothing";
constexpr std::string_view kNoPeriod = "it works element by element, alike in every step";

const std::vector<Option>& OptionTable() {
  static const auto& table = *new std::vector<Option>{
      Row("lr", kAll, "", Number(&Rule::lr, 0)),
      Row("weight_decay", kAll, "", Number(&Rule::weight_decay, 0)),
      Row("momentum", kSpectralOnly, "its kind of momentum is fixed",
          OneOf(&Rule::momentum,
                std::vector<Choice<MomentumKind>>{
                    {"ema", MomentumKind::kEma},
                    {"heavy_ball", MomentumKind::kHeavyBall},
                    {"ema_bias_corrected", MomentumKind::kEmaBiasCorrected}})),
      Row("beta", kSpectralOnly | kSgdOnly, "its coefficients are beta1 and beta2",
          Number(&Rule::beta, 0, 1)),
      Row("nesterov", kSpectralOnly, "it has no look-ahead", Nesterov()),
      Row("period", kSpectralOnly, kNoPeriod, Period()),
      Row("phase", kSpectralOnly, kNoPeriod, Phase()),
      Row("off_refresh", kSpectralOnly, kNoPeriod, OffRefresh()),
      Row("row_scale", kSpectralOnly, kNoPeriod,
          OneOf(&Rule::row_scale,
                std::vector<Choice<RowScale>>{{"match_polar_fro", RowScale::kMatchPolarFro},
                                              {"unit", RowScale::kUnit},
                                              {"rms", RowScale::kRms}})),
      Row("row_rms", kSpectralOnly, kNoPeriod, Number(&Rule::row_rms, 0)),
      Row("row_axis", kSpectralOnly, kNoPeriod,
          OneOf(&Rule::row_axis, std::vector<Choice<RowAxis>>{{"rows", RowAxis::kRows},
                                                              {"cols", RowAxis::kCols},
                                                              {"long", RowAxis::kLong},
                                                              {"short", RowAxis::kShort}})),
      Row("off_refresh_lr_ratio", kSpectralOnly, kNoPeriod, Number(&Rule::off_refresh_lr_ratio, 0)),
      Row("row_spectral_max", kSpectralOnly, kNoPeriod, Number(&Rule::row_spectral_max, 0)),
      Row("coefficients", kSpectralOnly, kNoPolar, CoefficientsOption()),
      Row("steps", kSpectralOnly, kNoPolar, Steps()),
      Row("safety", kSpectralOnly, kNoPolar, Safety()),
      Row("normalise", kSpectralOnly, kNoPolar, Normalise()),
      Row("eps_mode", kSpectralOnly, kNoPolar,
          OneOf(&Rule::eps_mode,
                std::vector<Choice<EpsMode>>{
                    {"none", EpsMode::kNone}, {"add", EpsMode::kAdd}, {"clamp", EpsMode::kClamp}})),
      Row("eps", kSpectralOnly | kAdamwOnly, "its update divides by nothing",
          Number(&Rule::eps, 0)),
      Row("form", kSpectralOnly, kNoPolar,
          OneOf(&Rule::form, std::vector<Choice<PolarForm>>{{"auto", PolarForm::kAuto},
                                                            {"standard", PolarForm::kStandard},
                                                            {"gram", PolarForm::kGram}})),
      Row("restarts", kSpectralOnly, kNoPolar, Restarts()),
      Row("compute", kSpectralOnly, "it is always computed in fp32",
          OneOf(&Rule::compute, std::vector<Choice<ComputeType>>{{"auto", ComputeType::kAuto},
                                                                 {"fp32", ComputeType::kFp32},
                                                                 {"bf16", ComputeType::kBf16}})),
      Row("scale", kSpectralOnly, "its step length is lr alone", Scale()),
      Row("beta1", kAdamwOnly | kLionOnly, "its coefficient is beta", Number(&Rule::beta1, 0, 1)),
      Row("beta2", kAdamwOnly | kLionOnly, "it keeps no second average",
          Number(&Rule::beta2, 0, 1)),
  };
  return table;
}

// Options of the update rules whose presets this version does not have.
constexpr std::pair<std::string_view, std::string_view> kLaterOptions[] = {
    {"splits", "cmuon"},
    {"num_heads", "cmuon"},
    {"tile", "himuon and muonbp"},
    {"select_fraction", "dion2 and dion3"},
    {"damping", "dion2 and dion3"},
    {"select_axis", "dion2 and dion3"},
    {"gain", "samuon"},
    {"shaped_directions", "samuon"},
    {"warmup", "samuon"},
    {"deflation", "samuon"},
    {"row_variance_beta2", "normuon and dion3"},
    {"row_variance_eps", "normuon and dion3"},
    {"scale_of", "cmuon and himuon"},
    {"pair", "polora"},
    {"product_scale", "polora"},
    {"delta", "polora"}};

}  // namespace

absl::Status SetOption(Rule& rule, std::string_view key, std::string_view value) {
  for (const Option& option : OptionTable()) {
    if (option.key != key) continue;
    if ((option.families & Bit(rule.family)) == 0) {
      return absl::InvalidArgumentError(absl::StrCat("preset ", rule.preset, " cannot use option ",
                                                     std::string(key), ": ",
                                                     std::string(option.otherwise)));
    }
    absl::Status status = option.set(rule, value);
    if (status.ok()) return status;
    return absl::InvalidArgumentError(absl::StrCat("option ", std::string(key), " of preset ",
                                                   rule.preset, ": ",
                                                   std::string(status.message())));
  }
  for (const auto& [later, preset] : kLaterOptions) {
    if (later == key) {
      return absl::InvalidArgumentError(absl::StrCat("preset ", rule.preset, " cannot use option ",
                                                     std::string(key), ": it belongs to ",
                                                     std::string(preset), ", not in this version"));
    }
  }
  return absl::InvalidArgumentError(
      absl::StrCat("unknown option \"", PrintableName(key), "\"; did you mean \"",
                   std::string(NearestName(key, OptionKeys())), "\"?"));
}

std::vector<std::pair<std::string, std::string>> Options(const Rule& rule) {
  std::vector<std::pair<std::string, std::string>> options;
  for (const Option& option : OptionTable()) {
    if (option.families & Bit(rule.family))
      options.emplace_back(std::string(option.key), option.get(rule));
  }
  return options;
}

std::vector<std::pair<std::string, std::string>> ChangedOptions(const Rule& rule) {
  std::vector<std::pair<std::string, std::string>> changed;
  absl::StatusOr<Rule> base = PresetRule(rule.preset);
  if (!base.ok()) return changed;
  for (const Option& option : OptionTable()) {
    if ((option.families & Bit(rule.family)) == 0) continue;
    // Compared with the base as it is by now: another coefficient table has other default steps.
    std::string value = option.get(rule);
    if (option.get(*base) == value || !option.set(*base, value).ok()) continue;
    changed.emplace_back(std::string(option.key), std::move(value));
  }
  return changed;
}

std::vector<std::string_view> OptionKeys() {
  std::vector<std::string_view> keys;
  for (const Option& option : OptionTable()) keys.push_back(option.key);
  return keys;
}

}  // namespace stiefel
