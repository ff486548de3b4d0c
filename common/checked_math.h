#ifndef STIEFEL_COMMON_CHECKED_MATH_H_
#define STIEFEL_COMMON_CHECKED_MATH_H_

#include <cstdint>
#include <limits>

// Sizes come from peers and files; these say whether the arithmetic on them holds. On overflow the
// result is unspecified and false is returned.

namespace stiefel {

[[nodiscard]] inline bool CheckedAdd(int64_t a, int64_t b, int64_t* sum) {
  return !__builtin_add_overflow(a, b, sum);
}

[[nodiscard]] inline bool CheckedMul(int64_t a, int64_t b, int64_t* product) {
  return !__builtin_mul_overflow(a, b, product);
}

// *accumulator += a * b.
[[nodiscard]] inline bool CheckedMulAdd(int64_t a, int64_t b, int64_t* accumulator) {
  int64_t product = 0;
  return CheckedMul(a, b, &product) && CheckedAdd(*accumulator, product, accumulator);
}

// For sums that only have to be too large, not exact: the largest int64 instead of an overflow.
// REQUIRES: a, b >= 0.
inline int64_t SaturatingAdd(int64_t a, int64_t b) {
  int64_t sum = 0;
  return CheckedAdd(a, b, &sum) ? sum : std::numeric_limits<int64_t>::max();
}

inline int64_t SaturatingMul(int64_t a, int64_t b) {
  int64_t product = 0;
  return CheckedMul(a, b, &product) ? product : std::numeric_limits<int64_t>::max();
}

// rows * cols * element_bytes of a matrix; false also for sizes that are not positive.
[[nodiscard]] inline bool CheckedMatrixBytes(int64_t rows, int64_t cols, int64_t element_bytes,
                                             int64_t* bytes) {
  int64_t elements = 0;
  return rows > 0 && cols > 0 && CheckedMul(rows, cols, &elements) &&
         CheckedMul(elements, element_bytes, bytes);
}

}  // namespace stiefel

#endif  // STIEFEL_COMMON_CHECKED_MATH_H_
