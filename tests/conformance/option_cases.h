// All combinations of options that ValidateRule accepts, made from the option table.
#ifndef STIEFEL_TESTS_CONFORMANCE_OPTION_CASES_H_
#define STIEFEL_TESTS_CONFORMANCE_OPTION_CASES_H_

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "plan/rule.h"

namespace stiefel {

using OptionChange = std::pair<std::string, std::string>;

// The changes that tests make to an option of a matrix with this many rows (splits must add up to
// them); none for a key that is not known here.
std::vector<OptionChange> ChangesOf(const std::string& key, int64_t rows);

// The preset with the changes made. Nothing where one of them, or all together, are refused for the
// shape, or where the preset is that already.
std::vector<Rule> Combined(const std::string& preset, const std::vector<OptionChange>& changes,
                           int64_t rows, int64_t cols);

struct OptionCase {
  Rule rule;
  int64_t rows = 0, cols = 0;
  std::vector<OptionChange> changes;
};

// Every accepted preset x pair of changes, each with a shape of its own: sides from 1 to 300,
// mostly small. An option without a change beside it is the pair of a change with itself.
const std::vector<OptionCase>& AllOptionCases();

// At least one of every change, and otherwise at random, `count` in all.
std::vector<OptionCase> Sampled(std::vector<OptionCase> cases, size_t count, uint64_t seed);

// A phase for the case, so that three steps show both kinds in an order that depends on it.
int64_t PhaseOf(const OptionCase& option_case, size_t index);

}  // namespace stiefel

#endif  // STIEFEL_TESTS_CONFORMANCE_OPTION_CASES_H_
