#ifndef STIEFEL_COMMON_INTERVAL_SET_H_
#define STIEFEL_COMMON_INTERVAL_SET_H_

#include <cstdint>
#include <map>
#include <utility>
#include <vector>

namespace stiefel {

// A set of int64 kept as disjoint, half-open intervals [begin, end) that never touch. Empty
// intervals (begin >= end) are accepted everywhere and hold nothing. Copyable; equal sets compare
// equal. Thread-compatible. Costs are logarithmic in the number of intervals unless said otherwise.
class IntervalSet {
 public:
  using Map = std::map<int64_t, int64_t>;  // begin -> end

  // Amortised logarithmic: intervals that the new one swallows are erased.
  void Add(int64_t begin, int64_t end);

  void Clear() {
    intervals_.clear();
    total_ = 0;
  }

  // All of [begin, end) is in the set; true for an empty interval.
  bool Contains(int64_t begin, int64_t end) const;

  // Some of [begin, end) is in the set; false for an empty interval.
  bool Intersects(int64_t begin, int64_t end) const;

  // What of [begin, end) is not in the set, ascending. Linear in the intervals within.
  std::vector<std::pair<int64_t, int64_t>> Gaps(int64_t begin, int64_t end) const;

  // How many integers are in the set. REQUIRES: they are fewer than 2^63.
  int64_t Total() const { return total_; }

  bool empty() const { return intervals_.empty(); }
  int64_t interval_count() const { return static_cast<int64_t>(intervals_.size()); }

  // Ascending (begin, end) pairs.
  Map::const_iterator begin() const { return intervals_.begin(); }
  Map::const_iterator end() const { return intervals_.end(); }

  friend bool operator==(const IntervalSet& a, const IntervalSet& b) {
    return a.intervals_ == b.intervals_;
  }
  friend bool operator!=(const IntervalSet& a, const IntervalSet& b) { return !(a == b); }

 private:
  Map intervals_;
  int64_t total_ = 0;
};

}  // namespace stiefel

#endif  // STIEFEL_COMMON_INTERVAL_SET_H_
