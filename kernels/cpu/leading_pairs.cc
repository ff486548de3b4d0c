#include "kernels/cpu/leading_pairs.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "common/status.h"
#include "kernels/cpu/blocks.h"
#include "kernels/cpu/gemm.h"
#include "kernels/cpu/row_gram.h"
#include "kernels/cpu/scratch.h"
#include "kernels/cpu/segment_kernels.h"
#include "kernels/cpu/subspace_iteration.h"
#include "kernels/cpu/symmetric_eigen.h"

namespace stiefel {
namespace {

// A singular value below this part of the first is rounding of an fp32 matrix.
constexpr double kNothing = 3e-7;

// Rows of O that share a segment of the right vectors while it is in the cache.
constexpr int64_t kShapeRows = 16;

// max|x|, or NaN where an element is not finite.
float MaxAbs(ThreadPool* pool, const float* x, int64_t n) {
  const int64_t blocks = CeilDiv(n, kBlockElements);
  std::vector<float> largest(blocks);
  ForIndices(pool, blocks, n, [&](int64_t block) {
    const int64_t end = std::min(n, (block + 1) * kBlockElements);
    float most = 0;
    bool finite = true;
    for (int64_t i = block * kBlockElements; i < end; ++i) {
      const float size = std::fabs(x[i]);
      most = size > most ? size : most;
      finite &= size <= std::numeric_limits<float>::max();
    }
    largest[block] = finite ? most : std::numeric_limits<float>::quiet_NaN();
  });
  float most = 0;
  for (float v : largest) {
    if (std::isnan(v)) return v;
    most = std::max(most, v);
  }
  return most;
}

// Pairs whose vectors along the short side (count x m) are found, with the images X^T a along the
// long side (count x n): the unit vectors of both, and zeros where the image is nothing.
class PairWriter {
 public:
  explicit PairWriter(const LeadingPairsPass& pass)
      : pass_(pass),
        wide_(pass.rows <= pass.cols),
        m_(std::min(pass.rows, pass.cols)),
        n_(std::max(pass.rows, pass.cols)) {}

  // Pairs come in order; T is float or double.
  template <typename T>
  void Add(int64_t i, const T* vector, const T* image) {
    float* a = (wide_ ? pass_.left : pass_.right) + i * m_;
    float* b = (wide_ ? pass_.right : pass_.left) + i * n_;
    const double sigma = Norm(image, n_);
    if (i == 0) first_ = sigma;
    Unit(vector, Norm(vector, m_), pass_.found + i * m_, m_);
    if (sigma <= kNothing * first_) {
      std::fill_n(a, m_, 0.0f);
      std::fill_n(b, n_, 0.0f);
      return;
    }
    std::copy_n(pass_.found + i * m_, m_, a);
    Unit(image, sigma, b, n_);
  }

  void None() {
    std::fill_n(pass_.left, pass_.count * pass_.rows, 0.0f);
    std::fill_n(pass_.right, pass_.count * pass_.cols, 0.0f);
    std::copy_n(pass_.start, pass_.count * m_, pass_.found);
  }

 private:
  template <typename T>
  static double Norm(const T* x, int64_t n) {
    double squares = 0;
    for (int64_t i = 0; i < n; ++i) squares += static_cast<double>(x[i]) * x[i];
    return std::sqrt(squares);
  }

  template <typename T>
  static void Unit(const T* x, double norm, float* out, int64_t n) {
    for (int64_t i = 0; i < n; ++i) out[i] = static_cast<float>(x[i] / norm);
  }

  const LeadingPairsPass& pass_;
  const bool wide_;  // the rows are the short side
  const int64_t m_, n_;
  double first_ = 0;
};

// U^T U in fp64.
void ColumnGram(const float* u, int64_t rows, int64_t cols, double* gram) {
  const SegmentKernels& kernels = BestSegmentKernels();
  std::fill_n(gram, cols * cols, 0.0);
  for (int64_t row = 0; row < rows; ++row) {
    const float* x = u + row * cols;
    for (int64_t i = 0; i < cols; ++i) kernels.add_scaled_wide(x[i], x, gram + i * cols, cols);
  }
}

// By the eigen-decomposition of the short side's Gram matrix.
void ExactPairs(ThreadPool* pool, const LeadingPairsPass& pass, PairWriter* writer) {
  const SegmentKernels& kernels = BestSegmentKernels();
  const int64_t rows = pass.rows, cols = pass.cols, m = std::min(rows, cols);
  auto* gram = static_cast<double*>(pass.scratch);
  double* vectors = gram + m * m;
  double* values = vectors + m * m;
  if (rows <= cols) {
    RowGram(pool, pass.u, rows, cols, gram);
  } else {
    ColumnGram(pass.u, rows, cols, gram);
  }
  if (!SymmetricEigen(gram, m, values, vectors)) return writer->None();
  const int64_t n = std::max(rows, cols);
  auto* image = static_cast<double*>(ThreadScratch(ScratchUse::kRows, n * sizeof(double)));
  for (int64_t i = 0; i < pass.count; ++i) {
    const double* a = vectors + i * m;
    if (rows <= cols) {
      std::fill_n(image, n, 0.0);
      for (int64_t j = 0; j < m; ++j) kernels.add_scaled_wide(a[j], pass.u + j * cols, image, n);
    } else {
      for (int64_t j = 0; j < n; ++j) image[j] = kernels.dot_wide(pass.u + j * cols, a, m);
    }
    writer->Add(i, a, image);
  }
}

// What is added to O along each pair, products being O V: s_i d_i, less the gain where O is kept.
void ShapeAmounts(const ShapePass& pass, const float* products, bool anew, double* amounts) {
  const int64_t rows = pass.o.rows, count = pass.count;
  for (int64_t i = 0; i < count; ++i) {
    const double rank = i == 0 ? 0 : std::log(i + 1.0) / std::log(static_cast<double>(count));
    const double length = 1 + (pass.gain - 1) * rank;  // s_i
    double present = 1;                                // d_i
    if (pass.deflate_measured) {
      present = 0;
      for (int64_t j = 0; j < rows; ++j) {
        present += static_cast<double>(pass.left[i * rows + j]) * products[j * count + i];
      }
    }
    amounts[i] = (anew ? length : length - pass.gain) * present;
  }
}

}  // namespace

absl::Status CpuRun(ThreadPool* pool, const LeadingPairsPass& pass) {
  PairWriter writer(pass);
  const float largest = MaxAbs(pool, pass.u, pass.rows * pass.cols);
  if (!(largest > 0)) {
    writer.None();
    return absl::OkStatus();
  }
  const int64_t m = std::min(pass.rows, pass.cols), n = std::max(pass.rows, pass.cols);
  if (m <= kExactShortSide) {
    ExactPairs(pool, pass, &writer);
    return absl::OkStatus();
  }
  RitzPairs pairs;
  const absl::Status status = IterateSubspace(pool, pass, std::ilogb(largest), &pairs);
  if (!status.ok()) {
    writer.None();
    return status;
  }
  for (int64_t i = 0; i < pass.count; ++i) {
    writer.Add(i, pairs.vectors + i * m, pairs.images + i * n);
  }
  return absl::OkStatus();
}

absl::Status CpuRun(ThreadPool* pool, const ShapePass& pass) {
  const SegmentKernels& kernels = BestSegmentKernels();
  const int64_t rows = pass.o.rows, cols = pass.o.cols, count = pass.count;
  auto* products = static_cast<float*>(pass.scratch);  // O V: rows x count
  auto* amounts = reinterpret_cast<double*>(static_cast<char*>(pass.scratch) +
                                            CeilDiv(rows * count * sizeof(float), 64) * 64);
  GemmArgs args;
  args.a = pass.o;
  args.b = {const_cast<float*>(pass.right), DType::kFp32, count, cols, 1};
  args.transpose_b = true;
  args.c = {products, DType::kFp32, rows, count, 1};
  STIEFEL_RETURN_IF_ERROR(CpuGemm(pool, args));
  // What is left beside all directions is rounding, which the gain would blow up.
  const bool anew = pass.deflate_measured && count == std::min(rows, cols);
  ShapeAmounts(pass, products, anew, amounts);
  const float gain = anew ? 0.0f : static_cast<float>(pass.gain);
  auto* o = static_cast<float*>(pass.o.data);
  ForIndices(pool, CeilDiv(rows, kShapeRows), rows * cols * (count + 1), [&](int64_t block) {
    const int64_t end = std::min(rows, (block + 1) * kShapeRows);
    ForSegments(0, cols, [&](int64_t col, int64_t n) {
      for (int64_t row = block * kShapeRows; row < end; ++row) {
        float* segment = o + row * cols + col;
        kernels.scale(gain, segment, segment, n);
        for (int64_t i = 0; i < count; ++i) {
          const double amount = amounts[i] * pass.left[i * rows + row];
          kernels.add_scaled(static_cast<float>(amount), pass.right + i * cols + col, segment, n);
        }
      }
    });
  });
  return absl::OkStatus();
}

}  // namespace stiefel
