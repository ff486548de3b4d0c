#include "client/axis_cut.h"

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "common/checked_math.h"
#include "common/status.h"

namespace stiefel {
namespace {

void Append(const Interval& interval, Intervals* held) {
  if (interval.size() <= 0) return;
  if (!held->empty() && held->back().end == interval.begin) {
    held->back().end = interval.end;
  } else {
    held->push_back(interval);
  }
}

Interval PartOf(CutMode mode, int64_t n, int64_t k, int64_t p) {
  if (mode == CutMode::kBalanced) return Balanced(n, k, p);
  const int64_t chunk = n / p + (n % p != 0 ? 1 : 0);
  const int64_t begin = std::min(n, k * chunk);
  return {begin, std::min(n, begin + chunk)};
}

// Ends of what is cut on its own. INVALID_ARGUMENT: splits that do not add up.
absl::StatusOr<std::vector<int64_t>> SegmentEnds(const Axis& axis, const Cut& cut) {
  std::vector<int64_t> ends;
  if (cut.splits.empty()) {
    const int64_t step = axis.segment > 0 ? axis.segment : axis.size;
    for (int64_t end = step; end <= axis.size; end += step) ends.push_back(end);
    return ends;
  }
  int64_t sum = 0;
  for (const int64_t split : cut.splits) {
    if (split < 1 || !CheckedAdd(sum, split, &sum)) {
      return absl::InvalidArgumentError(absl::StrCat("a split of ", split, " ", axis.entries));
    }
    ends.push_back(sum);
  }
  if (sum == axis.size) return ends;
  return absl::InvalidArgumentError(absl::StrCat("the splits ", absl::StrJoin(cut.splits, " + "),
                                                 " are ", sum, " of ", axis.size, " ",
                                                 axis.entries));
}

absl::StatusOr<Interval> PartOfSizes(const Axis& axis, const std::vector<int64_t>& sizes, int64_t n,
                                     int64_t k, int64_t p) {
  Interval part;
  int64_t sum = 0;
  bool valid = static_cast<int64_t>(sizes.size()) == p;
  for (int64_t i = 0; valid && i < p; ++i) {
    if (i == k) part = {sum, sum + sizes[i]};
    valid = sizes[i] >= 0 && CheckedAdd(sum, sizes[i], &sum);
  }
  if (valid && sum == n) return part;
  return absl::InvalidArgumentError(absl::StrCat("the sizes ", absl::StrJoin(sizes, ", "),
                                                 " do not cut ", n, " ", axis.entries, " into ", p,
                                                 " parts"));
}

}  // namespace

Interval Balanced(int64_t n, int64_t k, int64_t p) {
  // Without overflow: n = q p + r.
  const auto cut = [n, p](int64_t i) { return i * (n / p) + i * (n % p) / p; };
  return {cut(k), cut(k + 1)};
}

absl::Status CutAxis(const Axis& axis, const Cut& cut, int64_t k, int64_t p) {
  STIEFEL_ASSIGN_OR_RETURN(const std::vector<int64_t> ends, SegmentEnds(axis, cut));
  if (!cut.sizes.empty() && !cut.splits.empty()) {
    return absl::InvalidArgumentError("sizes and splits together; one of them cuts");
  }
  Intervals kept;
  int64_t begin = 0;
  auto next = axis.held->begin();
  for (const int64_t end : ends) {
    // What is held of this segment.
    Intervals inside;
    while (next != axis.held->end() && next->end <= begin) ++next;
    for (auto held = next; held != axis.held->end() && held->begin < end; ++held) {
      Append({std::max(begin, held->begin), std::min(end, held->end)}, &inside);
    }
    begin = end;
    const int64_t n = Length(inside) / axis.unit;
    Interval part = PartOf(cut.mode, n, k, p);
    if (!cut.sizes.empty()) {
      STIEFEL_ASSIGN_OR_RETURN(part, PartOfSizes(axis, cut.sizes, n, k, p));
    }
    ForEachWithin(inside, {part.begin * axis.unit, part.end * axis.unit},
                  [&kept](const Interval& interval, int64_t) { Append(interval, &kept); });
  }
  *axis.held = std::move(kept);
  return absl::OkStatus();
}

}  // namespace stiefel
