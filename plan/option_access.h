// How options of a rule are read from text and written to it. Internal to the option table
// (rule_options.cc).
//
// Every function here returns a pair: a setter, which gives INVALID_ARGUMENT (the value, and what
// is accepted) and leaves the rule unchanged where the text does not fit, and a getter, whose text
// the setter reads back to the same value.
#ifndef STIEFEL_PLAN_OPTION_ACCESS_H_
#define STIEFEL_PLAN_OPTION_ACCESS_H_

#include <cstdint>
#include <functional>
#include <limits>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "plan/rule.h"

namespace stiefel {

using OptionSetter = std::function<absl::Status(Rule&, std::string_view value)>;
using OptionGetter = std::function<std::string(const Rule&)>;
using OptionAccess = std::pair<OptionSetter, OptionGetter>;

// value "x" is not <accepted>
absl::Status BadOptionValue(std::string_view value, const std::string& accepted);

// Finite numbers between two ends, each inside or outside.
struct Range {
  double low = 0;
  double high = std::numeric_limits<double>::infinity();
  bool low_inside = true;
  bool high_inside = false;

  bool Contains(double number) const;
  std::string Describe() const;  // "a finite number >= 0", "a number in (0, 1]"
};
inline constexpr Range kNotNegative = {};
inline constexpr Range kPositive = {0, std::numeric_limits<double>::infinity(), false, false};
inline constexpr Range kBelowOne = {0, 1, true, false};
inline constexpr Range kFraction = {0, 1, false, true};

OptionAccess Number(double Rule::*field, Range range);
OptionAccess OptionalNumber(std::optional<double> Rule::*field, Range range);  // none | number
// `what` names the unit in messages: "a number of steps".
OptionAccess Integer(int64_t Rule::*field, int64_t low, int64_t high, std::string_view what);
OptionAccess OptionalInteger(std::optional<int64_t> Rule::*field, int64_t low, int64_t high,
                             std::string_view what);  // auto | integer
OptionAccess Boolean(bool Rule::*field);
OptionAccess Text(std::string Rule::*field);

OptionAccess PhaseOption();
OptionAccess StepsOption();
OptionAccess SafetyOption();
OptionAccess ScaleOption();
OptionAccess FactorOption();

// Lists (option_lists.cc).
OptionAccess CoefficientsOption();  // keller_jordan | ... | a,b,c;a,b,c
OptionAccess RestartsOption();      // auto | none | 2,4
OptionAccess SplitsOption();        // none | 768,768,768
OptionAccess TileOption();          // none | 512 | 256,1000:512,5000:none

inline constexpr int64_t kMaxPolarSteps = 64;

bool ParseOptionNumber(std::string_view value, double* number);  // finite
bool ParseOptionInteger(std::string_view value, int64_t* number);
// The shortest text that reads back as the same double.
std::string NumberText(double number);

template <typename E>
struct Choice {
  std::string_view name;
  E value;
};

template <typename E>
OptionAccess OneOf(E Rule::*field, std::vector<Choice<E>> choices) {
  return {[=](Rule& rule, std::string_view value) {
            std::string names;
            for (const Choice<E>& choice : choices) {
              if (choice.name == value) {
                rule.*field = choice.value;
                return absl::OkStatus();
              }
              names.append(names.empty() ? "one of " : " | ").append(choice.name);
            }
            return BadOptionValue(value, names);
          },
          [=](const Rule& rule) {
            for (const Choice<E>& choice : choices) {
              if (choice.value == rule.*field) return std::string(choice.name);
            }
            return std::string("?");
          }};
}

}  // namespace stiefel

#endif  // STIEFEL_PLAN_OPTION_ACCESS_H_
