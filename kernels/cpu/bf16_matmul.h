#ifndef STIEFEL_KERNELS_CPU_BF16_MATMUL_H_
#define STIEFEL_KERNELS_CPU_BF16_MATMUL_H_

#include <cstdint>
#include <tuple>

#include "absl/status/status.h"

namespace stiefel {

// rows x inner by inner x cols (stored as cols x inner where transposed); strides between rows, in
// elements.
struct Bf16MatmulShape {
  int64_t rows, cols, inner;
  int64_t a_stride, b_stride;
  bool transpose_b;

  auto Key() const { return std::make_tuple(rows, cols, inner, a_stride, b_stride, transpose_b); }
  friend bool operator<(const Bf16MatmulShape& a, const Bf16MatmulShape& b) {
    return a.Key() < b.Key();
  }
};

// product (fp32, rows x cols, contiguous) = a b, with bf16 operands and fp32 accumulation.
// Thread-safe. INTERNAL where oneDNN fails, UNIMPLEMENTED where this processor has no such product.
absl::Status Bf16Matmul(const Bf16MatmulShape& shape, const void* a, const void* b, float* product);

}  // namespace stiefel

#endif  // STIEFEL_KERNELS_CPU_BF16_MATMUL_H_
