// Names in error messages: the known name nearest to a mistyped one, and a printable form of what a
// user sent.
#ifndef STIEFEL_PLAN_NEAREST_H_
#define STIEFEL_PLAN_NEAREST_H_

#include <string>
#include <string_view>
#include <vector>

namespace stiefel {

// The element of `known` with the smallest edit distance to `name` (the first of equals) that is
// not above a third of name's length, rounded up; empty where nothing is so near.
std::string_view NearestName(std::string_view name, const std::vector<std::string_view>& known);

// `name` with bytes that do not print replaced by '?', cut to 64 bytes.
std::string PrintableName(std::string_view name);

}  // namespace stiefel

#endif  // STIEFEL_PLAN_NEAREST_H_
