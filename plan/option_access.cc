#include "plan/option_access.h"

#include <algorithm>
#include <cmath>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "plan/nearest.h"

namespace stiefel {
namespace {

constexpr int64_t kMaxPeriod = 1000000;
constexpr size_t kMaxTextBytes = 1024;

}  // namespace

absl::Status BadOptionValue(std::string_view value, const std::string& accepted) {
  return absl::InvalidArgumentError(
      absl::StrCat("value \"", PrintableName(value), "\" is not ", accepted));
}

bool ParseOptionNumber(std::string_view value, double* number) {
  return absl::SimpleAtod(absl::string_view(value.data(), value.size()), number) &&
         std::isfinite(*number);
}

bool ParseOptionInteger(std::string_view value, int64_t* number) {
  return absl::SimpleAtoi(absl::string_view(value.data(), value.size()), number);
}

std::string NumberText(double number) {
  for (int digits = 6; digits < 17; ++digits) {
    std::string text = absl::StrFormat("%.*g", digits, number);
    double back = 0;
    if (absl::SimpleAtod(text, &back) && back == number) return text;
  }
  return absl::StrFormat("%.17g", number);
}

bool Range::Contains(double number) const {
  return (low_inside ? number >= low : number > low) &&
         (high_inside ? number <= high : number < high);
}

std::string Range::Describe() const {
  if (std::isinf(high)) return absl::StrCat("a finite number ", low_inside ? ">= " : "> ", low);
  return absl::StrCat("a number in ", low_inside ? "[" : "(", low, ", ", high,
                      high_inside ? "]" : ")");
}

OptionAccess Number(double Rule::*field, Range range) {
  return {[=](Rule& rule, std::string_view value) {
            double number = 0;
            if (!ParseOptionNumber(value, &number) || !range.Contains(number)) {
              return BadOptionValue(value, range.Describe());
            }
            rule.*field = number == 0 ? 0 : number;  // no negative zero
            return absl::OkStatus();
          },
          [=](const Rule& rule) { return NumberText(rule.*field); }};
}

OptionAccess OptionalNumber(std::optional<double> Rule::*field, Range range) {
  return {[=](Rule& rule, std::string_view value) {
            if (value == "none") {
              (rule.*field).reset();
              return absl::OkStatus();
            }
            double number = 0;
            if (!ParseOptionNumber(value, &number) || !range.Contains(number)) {
              return BadOptionValue(value, absl::StrCat("none, or ", range.Describe()));
            }
            rule.*field = number == 0 ? 0 : number;
            return absl::OkStatus();
          },
          [=](const Rule& rule) {
            return (rule.*field).has_value() ? NumberText(*(rule.*field)) : std::string("none");
          }};
}

OptionAccess Integer(int64_t Rule::*field, int64_t low, int64_t high, std::string_view what) {
  return {[=](Rule& rule, std::string_view value) {
            int64_t number = 0;
            if (!ParseOptionInteger(value, &number) || number < low || number > high) {
              return BadOptionValue(value,
                                    absl::StrCat(std::string(what), " from ", low, " to ", high));
            }
            rule.*field = number;
            return absl::OkStatus();
          },
          [=](const Rule& rule) { return absl::StrCat(rule.*field); }};
}

OptionAccess OptionalInteger(std::optional<int64_t> Rule::*field, int64_t low, int64_t high,
                             std::string_view what) {
  return {[=](Rule& rule, std::string_view value) {
            if (value == "auto") {
              (rule.*field).reset();
              return absl::OkStatus();
            }
            int64_t number = 0;
            if (!ParseOptionInteger(value, &number) || number < low || number > high) {
              return BadOptionValue(
                  value, absl::StrCat("auto, or ", std::string(what), " from ", low, " to ", high));
            }
            rule.*field = number;
            return absl::OkStatus();
          },
          [=](const Rule& rule) {
            return (rule.*field).has_value() ? absl::StrCat(*(rule.*field)) : std::string("auto");
          }};
}

OptionAccess Boolean(bool Rule::*field) {
  return {[=](Rule& rule, std::string_view value) {
            if (value != "true" && value != "false" && value != "1" && value != "0") {
              return BadOptionValue(value, "true or false");
            }
            rule.*field = value == "true" || value == "1";
            return absl::OkStatus();
          },
          [=](const Rule& rule) { return std::string(rule.*field ? "true" : "false"); }};
}

OptionAccess Text(std::string Rule::*field) {
  return {[=](Rule& rule, std::string_view value) {
            const auto control = [](char c) {
              return static_cast<unsigned char>(c) < 0x20 || c == 0x7f;
            };
            if (value.size() > kMaxTextBytes || std::any_of(value.begin(), value.end(), control)) {
              return BadOptionValue(value, absl::StrCat("a name of at most ", kMaxTextBytes,
                                                        " bytes without control characters"));
            }
            rule.*field = std::string(value);
            return absl::OkStatus();
          },
          [=](const Rule& rule) { return rule.*field; }};
}

OptionAccess PhaseOption() {
  return {
      [](Rule& rule, std::string_view value) {
        int64_t number = 0;
        if (value == "staggered" || value == "synchronised") {
          rule.phase_mode = value == "staggered" ? PhaseMode::kStaggered : PhaseMode::kSynchronised;
          rule.phase = 0;
          return absl::OkStatus();
        }
        if (!ParseOptionInteger(value, &number) || number < 0 || number >= kMaxPeriod) {
          return BadOptionValue(value, "staggered, synchronised or a number from 0 to period - 1");
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

OptionAccess StepsOption() {
  return {[](Rule& rule, std::string_view value) {
            int64_t number = 0;
            if (!ParseOptionInteger(value, &number) || number < 1 || number > kMaxPolarSteps) {
              return BadOptionValue(
                  value, absl::StrCat("a number of iterations from 1 to ", kMaxPolarSteps));
            }
            rule.steps = number;
            return absl::OkStatus();
          },
          [](const Rule& rule) {
            return rule.steps.has_value() ? absl::StrCat(*rule.steps)
                                          : absl::StrCat(PolarCoefficients(rule).size());
          }};
}

OptionAccess SafetyOption() {
  return {[](Rule& rule, std::string_view value) {
            double number = 0;
            if (!ParseOptionNumber(value, &number) || number < 1 || number > 2) {
              return BadOptionValue(value, "a number from 1 to 2");
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

OptionAccess ScaleOption() {
  const OptionAccess by_name = OneOf(
      &Rule::scale, std::vector<Choice<ScaleKind>>{{"none", ScaleKind::kNone},
                                                   {"original", ScaleKind::kOriginal},
                                                   {"match_rms_adamw", ScaleKind::kMatchRmsAdamw},
                                                   {"spectral", ScaleKind::kSpectral},
                                                   {"spectral_max", ScaleKind::kSpectralMax}});
  return {[=](Rule& rule, std::string_view value) {
            const absl::Status named = by_name.first(rule, value);
            if (named.ok()) {
              rule.scale_number = 1;
              return named;
            }
            double number = 0;
            if (!ParseOptionNumber(value, &number) || number <= 0) {
              return absl::InvalidArgumentError(
                  absl::StrCat(std::string(named.message()), ", or a finite number > 0"));
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

OptionAccess FactorOption() {
  return {[](Rule& rule, std::string_view value) {
            if (value != "auto" && value != "a" && value != "b") {
              return BadOptionValue(value, "one of auto | a | b");
            }
            rule.factor.reset();
            if (value != "auto") rule.factor = value == "a" ? PoloraFactor::kA : PoloraFactor::kB;
            return absl::OkStatus();
          },
          [](const Rule& rule) {
            if (!rule.factor.has_value()) return std::string("auto");
            return std::string(*rule.factor == PoloraFactor::kA ? "a" : "b");
          }};
}

}  // namespace stiefel
