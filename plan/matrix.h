#ifndef STIEFEL_PLAN_MATRIX_H_
#define STIEFEL_PLAN_MATRIX_H_

#include <cstdint>
#include <string>

#include "common/dtype.h"
#include "common/rect.h"
#include "plan/rule.h"

namespace stiefel {

// What the planner knows of one matrix of the model, or of one shard of it.
struct PlanMatrix {
  std::string name;  // For messages, and for polora's `pair`: no other decision depends on it.
  int64_t rows = 0;
  int64_t cols = 0;
  Rule rule;
  DType push_dtype = DType::kFp32;  // Gradients on the wire.
  DType pull_dtype = DType::kFp32;  // Deltas or weights on the wire.
  int64_t partner_elements = 0;     // polora: size of the other factor.

  // Of a shard, where rows and cols are its own: the matrix that it is cut from, and into how many.
  int64_t whole_rows = 0;
  int64_t whole_cols = 0;
  int64_t shards = 1;

  bool IsShard() const { return shards > 1; }
};

// One of `shards` shards of the matrix.
inline PlanMatrix ShardOfMatrix(const PlanMatrix& matrix, const Rect& rect, int64_t shards) {
  PlanMatrix shard = matrix;
  if (shards <= 1) return shard;
  shard.rows = rect.rows();
  shard.cols = rect.cols();
  shard.whole_rows = matrix.rows;
  shard.whole_cols = matrix.cols;
  shard.shards = shards;
  return shard;
}

}  // namespace stiefel

#endif  // STIEFEL_PLAN_MATRIX_H_
