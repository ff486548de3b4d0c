// Which rule each parameter of `stiefelctl apply` gets, and the matrices that it is.
#ifndef STIEFEL_CLI_APPLY_RULES_H_
#define STIEFEL_CLI_APPLY_RULES_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "cli/apply_inputs.h"
#include "plan/rule.h"

namespace stiefel {

// As given on the command line. A PATTERN is a parameter's name, or has * and ? for any characters
// and any one.
struct RuleArguments {
  std::string preset;                   // of the parameters that no entry of `rules` matches
  std::vector<std::string> rules;       // PATTERN:preset[,key=value ...]; the last match counts
  std::vector<std::string> set;         // key=value: of those with `preset`; PATTERN:key=value
  std::vector<std::string> stack_dims;  // N: of those of 3 and more dimensions; PATTERN:N
};

// One parameter: `matrices` matrices of rows x cols, one after the other.
struct ApplyParameter {
  GradientSeries gradients;
  Rule rule;
  int64_t matrices = 1, rows = 0, cols = 0;
  int64_t phase = 0;
  int64_t partner = -1;  // polora: index of the parameter that is the other factor
};

// In the order of `series`. INVALID_ARGUMENT, naming parameter, option and the nearest known name:
// arguments that are not of the form above, patterns that match nothing, entries of `set` and
// `stack_dims` without a pattern that no parameter is for, unknown presets, the
// errors of SetOption and ShapeOfParameter, polora factors whose partner is missing or does not
// fit.
absl::StatusOr<std::vector<ApplyParameter>> AssignRules(std::vector<GradientSeries> series,
                                                        const RuleArguments& arguments);

}  // namespace stiefel

#endif  // STIEFEL_CLI_APPLY_RULES_H_
