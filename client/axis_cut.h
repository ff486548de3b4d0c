// What a rank holds of one axis of a parameter, and cutting it: the arithmetic below topology.h.
#ifndef STIEFEL_CLIENT_AXIS_CUT_H_
#define STIEFEL_CLIENT_AXIS_CUT_H_

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "client/topology.h"

namespace stiefel {

struct Interval {
  int64_t begin = 0, end = 0;
  int64_t size() const { return end - begin; }
};
// Entries of an axis, ascending and disjoint, neighbours joined. The rank's own tensor has them one
// after the other; positions count in it.
using Intervals = std::vector<Interval>;

inline int64_t Length(const Intervals& held) {
  int64_t length = 0;
  for (const Interval& interval : held) length += interval.size();
  return length;
}

// Calls visit(interval, position of its begin) for what lies at positions [begin, end).
template <typename Visit>
void ForEachWithin(const Intervals& held, const Interval& window, Visit visit) {
  int64_t position = 0;
  for (const Interval& interval : held) {
    const int64_t begin = std::max(window.begin, position);
    const int64_t end = std::min(window.end, position + interval.size());
    if (begin < end) {
      visit(Interval{interval.begin + begin - position, interval.begin + end - position}, begin);
    }
    position += interval.size();
  }
}

// Part k of p of n: [k n / p, (k + 1) n / p).
Interval Balanced(int64_t n, int64_t k, int64_t p);

// The axis that a spread cuts, and how.
struct Axis {
  Intervals* held = nullptr;
  int64_t size = 0;     // of the whole axis
  int64_t unit = 1;     // cuts lie at multiples of it
  int64_t segment = 0;  // every so many entries are cut on their own; 0: all are cut as one
  std::string entries;  // "rows", for messages
};

// Keeps part k of p. INVALID_ARGUMENT, with the numbers: sizes or splits that do not add up, or
// both given.
absl::Status CutAxis(const Axis& axis, const Cut& cut, int64_t k, int64_t p);

}  // namespace stiefel

#endif  // STIEFEL_CLIENT_AXIS_CUT_H_
