#ifndef STIEFEL_PLAN_MATRIX_H_
#define STIEFEL_PLAN_MATRIX_H_

#include <cstdint>
#include <string>

#include "common/dtype.h"
#include "plan/rule.h"

namespace stiefel {

// What the planner knows of one matrix of the model.
struct PlanMatrix {
  std::string name;  // For messages, and for polora's `pair`: no other decision depends on it.
  int64_t rows = 0;
  int64_t cols = 0;
  Rule rule;
  DType push_dtype = DType::kFp32;  // Gradients on the wire.
  DType pull_dtype = DType::kFp32;  // Deltas or weights on the wire.
  int64_t partner_elements = 0;     // polora: size of the other factor.
};

}  // namespace stiefel

#endif  // STIEFEL_PLAN_MATRIX_H_
