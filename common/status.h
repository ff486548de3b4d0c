#ifndef STIEFEL_COMMON_STATUS_H_
#define STIEFEL_COMMON_STATUS_H_

#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

// Early return on errors. Both work in functions that return absl::Status or absl::StatusOr<T>.

// Evaluates `expr` (an absl::Status) once and returns it from the enclosing function unless it is
// OK.
#define STIEFEL_RETURN_IF_ERROR(expr)                                 \
  do {                                                                \
    if (absl::Status stiefel_status = (expr); !stiefel_status.ok()) { \
      return stiefel_status;                                          \
    }                                                                 \
  } while (false)

// Evaluates `expr` (an absl::StatusOr<T>) once; returns its error, or moves its value into `lhs`,
// which may be a declaration: STIEFEL_ASSIGN_OR_RETURN(const int64_t bytes, MatrixBytes(rows,
// cols));
#define STIEFEL_ASSIGN_OR_RETURN(lhs, expr) \
  STIEFEL_ASSIGN_OR_RETURN_IMPL_(STIEFEL_STATUS_CONCAT_(stiefel_or_, __COUNTER__), lhs, expr)

#define STIEFEL_ASSIGN_OR_RETURN_IMPL_(tmp, lhs, expr) \
  auto tmp = (expr);                                   \
  if (!tmp.ok()) return std::move(tmp).status();       \
  lhs = *std::move(tmp)

#define STIEFEL_STATUS_CONCAT_(a, b) STIEFEL_STATUS_CONCAT_INNER_(a, b)
#define STIEFEL_STATUS_CONCAT_INNER_(a, b) a##b

#endif  // STIEFEL_COMMON_STATUS_H_
