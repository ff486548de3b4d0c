#ifndef STIEFEL_PLAN_SHARDS_H_
#define STIEFEL_PLAN_SHARDS_H_

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "common/rect.h"
#include "plan/rule.h"

// Shards: contiguous parts of a matrix, cut along its long side, each with an owner of its own. A
// matrix that is not cut is one shard. Cuts are fixed when a run is opened; placement moves shards.

namespace stiefel {

// Whether a rows x cols matrix is cut into ranges of rows (else of columns).
inline bool CutsRows(int64_t rows, int64_t cols) { return rows >= cols; }

// The length of the side that is cut.
inline int64_t LongSide(int64_t rows, int64_t cols) { return rows >= cols ? rows : cols; }

// Whether `at` can cut the matrix: strictly ascending, within (0, long side). INVALID_ARGUMENT with
// the numbers.
absl::Status ValidateCuts(int64_t rows, int64_t cols, const std::vector<int64_t>& at);

// The shards in order. REQUIRES: valid cuts.
std::vector<Rect> ShardRects(int64_t rows, int64_t cols, const std::vector<int64_t>& at);

// Cuts into `shards` parts whose sizes differ by at most one, larger ones first; at most one shard
// for each row (column) of the long side. REQUIRES: shards >= 1.
std::vector<int64_t> EvenCuts(int64_t rows, int64_t cols, int64_t shards);

// The part of a block of the matrix that lies in one shard.
struct ShardPart {
  int32_t shard = 0;
  Rect rect;  // in the shard
};

// The parts of `block` in shard order; together they are the block. `shards` as ShardRects gives
// them. REQUIRES: a block that is valid for the matrix.
std::vector<ShardPart> CutAtShards(const Rect& block, const std::vector<Rect>& shards);

// A rectangle of a shard as one of the whole matrix.
inline Rect InMatrix(const Rect& shard, const Rect& rect) {
  return {shard.row_begin + rect.row_begin, shard.row_begin + rect.row_end,
          shard.col_begin + rect.col_begin, shard.col_begin + rect.col_end};
}

// Whether a matrix under this rule may be cut. Element-wise rules always; spectral ones where whole
// matrices are orthogonalised in fp32 and nothing but their Gram matrix, and the norms of vectors,
// is a sum over shards: docs/mathematics.md section 9. INVALID_ARGUMENT with the option that
// forbids it. REQUIRES: a rule that is valid for the shape.
absl::Status ValidateSharding(const Rule& rule, int64_t rows, int64_t cols);

}  // namespace stiefel

#endif  // STIEFEL_PLAN_SHARDS_H_
