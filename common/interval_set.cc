#include "common/interval_set.h"

#include <algorithm>
#include <iterator>

namespace stiefel {

void IntervalSet::Add(int64_t begin, int64_t end) {
  if (begin >= end) return;
  auto it = intervals_.upper_bound(begin);
  if (it != intervals_.begin() && std::prev(it)->second >= begin) --it;
  // `it` is the first interval that overlaps or touches the new one, if any does.
  while (it != intervals_.end() && it->first <= end) {
    begin = std::min(begin, it->first);
    end = std::max(end, it->second);
    total_ -= it->second - it->first;
    it = intervals_.erase(it);
  }
  intervals_.emplace_hint(it, begin, end);
  total_ += end - begin;
}

bool IntervalSet::Contains(int64_t begin, int64_t end) const {
  if (begin >= end) return true;
  const auto it = intervals_.upper_bound(begin);
  return it != intervals_.begin() && std::prev(it)->second >= end;
}

bool IntervalSet::Intersects(int64_t begin, int64_t end) const {
  if (begin >= end) return false;
  const auto it = intervals_.lower_bound(end);
  return it != intervals_.begin() && std::prev(it)->second > begin;
}

std::vector<std::pair<int64_t, int64_t>> IntervalSet::Gaps(int64_t begin, int64_t end) const {
  std::vector<std::pair<int64_t, int64_t>> gaps;
  if (begin >= end) return gaps;
  auto it = intervals_.upper_bound(begin);
  if (it != intervals_.begin()) --it;
  int64_t at = begin;
  for (; it != intervals_.end() && it->first < end; ++it) {
    if (it->first > at) gaps.emplace_back(at, it->first);
    at = std::max(at, it->second);
  }
  if (at < end) gaps.emplace_back(at, end);
  return gaps;
}

}  // namespace stiefel
