#include "plan/nearest.h"

#include <algorithm>
#include <numeric>

namespace stiefel {
namespace {

constexpr size_t kMaxPrinted = 64;

// Levenshtein distance, one row of the table at a time.
size_t EditDistance(std::string_view a, std::string_view b) {
  std::vector<size_t> row(b.size() + 1);
  std::iota(row.begin(), row.end(), size_t{0});
  for (size_t i = 1; i <= a.size(); ++i) {
    size_t diagonal = row[0];
    row[0] = i;
    for (size_t j = 1; j <= b.size(); ++j) {
      const size_t replaced = diagonal + (a[i - 1] != b[j - 1]);
      diagonal = row[j];
      row[j] = std::min({replaced, row[j] + 1, row[j - 1] + 1});
    }
  }
  return row.back();
}

}  // namespace

std::string_view NearestName(std::string_view name, const std::vector<std::string_view>& known) {
  name = name.substr(0, kMaxPrinted);
  std::string_view best;
  size_t best_distance = (name.size() + 2) / 3 + 1;
  for (std::string_view candidate : known) {
    const size_t distance = EditDistance(name, candidate);
    if (distance < best_distance) {
      best_distance = distance;
      best = candidate;
    }
  }
  return best;
}

std::string PrintableName(std::string_view name) {
  std::string text(name.substr(0, kMaxPrinted));
  for (char& c : text) {
    if (c < 0x20 || c > 0x7e) c = '?';
  }
  if (name.size() > kMaxPrinted) text += "...";
  return text;
}

}  // namespace stiefel
