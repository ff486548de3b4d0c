#include "kernels/spectral_passes.h"

#include <algorithm>

namespace stiefel {
namespace {

constexpr int64_t kDouble = sizeof(double), kFloat = sizeof(float);

int64_t Aligned(int64_t bytes) { return (bytes + 63) / 64 * 64; }

}  // namespace

int64_t SubspaceSize(int64_t short_side, int64_t count) {
  if (short_side <= kExactShortSide) return short_side;
  const int64_t size = count + count / 2 + 8;
  return 2 * size > short_side ? short_side : size;
}

int64_t LeadingPairsScratch(int64_t rows, int64_t cols, int64_t count) {
  const int64_t m = std::min(rows, cols), n = std::max(rows, cols), b = SubspaceSize(m, count);
  return Aligned(b * m * kDouble) + 2 * Aligned(b * b * kDouble) + Aligned(b * kDouble) +
         Aligned(b * b * kFloat) + 3 * Aligned(b * m * kFloat) + 2 * Aligned(b * n * kFloat);
}

int64_t ShapeScratch(int64_t rows, int64_t cols, int64_t count) {
  return Aligned(std::max(rows, cols) * count * kFloat) + Aligned(count * kDouble);
}

int64_t GramScratch(int64_t rows) {
  return 2 * Aligned(rows * rows * kDouble) + Aligned(rows * kDouble);
}

}  // namespace stiefel
