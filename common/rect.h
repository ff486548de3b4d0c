#ifndef STIEFEL_COMMON_RECT_H_
#define STIEFEL_COMMON_RECT_H_

#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "absl/status/status.h"

// Rectangles of matrices: what blocks cover, leave out and share. Everything works on rectangles
// alone (sweep lines), never on elements: a matrix may have 10^12 of them, a peer may send 10^5
// blocks.

namespace stiefel {

// Half-open: rows [row_begin, row_end), columns [col_begin, col_end).
struct Rect {
  int64_t row_begin = 0;
  int64_t row_end = 0;
  int64_t col_begin = 0;
  int64_t col_end = 0;

  int64_t rows() const { return row_end - row_begin; }
  int64_t cols() const { return col_end - col_begin; }
  bool empty() const { return row_begin >= row_end || col_begin >= col_end; }

  // 0 for an empty rectangle. REQUIRES: it fits int64, as it does for every rectangle that
  // ValidateRect let pass.
  int64_t Area() const { return empty() ? 0 : rows() * cols(); }

  // "[r0:r1, c0:c1]"
  std::string DebugString() const;

  friend bool operator==(const Rect& a, const Rect& b) {
    return a.row_begin == b.row_begin && a.row_end == b.row_end && a.col_begin == b.col_begin &&
           a.col_end == b.col_end;
  }
  friend bool operator!=(const Rect& a, const Rect& b) { return !(a == b); }
};

// The whole rows x cols matrix.
inline Rect WholeRect(int64_t rows, int64_t cols) { return Rect{0, rows, 0, cols}; }

// INVALID_ARGUMENT, with the numbers, unless the rectangle is not empty and lies within the rows x
// cols matrix.
absl::Status ValidateRect(const Rect& rect, int64_t rows, int64_t cols);

// The common part; empty() if there is none.
Rect Intersect(const Rect& a, const Rect& b);

// a without b: at most four disjoint rectangles (above, left, right, below).
std::vector<Rect> Subtract(const Rect& a, const Rect& b);

inline constexpr int64_t kNoLimit = std::numeric_limits<int64_t>::max();

// The part of `whole` that no rectangle of `cover` covers, as disjoint rectangles, as wide as
// possible, ascending by (row_begin, col_begin). Parts of the cover outside `whole` and empty ones
// do not count. The true answer can be quadratic in the input; it stops after `max_gaps`, in O((n +
// max_gaps) log n), for callers who only report.
std::vector<Rect> Gaps(const Rect& whole, const std::vector<Rect>& cover,
                       int64_t max_gaps = kNoLimit);

struct Overlap {
  int64_t first = 0;  // Index into the list; first < second.
  int64_t second = 0;
  Rect common;

  friend bool operator==(const Overlap& a, const Overlap& b) {
    return a.first == b.first && a.second == b.second && a.common == b.common;
  }
};

// Every pair of the list that shares an element, ascending by (first, second). Stops, with an
// arbitrary subset of the answer, after `max_overlaps`. O(n log n + answer).
std::vector<Overlap> Overlaps(const std::vector<Rect>& rects, int64_t max_overlaps = kNoLimit);

}  // namespace stiefel

#endif  // STIEFEL_COMMON_RECT_H_
