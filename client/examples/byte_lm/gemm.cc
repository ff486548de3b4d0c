#include "client/examples/byte_lm/gemm.h"

#include <algorithm>
#include <cstring>

namespace stiefel::byte_lm {
namespace {

// Depth of one packed slice: a panel of each operand then stays in the first two caches.
constexpr int64_t kDepth = 256;

// c (rows x 2 vectors, row stride ldc) += a b. a is packed by columns of kRows, b by rows of two
// vectors. The accumulators are local, so that they live in registers.
template <int kRows, typename Vec>
[[gnu::always_inline]] inline void TileProduct(int64_t depth, const float* a, const float* b,
                                               float* c, int64_t ldc) {
  constexpr int64_t kLanes = sizeof(Vec) / sizeof(float);
  Vec sum[kRows][2];
  for (int i = 0; i < kRows; ++i) {
    std::memcpy(&sum[i][0], c + i * ldc, sizeof(Vec));
    std::memcpy(&sum[i][1], c + i * ldc + kLanes, sizeof(Vec));
  }
  for (int64_t p = 0; p < depth; ++p, a += kRows, b += 2 * kLanes) {
    Vec b0, b1;
    std::memcpy(&b0, b, sizeof(Vec));
    std::memcpy(&b1, b + kLanes, sizeof(Vec));
#pragma GCC unroll 16
    for (int i = 0; i < kRows; ++i) {
      sum[i][0] += a[i] * b0;
      sum[i][1] += a[i] * b1;
    }
  }
  for (int i = 0; i < kRows; ++i) {
    std::memcpy(c + i * ldc, &sum[i][0], sizeof(Vec));
    std::memcpy(c + i * ldc + kLanes, &sum[i][1], sizeof(Vec));
  }
}

using Vec4 = float __attribute__((vector_size(16)));
using TileFn = void (*)(int64_t depth, const float* a, const float* b, float* c, int64_t ldc);

void TileBase(int64_t depth, const float* a, const float* b, float* c, int64_t ldc) {
  TileProduct<4, Vec4>(depth, a, b, c, ldc);
}

#if defined(__x86_64__)
using Vec8 = float __attribute__((vector_size(32)));
using Vec16 = float __attribute__((vector_size(64)));

[[gnu::target("avx2,fma")]] void TileAvx2(int64_t depth, const float* a, const float* b, float* c,
                                          int64_t ldc) {
  TileProduct<6, Vec8>(depth, a, b, c, ldc);
}

[[gnu::target("avx512f")]] void TileAvx512(int64_t depth, const float* a, const float* b, float* c,
                                           int64_t ldc) {
  TileProduct<12, Vec16>(depth, a, b, c, ldc);
}
#endif

struct Kernel {
  int64_t rows;
  int64_t cols;
  TileFn run;
};

const Kernel& ChosenKernel() {
  static const Kernel kernel = [] {
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx512f")) return Kernel{12, 32, TileAvx512};
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) {
      return Kernel{6, 16, TileAvx2};
    }
#endif
    return Kernel{4, 8, TileBase};
  }();
  return kernel;
}

// Writes lines [0, count) of a view, as panels of `width` lines: within a panel, for each of
// `depth` positions the `width` values of its lines; lines past the end are zero. line_stride steps
// from line to line, depth_stride along a line.
void Pack(const float* data, int64_t line_stride, int64_t depth_stride, int64_t count,
          int64_t depth, int64_t width, float* out) {
  for (int64_t first = 0; first < count; first += width) {
    const int64_t used = std::min(width, count - first);
    const float* panel = data + first * line_stride;
    for (int64_t p = 0; p < depth; ++p, out += width) {
      const float* from = panel + p * depth_stride;
      if (line_stride == 1) {
        std::memcpy(out, from, used * sizeof(float));
      } else {
        for (int64_t i = 0; i < used; ++i) out[i] = from[i * line_stride];
      }
      std::fill(out + used, out + width, 0.0f);
    }
  }
}

int64_t RoundUp(int64_t value, int64_t unit) { return (value + unit - 1) / unit * unit; }

// One tile at the edge of c: through a full-size buffer, so that nothing past the edge is touched.
void EdgeTile(const Kernel& kernel, int64_t depth, const float* a, const float* b, int64_t rows,
              int64_t cols, float* c, int64_t ldc) {
  float tile[12 * 32] = {};
  for (int64_t i = 0; i < rows; ++i) {
    std::memcpy(tile + i * kernel.cols, c + i * ldc, cols * sizeof(float));
  }
  kernel.run(depth, a, b, tile, kernel.cols);
  for (int64_t i = 0; i < rows; ++i) {
    std::memcpy(c + i * ldc, tile + i * kernel.cols, cols * sizeof(float));
  }
}

}  // namespace

void Gemm::Multiply(int64_t m, int64_t n, int64_t k, MatrixView a, MatrixView b, bool accumulate,
                    float* c) {
  const Kernel& kernel = ChosenKernel();
  if (!accumulate) std::fill(c, c + m * n, 0.0f);
  packed_a_.resize(RoundUp(m, kernel.rows) * kDepth);
  packed_b_.resize(RoundUp(n, kernel.cols) * kDepth);
  for (int64_t p = 0; p < k; p += kDepth) {
    const int64_t depth = std::min(kDepth, k - p);
    Pack(a.data + p * a.col_stride, a.row_stride, a.col_stride, m, depth, kernel.rows,
         packed_a_.data());
    Pack(b.data + p * b.row_stride, b.col_stride, b.row_stride, n, depth, kernel.cols,
         packed_b_.data());
    for (int64_t j = 0; j < n; j += kernel.cols) {
      const float* b_panel = packed_b_.data() + j * depth;
      for (int64_t i = 0; i < m; i += kernel.rows) {
        const float* a_panel = packed_a_.data() + i * depth;
        float* tile = c + i * n + j;
        if (i + kernel.rows <= m && j + kernel.cols <= n) {
          kernel.run(depth, a_panel, b_panel, tile, n);
        } else {
          EdgeTile(kernel, depth, a_panel, b_panel, std::min(kernel.rows, m - i),
                   std::min(kernel.cols, n - j), tile, n);
        }
      }
    }
  }
}

}  // namespace stiefel::byte_lm
