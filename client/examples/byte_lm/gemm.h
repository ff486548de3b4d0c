#ifndef STIEFEL_CLIENT_EXAMPLES_BYTE_LM_GEMM_H_
#define STIEFEL_CLIENT_EXAMPLES_BYTE_LM_GEMM_H_

#include <cstdint>
#include <vector>

namespace stiefel::byte_lm {

// A borrowed fp32 matrix whose element (i, j) is data[i * row_stride + j * col_stride].
struct MatrixView {
  const float* data;
  int64_t row_stride;
  int64_t col_stride;

  MatrixView Transposed() const { return {data, col_stride, row_stride}; }
};

inline MatrixView RowMajor(const float* data, int64_t cols) { return {data, cols, 1}; }

// Dense products for one thread: packs both operands and runs a register-blocked kernel in the
// widest vectors of this machine. The order of every sum depends on the shapes alone.
// Thread-compatible.
class Gemm {
 public:
  // c = a b, or c += a b with `accumulate`; a is m x k, b is k x n, c is row-major m x n and
  // overlaps neither. REQUIRES: sizes >= 1.
  void Multiply(int64_t m, int64_t n, int64_t k, MatrixView a, MatrixView b, bool accumulate,
                float* c);

 private:
  std::vector<float> packed_a_;
  std::vector<float> packed_b_;
};

}  // namespace stiefel::byte_lm

#endif  // STIEFEL_CLIENT_EXAMPLES_BYTE_LM_GEMM_H_
