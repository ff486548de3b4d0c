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

}  // namespace stiefel

#endif  // STIEFEL_TESTS_CONFORMANCE_OPTION_CASES_H_
