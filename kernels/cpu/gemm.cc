#include "kernels/cpu/gemm.h"

#include <immintrin.h>
#include <omp.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <functional>
#include <vector>

#include "absl/strings/str_cat.h"
#include "dnnl.h"
#include "kernels/cpu/bf16_matmul.h"
#include "kernels/cpu/scratch.h"
#include "kernels/cpu/segment_kernels.h"

namespace stiefel {
namespace {

// Rows and columns of a block of C. Measured: blocks from 64 x 256 (in the second-level cache) or
// 128 x 128 (beyond it) on run at full rate; of a symmetric C small ones waste least on the
// diagonal.
constexpr int64_t kTargetRows = 192;
constexpr int64_t kBlockCols = 512;
constexpr int64_t kSymmetricTargetSide = 128;
// Of a symmetric C of few rows, in fp32: for bf16 every shape of a block costs a primitive.
constexpr int64_t kFewRows = 256;
constexpr int64_t kFlatTargetRows = 64;
constexpr int64_t kFlatBlockCols = 256;
constexpr int64_t kResidualCols = 192;

int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }

// A block of C: c(rows x cols) = alpha a(rows x inner) op(b) + beta d, all with their own row
// strides, in elements.
struct Block {
  int64_t rows, cols, inner;
  const void* a;
  int64_t a_stride;
  const void* b;  // inner x cols, or cols x inner where transposed
  int64_t b_stride;
  bool transpose_b;
  const void* d;
  void* c;
  int64_t c_stride;  // of d too
  float alpha, beta;
};

absl::Status Fp32Block(const Block& k) {
  auto* c = static_cast<float*>(k.c);
  if (k.beta != 0) {
    const auto* d = static_cast<const float*>(k.d);
    for (int64_t i = 0; i < k.rows; ++i) {
      std::memcpy(c + i * k.c_stride, d + i * k.c_stride, k.cols * sizeof(float));
    }
  }
  const dnnl_status_t status =
      dnnl_sgemm('N', k.transpose_b ? 'T' : 'N', k.rows, k.cols, k.inner, k.alpha,
                 static_cast<const float*>(k.a), k.a_stride, static_cast<const float*>(k.b),
                 k.b_stride, k.beta, c, k.c_stride);
  if (status == dnnl_success) return absl::OkStatus();
  return absl::InternalError(absl::StrCat("dnnl_sgemm ", k.rows, " x ", k.cols, " x ", k.inner,
                                          " failed with status ", static_cast<int>(status)));
}

absl::Status Bf16Block(const Block& k) {
  auto* product =
      static_cast<float*>(ThreadScratch(ScratchUse::kTile, k.rows * k.cols * sizeof(float)));
  const Bf16MatmulShape shape = {k.rows, k.cols, k.inner, k.a_stride, k.b_stride, k.transpose_b};
  absl::Status status = Bf16Matmul(shape, k.a, k.b, product);
  if (!status.ok()) return status;
  const SegmentKernels& kernels = BestSegmentKernels();
  for (int64_t i = 0; i < k.rows; ++i) {
    const auto* d = k.beta == 0 ? nullptr : static_cast<const uint16_t*>(k.d) + i * k.c_stride;
    kernels.round_bf16(k.alpha, product + i * k.cols, k.beta, d,
                       static_cast<uint16_t*>(k.c) + i * k.c_stride, k.cols);
  }
  return absl::OkStatus();
}

constexpr int64_t kMirrorSide = 16;

// to[j][i] = from[i * stride + j], all of a square.
void Transpose(const float* from, int64_t stride, float (*to)[kMirrorSide]) {
  for (int64_t i = 0; i < kMirrorSide; i += 4) {
    for (int64_t j = 0; j < kMirrorSide; j += 4) {
      const float* corner = from + i * stride + j;
      __m128 r0 = _mm_loadu_ps(corner), r1 = _mm_loadu_ps(corner + stride),
             r2 = _mm_loadu_ps(corner + 2 * stride), r3 = _mm_loadu_ps(corner + 3 * stride);
      _MM_TRANSPOSE4_PS(r0, r1, r2, r3);
      _mm_storeu_ps(to[j] + i, r0);
      _mm_storeu_ps(to[j + 1] + i, r1);
      _mm_storeu_ps(to[j + 2] + i, r2);
      _mm_storeu_ps(to[j + 3] + i, r3);
    }
  }
}

void Transpose(const uint16_t* from, int64_t stride, uint16_t (*to)[kMirrorSide]) {
  for (int64_t i = 0; i < kMirrorSide; ++i) {
    for (int64_t j = 0; j < kMirrorSide; ++j) to[j][i] = from[i * stride + j];
  }
}

// Copies what a block has above the diagonal to its place below. In squares, since a column of C
// touches a cache line and a page for each element.
template <typename T>
void Mirror(T* c, int64_t stride, int64_t row, int64_t rows, int64_t col, int64_t cols) {
  T square[kMirrorSide][kMirrorSide];
  for (int64_t top = row; top < row + rows; top += kMirrorSide) {
    const int64_t height = std::min(kMirrorSide, row + rows - top);
    for (int64_t left = std::max(col, top); left < col + cols; left += kMirrorSide) {
      const int64_t width = std::min(kMirrorSide, col + cols - left);
      const T* from = c + top * stride + left;
      if (height == kMirrorSide && width == kMirrorSide) {
        Transpose(from, stride, square);
      } else {
        for (int64_t i = 0; i < height; ++i) {
          for (int64_t j = 0; j < width; ++j) square[j][i] = from[i * stride + j];
        }
      }
      for (int64_t j = 0; j < width; ++j) {
        const int64_t above = std::min(height, left + j - top);  // the diagonal
        std::memcpy(c + (left + j) * stride + top, square[j], above * sizeof(T));
      }
    }
  }
}

// oneDNN must not start OpenMP threads of its own: the loops around it are parallel.
void UseOneOpenMpThread() {
  thread_local const bool done = [] {
    omp_set_num_threads(1);
    return true;
  }();
  (void)done;
}

const void* At(const MatrixView& view, int64_t matrix, int64_t row, int64_t col) {
  return static_cast<const char*>(view.data) +
         ((matrix * view.rows + row) * view.cols + col) * DTypeSize(view.dtype);
}

// The first error of a parallel loop.
class FirstError {
 public:
  void Add(const absl::Status& status) {
    if (status.ok()) return;
    MutexLock lock(&mutex_);
    if (status_.ok()) status_ = status;
  }
  absl::Status Take() {
    MutexLock lock(&mutex_);
    return status_;
  }

 private:
  Mutex mutex_;
  absl::Status status_ ABSL_GUARDED_BY(mutex_);
};

struct BlockPlace {
  int64_t row, rows, col, cols;
};

// The blocks of C, by rows; of a symmetric one those that touch the upper triangle.
class BlockGrid {
 public:
  explicit BlockGrid(const GemmArgs& args)
      : rows_(args.c.rows), cols_(args.c.cols), symmetric_(args.symmetric) {
    const bool flat = symmetric_ && rows_ <= kFewRows && args.c.dtype == DType::kFp32;
    const int64_t target = flat ? kFlatTargetRows : symmetric_ ? kSymmetricTargetSide : kTargetRows;
    // Cut evenly into about the target, whole vectors.
    const int64_t cuts = CeilDiv(rows_, target);
    block_rows_ = std::min(rows_, CeilDiv(CeilDiv(rows_, cuts), 16) * 16);
    block_cols_ = flat ? kFlatBlockCols : symmetric_ ? block_rows_ : std::min(cols_, kBlockCols);
    for (int64_t row = 0; row < rows_; row += block_rows_) count_ += Across(row);
  }

  int64_t count() const { return count_; }

  BlockPlace At(int64_t index) const {
    int64_t row = 0;
    for (; index >= Across(row); row += block_rows_) index -= Across(row);
    const int64_t col = FirstCol(row) + index * block_cols_;
    return {row, std::min(block_rows_, rows_ - row), col, std::min(block_cols_, cols_ - col)};
  }

 private:
  int64_t FirstCol(int64_t row) const { return symmetric_ ? row : 0; }
  int64_t Across(int64_t row) const { return CeilDiv(cols_ - FirstCol(row), block_cols_); }

  const int64_t rows_, cols_;
  const bool symmetric_;
  int64_t block_rows_, block_cols_;
  int64_t count_ = 0;
};

// The rows that stand for all m when a residual is estimated.
struct SampledRows {
  explicit SampledRows(int64_t m)
      : stride(m <= 16 ? 1 : m / std::clamp<int64_t>(m / 16, 16, 32)), count(CeilDiv(m, stride)) {}
  int64_t stride, count;
};

// sqrt(sum (<a_i, x_j> - [i is row j])^2 / count) over the sampled rows i of A and all rows j of X.
absl::Status ResidualOfRows(ThreadPool* pool, const void* a, int64_t a_stride, const MatrixView& x,
                            const SampledRows& rows, double* residual) {
  const int64_t m = x.rows, tasks = CeilDiv(m, kResidualCols);
  auto* sums = static_cast<double*>(
      ThreadScratch(ScratchUse::kFigures, tasks * static_cast<int64_t>(sizeof(double))));
  std::fill_n(sums, tasks, 0.0);
  FirstError error;
  const auto measure = [&](int64_t task) {
    UseOneOpenMpThread();
    const int64_t col = task * kResidualCols, cols = std::min(kResidualCols, m - col);
    auto* gram =
        static_cast<float*>(ThreadScratch(ScratchUse::kTile, rows.count * cols * sizeof(float)));
    absl::Status status;
    if (x.dtype == DType::kBf16) {
      status =
          Bf16Matmul({rows.count, cols, x.cols, a_stride, x.cols, true}, a, At(x, 0, col, 0), gram);
    } else {
      status = Fp32Block({rows.count, cols, x.cols, a, a_stride, At(x, 0, col, 0), x.cols, true,
                          nullptr, gram, cols, 1, 0});
    }
    error.Add(status);
    for (int64_t i = 0; status.ok() && i < rows.count; ++i) {
      for (int64_t j = 0; j < cols; ++j) {
        const double entry = gram[i * cols + j] - (i * rows.stride == col + j ? 1.0 : 0.0);
        sums[task] += entry * entry;
      }
    }
  };
  pool->ParallelFor(tasks, [&measure](int64_t task) { measure(task); });
  double total = 0;
  for (int64_t task = 0; task < tasks; ++task) total += sums[task];
  *residual = std::sqrt(total / static_cast<double>(rows.count));
  return error.Take();
}

}  // namespace

absl::Status CpuGemm(ThreadPool* pool, const GemmArgs& args) {
  const MatrixView& c = args.c;
  const BlockGrid grid(args);
  const int64_t count = grid.count();
  const bool bf16 = c.dtype == DType::kBf16;
  FirstError error;
  const auto compute = [&](int64_t index) {
    UseOneOpenMpThread();
    const int64_t matrix = index / count;
    const BlockPlace p = grid.At(index % count);
    Block block;
    block.rows = p.rows;
    block.cols = p.cols;
    block.inner = args.a.cols;
    block.a = At(args.a, matrix, p.row, 0);
    block.a_stride = args.a.cols;
    block.b = args.transpose_b ? At(args.b, matrix, p.col, 0) : At(args.b, matrix, 0, p.col);
    block.b_stride = args.b.cols;
    block.transpose_b = args.transpose_b;
    block.d = args.beta == 0 ? nullptr : At(args.d, matrix, p.row, p.col);
    block.c = const_cast<void*>(At(c, matrix, p.row, p.col));
    block.c_stride = c.cols;
    block.alpha = args.alpha;
    block.beta = args.beta;
    error.Add(bf16 ? Bf16Block(block) : Fp32Block(block));
    if (!args.symmetric) return;
    void* whole = const_cast<void*>(At(c, matrix, 0, 0));
    if (bf16) {
      Mirror(static_cast<uint16_t*>(whole), c.cols, p.row, p.rows, p.col, p.cols);
    } else {
      Mirror(static_cast<float*>(whole), c.cols, p.row, p.rows, p.col, p.cols);
    }
  };
  pool->ParallelFor(count * c.batch, std::ref(compute));
  return error.Take();
}

absl::Status CpuResidual(ThreadPool* pool, const MatrixView& x, double* residual) {
  const SampledRows rows(x.rows);
  return ResidualOfRows(pool, x.data, rows.stride * x.cols, x, rows, residual);
}

absl::Status CpuResidual(ThreadPool* pool, const MatrixView& r, const MatrixView& p,
                         double* residual) {
  const int64_t m = p.rows;
  const SampledRows rows(m);
  // Those rows of P R; their products with the rows of P are the entries.
  auto* product = static_cast<float*>(
      ThreadScratch(ScratchUse::kRows, rows.count * m * static_cast<int64_t>(sizeof(float))));
  FirstError error;
  const auto multiply = [&](int64_t task) {
    UseOneOpenMpThread();
    const int64_t col = task * kResidualCols, cols = std::min(kResidualCols, m - col);
    error.Add(Fp32Block({rows.count, cols, m, p.data, rows.stride * m, At(r, 0, 0, col), m, false,
                         nullptr, product + col, m, 1, 0}));
  };
  pool->ParallelFor(CeilDiv(m, kResidualCols), [&multiply](int64_t task) { multiply(task); });
  const absl::Status multiplied = error.Take();
  if (!multiplied.ok()) return multiplied;
  return ResidualOfRows(pool, product, m, p, rows, residual);
}

std::string OneDnnDescription() {
  const dnnl_version_t* version = dnnl_version();
  const char* isa = "generic";
  switch (dnnl_get_effective_cpu_isa()) {
    case dnnl_cpu_isa_sse41:
      isa = "sse41";
      break;
    case dnnl_cpu_isa_avx:
      isa = "avx";
      break;
    case dnnl_cpu_isa_avx2:
      isa = "avx2";
      break;
    case dnnl_cpu_isa_avx2_vnni:
      isa = "avx2_vnni";
      break;
    case dnnl_cpu_isa_avx512_core:
      isa = "avx512_core";
      break;
    case dnnl_cpu_isa_avx512_core_vnni:
      isa = "avx512_core_vnni";
      break;
    case dnnl_cpu_isa_avx512_core_bf16:
      isa = "avx512_core_bf16";
      break;
    case dnnl_cpu_isa_avx512_core_amx:
      isa = "avx512_core_amx";
      break;
    default:
      break;
  }
  return absl::StrCat("oneDNN ", version->major, ".", version->minor, ".", version->patch, " ",
                      isa);
}

}  // namespace stiefel
