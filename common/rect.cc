#include "common/rect.h"

#include <algorithm>
#include <map>
#include <set>
#include <tuple>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/checked_math.h"

namespace stiefel {
namespace {

// Sorted, distinct column bounds; elementary column i is [bounds[i], bounds[i + 1]).
class Columns {
 public:
  explicit Columns(std::vector<int64_t> bounds) : bounds_(std::move(bounds)) {
    std::sort(bounds_.begin(), bounds_.end());
    bounds_.erase(std::unique(bounds_.begin(), bounds_.end()), bounds_.end());
  }

  int64_t count() const { return static_cast<int64_t>(bounds_.size()) - 1; }
  int64_t bound(int64_t i) const { return bounds_[i]; }
  int64_t IndexOf(int64_t bound) const {
    return std::lower_bound(bounds_.begin(), bounds_.end(), bound) - bounds_.begin();
  }

 private:
  std::vector<int64_t> bounds_;
};

// How many rectangles cover each elementary column: add over a range, enumerate the uncovered.
// A node's count holds for its whole range. Its uncovered_ tells, from the counts at and below the
// node, how much of its range is uncovered, so that a wide range is found without a look at each
// of its columns.
class CoverTree {
 public:
  explicit CoverTree(int64_t columns)
      : columns_(columns), counts_(4 * columns, 0), uncovered_(4 * columns, kAll) {}

  void Add(int64_t begin, int64_t end, int64_t delta) { Add(1, 0, columns_, begin, end, delta); }

  // Appends the maximal uncovered ranges within [begin, end), ascending.
  void Uncovered(int64_t begin, int64_t end,
                 std::vector<std::pair<int64_t, int64_t>>* ranges) const {
    Uncovered(1, 0, columns_, begin, end, ranges);
  }

 private:
  enum Extent : uint8_t { kNone, kSome, kAll };

  void Add(int64_t node, int64_t lo, int64_t hi, int64_t begin, int64_t end, int64_t delta) {
    if (begin >= hi || end <= lo) return;
    if (begin <= lo && hi <= end) {
      counts_[node] += delta;
    } else {
      const int64_t mid = lo + (hi - lo) / 2;
      Add(2 * node, lo, mid, begin, end, delta);
      Add(2 * node + 1, mid, hi, begin, end, delta);
    }
    if (counts_[node] > 0) {
      uncovered_[node] = kNone;
    } else if (hi - lo == 1 || uncovered_[2 * node] == uncovered_[2 * node + 1]) {
      uncovered_[node] = hi - lo == 1 ? kAll : uncovered_[2 * node];
    } else {
      uncovered_[node] = kSome;
    }
  }

  void Uncovered(int64_t node, int64_t lo, int64_t hi, int64_t begin, int64_t end,
                 std::vector<std::pair<int64_t, int64_t>>* ranges) const {
    if (begin >= hi || end <= lo || uncovered_[node] == kNone) return;
    if (uncovered_[node] == kAll) {
      lo = std::max(lo, begin);
      hi = std::min(hi, end);
      if (!ranges->empty() && ranges->back().second == lo) {
        ranges->back().second = hi;
      } else {
        ranges->emplace_back(lo, hi);
      }
      return;
    }
    const int64_t mid = lo + (hi - lo) / 2;
    Uncovered(2 * node, lo, mid, begin, end, ranges);
    Uncovered(2 * node + 1, mid, hi, begin, end, ranges);
  }

  const int64_t columns_;
  std::vector<int64_t> counts_;
  std::vector<Extent> uncovered_;
};

// Sweeps the rows from above and keeps the gaps that are open at the current row. Only what a row
// changes is looked at, so that the work is that of the input and of the answer.
class GapSweep {
 public:
  GapSweep(const Rect& whole, const Columns& columns, int64_t max_gaps)
      : columns_(columns), tree_(columns.count()), max_gaps_(max_gaps) {
    open_[0] = {columns.count(), whole.row_begin};
  }

  void Change(int64_t begin, int64_t end, int64_t delta) {
    tree_.Add(begin, end, delta);
    changed_.emplace_back(begin, end);
  }

  // All changes of `row` were made. False when max_gaps were found.
  bool Settle(int64_t row) {
    std::sort(changed_.begin(), changed_.end());
    for (size_t i = 0; i < changed_.size();) {
      auto [begin, end] = changed_[i];
      for (++i; i < changed_.size() && changed_[i].first <= end; ++i) {
        end = std::max(end, changed_[i].second);
      }
      Reopen(begin, end, row);
    }
    changed_.clear();
    return static_cast<int64_t>(gaps_.size()) < max_gaps_;
  }

  std::vector<Rect> Finish(int64_t row) {
    for (const auto& [begin, gap] : open_) Close(begin, gap, row);
    std::sort(gaps_.begin(), gaps_.end(), [](const Rect& a, const Rect& b) {
      return std::tie(a.row_begin, a.col_begin) < std::tie(b.row_begin, b.col_begin);
    });
    if (static_cast<int64_t>(gaps_.size()) > max_gaps_) gaps_.resize(max_gaps_);
    return std::move(gaps_);
  }

 private:
  struct OpenGap {
    int64_t end;
    int64_t row_begin;
  };

  void Close(int64_t begin, const OpenGap& gap, int64_t row) {
    if (gap.row_begin == row) return;
    gaps_.push_back(Rect{gap.row_begin, row, columns_.bound(begin), columns_.bound(gap.end)});
  }

  // Replaces the open gaps in and beside [begin, end) by what is uncovered now.
  void Reopen(int64_t begin, int64_t end, int64_t row) {
    auto it = open_.upper_bound(begin);
    if (it != open_.begin() && std::prev(it)->second.end >= begin) --it;
    std::map<int64_t, OpenGap> old;
    while (it != open_.end() && it->first <= end) {
      begin = std::min(begin, it->first);
      end = std::max(end, it->second.end);
      old.insert(*it);
      it = open_.erase(it);
    }
    std::vector<std::pair<int64_t, int64_t>> now;
    tree_.Uncovered(begin, end, &now);
    for (const auto& [gap_begin, gap_end] : now) {
      const auto same = old.find(gap_begin);
      if (same != old.end() && same->second.end == gap_end) {
        open_.insert(*same);
        old.erase(same);
      } else {
        open_[gap_begin] = {gap_end, row};
      }
    }
    for (const auto& [gap_begin, gap] : old) Close(gap_begin, gap, row);
  }

  const Columns& columns_;
  CoverTree tree_;
  const int64_t max_gaps_;
  std::map<int64_t, OpenGap> open_;  // Column where it begins -> the gap. Disjoint, never touching.
  std::vector<std::pair<int64_t, int64_t>> changed_;
  std::vector<Rect> gaps_;
};

// The rectangles that the sweep line crosses, found by column. An interval shares a column with
// [begin, end) if it begins inside, or covers `begin`; each interval is stored by where it begins
// and at the O(log n) tree nodes it fills.
class ActiveRects {
 public:
  explicit ActiveRects(int64_t columns) : columns_(columns), filled_(4 * columns) {}

  void Insert(int64_t index, int64_t begin, int64_t end) {
    begins_.insert({begin, index});
    Visit(1, 0, columns_, begin, end, [index](std::set<int64_t>* node) { node->insert(index); });
  }

  void Erase(int64_t index, int64_t begin, int64_t end) {
    begins_.erase({begin, index});
    Visit(1, 0, columns_, begin, end, [index](std::set<int64_t>* node) { node->erase(index); });
  }

  // Calls found(index) for each one that shares a column, until it returns false.
  template <typename Found>
  void ForEachSharing(int64_t begin, int64_t end, const Found& found) const {
    for (auto it = begins_.upper_bound({begin, kNoLimit}); it != begins_.end() && it->first < end;
         ++it) {
      if (!found(it->second)) return;
    }
    int64_t node = 1;
    for (int64_t lo = 0, hi = columns_;;) {
      for (int64_t index : filled_[node]) {
        if (!found(index)) return;
      }
      if (hi - lo == 1) return;
      const int64_t mid = lo + (hi - lo) / 2;
      node = 2 * node + (begin < mid ? 0 : 1);
      (begin < mid ? hi : lo) = mid;
    }
  }

 private:
  template <typename Act>
  void Visit(int64_t node, int64_t lo, int64_t hi, int64_t begin, int64_t end, const Act& act) {
    if (begin >= hi || end <= lo) return;
    if (begin <= lo && hi <= end) {
      act(&filled_[node]);
      return;
    }
    const int64_t mid = lo + (hi - lo) / 2;
    Visit(2 * node, lo, mid, begin, end, act);
    Visit(2 * node + 1, mid, hi, begin, end, act);
  }

  const int64_t columns_;
  std::set<std::pair<int64_t, int64_t>> begins_;  // (begin, index)
  std::vector<std::set<int64_t>> filled_;
};

// A rectangle's first row, or the row after its last.
struct Event {
  int64_t row;
  bool enters;
  int64_t index;

  // Leaving comes first: half-open rectangles that only touch share nothing.
  bool operator<(const Event& other) const {
    return std::tie(row, enters, index) < std::tie(other.row, other.enters, other.index);
  }
};

std::vector<Event> SortedEvents(const std::vector<Rect>& rects) {
  std::vector<Event> events;
  events.reserve(2 * rects.size());
  for (int64_t i = 0; i < static_cast<int64_t>(rects.size()); ++i) {
    if (rects[i].empty()) continue;
    events.push_back({rects[i].row_begin, true, i});
    events.push_back({rects[i].row_end, false, i});
  }
  std::sort(events.begin(), events.end());
  return events;
}

}  // namespace

std::string Rect::DebugString() const {
  return absl::StrCat("[", row_begin, ":", row_end, ", ", col_begin, ":", col_end, "]");
}

absl::Status ValidateRect(const Rect& rect, int64_t rows, int64_t cols) {
  int64_t area = 0;
  if (rows <= 0 || cols <= 0 || !CheckedMul(rows, cols, &area)) {
    return absl::InvalidArgumentError(
        absl::StrCat("a matrix of ", rows, " x ", cols, " elements is not possible"));
  }
  if (rect.empty()) {
    return absl::InvalidArgumentError(absl::StrCat("block ", rect.DebugString(), " is empty"));
  }
  if (rect.row_begin < 0 || rect.col_begin < 0 || rect.row_end > rows || rect.col_end > cols) {
    return absl::InvalidArgumentError(absl::StrCat(
        "block ", rect.DebugString(), " reaches outside the ", rows, " x ", cols, " matrix"));
  }
  return absl::OkStatus();
}

Rect Intersect(const Rect& a, const Rect& b) {
  return Rect{std::max(a.row_begin, b.row_begin), std::min(a.row_end, b.row_end),
              std::max(a.col_begin, b.col_begin), std::min(a.col_end, b.col_end)};
}

std::vector<Rect> Subtract(const Rect& a, const Rect& b) {
  if (a.empty()) return {};
  const Rect common = Intersect(a, b);
  if (common.empty()) return {a};
  const Rect candidates[] = {
      {a.row_begin, common.row_begin, a.col_begin, a.col_end},
      {common.row_begin, common.row_end, a.col_begin, common.col_begin},
      {common.row_begin, common.row_end, common.col_end, a.col_end},
      {common.row_end, a.row_end, a.col_begin, a.col_end},
  };
  std::vector<Rect> rest;
  for (const Rect& candidate : candidates) {
    if (!candidate.empty()) rest.push_back(candidate);
  }
  return rest;
}

std::vector<Rect> Gaps(const Rect& whole, const std::vector<Rect>& cover, int64_t max_gaps) {
  if (whole.empty() || max_gaps <= 0) return {};
  std::vector<Rect> clipped;
  clipped.reserve(cover.size());
  std::vector<int64_t> bounds = {whole.col_begin, whole.col_end};
  for (const Rect& rect : cover) {
    clipped.push_back(Intersect(rect, whole));
    if (clipped.back().empty()) continue;
    bounds.push_back(clipped.back().col_begin);
    bounds.push_back(clipped.back().col_end);
  }
  const Columns columns(std::move(bounds));
  const std::vector<Event> events = SortedEvents(clipped);
  GapSweep sweep(whole, columns, max_gaps);
  for (size_t i = 0; i < events.size();) {
    const int64_t row = events[i].row;
    if (row == whole.row_end) break;
    for (; i < events.size() && events[i].row == row; ++i) {
      const Rect& rect = clipped[events[i].index];
      sweep.Change(columns.IndexOf(rect.col_begin), columns.IndexOf(rect.col_end),
                   events[i].enters ? 1 : -1);
    }
    if (!sweep.Settle(row)) return sweep.Finish(row);
  }
  return sweep.Finish(whole.row_end);
}

std::vector<Overlap> Overlaps(const std::vector<Rect>& rects, int64_t max_overlaps) {
  std::vector<int64_t> bounds;
  bounds.reserve(2 * rects.size());
  for (const Rect& rect : rects) {
    if (rect.empty()) continue;
    bounds.push_back(rect.col_begin);
    bounds.push_back(rect.col_end);
  }
  if (bounds.empty()) return {};
  const Columns columns(std::move(bounds));
  ActiveRects active(columns.count());
  std::vector<Overlap> overlaps;
  for (const Event& event : SortedEvents(rects)) {
    const Rect& rect = rects[event.index];
    const int64_t begin = columns.IndexOf(rect.col_begin);
    const int64_t end = columns.IndexOf(rect.col_end);
    if (!event.enters) {
      active.Erase(event.index, begin, end);
      continue;
    }
    active.ForEachSharing(begin, end, [&](int64_t other) {
      if (static_cast<int64_t>(overlaps.size()) >= max_overlaps) return false;
      overlaps.push_back({std::min(other, event.index), std::max(other, event.index),
                          Intersect(rect, rects[other])});
      return true;
    });
    if (static_cast<int64_t>(overlaps.size()) >= max_overlaps) break;
    active.Insert(event.index, begin, end);
  }
  std::sort(overlaps.begin(), overlaps.end(), [](const Overlap& a, const Overlap& b) {
    return std::tie(a.first, a.second) < std::tie(b.first, b.second);
  });
  return overlaps;
}

}  // namespace stiefel
