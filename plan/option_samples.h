// For tests: values of every option, so that tests over "every preset x option" are generated from
// the option table and a new option cannot be forgotten.
#ifndef STIEFEL_PLAN_OPTION_SAMPLES_H_
#define STIEFEL_PLAN_OPTION_SAMPLES_H_

#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "plan/rule.h"

namespace stiefel {

// Values that SetOption accepts for every family that uses the key, its ends among them. Empty for
// a key that has no samples yet, which option_samples_test reports.
const std::vector<std::string>& SampleValues(std::string_view key);

// A preset with one or more of its options changed, and how.
struct SampledRule {
  Rule rule;
  std::vector<std::pair<std::string, std::string>> changes;
};

// Every preset with each of its options set to each of its sample values, one at a time; the rules
// need not be valid for any shape.
std::vector<SampledRule> RulesWithOneOptionChanged();

}  // namespace stiefel

#endif  // STIEFEL_PLAN_OPTION_SAMPLES_H_
