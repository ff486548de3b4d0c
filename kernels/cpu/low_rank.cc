#include "kernels/cpu/low_rank.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "kernels/cpu/blocks.h"
#include "kernels/cpu/row_gram.h"
#include "kernels/cpu/scratch.h"
#include "kernels/cpu/segment_kernels.h"
#include "kernels/cpu/symmetric_eigen.h"

namespace stiefel {
namespace {

// Columns that a transposing or summing pass takes at a time.
constexpr int64_t kPassCols = 256;

// What a variance of 0, the state before the first step, stands for.
constexpr double kStartVariance = 1e-12;

// Rounding a step of up to some hundred rows to fp32 lengthens it by less than this.
constexpr double kSafeSide = 1 - 1e-6;

double Started(float variance) { return variance == 0 ? kStartVariance : variance; }

double LargestVariance(const float* v, int64_t n) {
  double largest = 0;
  for (int64_t i = 0; i < n; ++i) largest = std::max(largest, Started(v[i]));
  return largest;
}

// Into `factors`: w^power of the columns [begin, begin + n).
void MetricFactors(const MetricPass& pass, double largest, int64_t begin, int64_t n,
                   double* factors) {
  for (int64_t j = 0; j < n; ++j) {
    factors[j] =
        pass.variance == nullptr
            ? 1
            : std::pow(Started(pass.variance[begin + j]) / largest + pass.floor, pass.power);
  }
}

// (V^T diag((lambda + damping) / largest)^-1/2 V) in fp32, from V and lambda in fp64. `vectors` is
// overwritten.
void InverseRoot(ThreadPool* pool, int64_t n, const double* lambda, double damping, double* vectors,
                 double* columns, float* root) {
  for (int64_t k = 0; k < n; ++k) {
    // Rounding may leave a zero eigenvalue a little below.
    const double scale = std::pow((std::max(lambda[k], 0.0) + damping) / lambda[0], -0.25);
    for (int64_t i = 0; i < n; ++i) columns[i * n + k] = vectors[k * n + i] * scale;
  }
  ForIndices(pool, n, n * n * n / 2, [&](int64_t i) {
    for (int64_t j = 0; j <= i; ++j) {
      root[i * n + j] = root[j * n + i] =
          static_cast<float>(Dot(columns + i * n, columns + j * n, n));
    }
  });
}

}  // namespace

void CpuRun(ThreadPool* pool, const MetricPass& pass) {
  const SegmentKernels& kernels = BestSegmentKernels();
  const int64_t out_rows = pass.transpose ? pass.cols : pass.rows;
  const int64_t out_cols = pass.transpose ? pass.rows : pass.cols;
  const double largest = pass.variance == nullptr ? 1 : LargestVariance(pass.variance, out_cols);
  ForIndices(pool, CeilDiv(out_cols, kPassCols), out_rows * out_cols, [&](int64_t block) {
    alignas(64) double factors[kPassCols];
    alignas(64) float gathered[kPassCols];
    const int64_t begin = block * kPassCols, n = std::min(kPassCols, out_cols - begin);
    MetricFactors(pass, largest, begin, n, factors);
    for (int64_t i = 0; i < out_rows; ++i) {
      const float* x = pass.x + i * pass.cols + begin;
      if (pass.transpose) {
        for (int64_t j = 0; j < n; ++j) gathered[j] = pass.x[(begin + j) * pass.cols + i];
        x = gathered;
      }
      kernels.scale_each(factors, x, pass.out + i * out_cols + begin, n);
    }
  });
}

void CpuRun(ThreadPool* pool, const GramPass& pass) {
  const int64_t n = pass.rows;
  auto* gram = static_cast<double*>(pass.scratch);
  double* vectors = gram + CeilDiv(n * n, 8) * 8;
  double* lambda = vectors + CeilDiv(n * n, 8) * 8;
  RowGram(pool, pass.x, n, pass.cols, gram);
  const bool wants_root = pass.inverse_root != nullptr;
  if (!SymmetricEigen(gram, n, lambda, wants_root ? vectors : nullptr)) {
    *pass.largest = std::numeric_limits<double>::quiet_NaN();
    if (wants_root) std::fill_n(pass.inverse_root, n * n, std::nanf(""));
    return;
  }
  *pass.largest = std::max(lambda[0], 0.0);
  if (!wants_root) return;
  if (*pass.largest == 0) {
    std::fill_n(pass.inverse_root, n * n, 0.0f);
    return;
  }
  const double tiny = std::numeric_limits<float>::min();
  InverseRoot(pool, n, lambda, std::max(pass.damping * lambda[0], tiny), vectors, gram,
              pass.inverse_root);
}

void CpuRun(ThreadPool* pool, const PoloraPass& pass) {
  const SegmentKernels& kernels = BestSegmentKernels();
  const PoloraNorms& norms = *pass.norms;
  const bool moves = norms.partner_metric != 0 && norms.step != 0;
  // Written so that what is not finite stays so.
  const double length = pass.product_scale * (std::sqrt(norms.own) + std::sqrt(norms.partner)) *
                        std::sqrt(norms.step);
  ForIndices(pool, CeilDiv(pass.cols, kPassCols), 2 * pass.rows * pass.cols, [&](int64_t block) {
    const int64_t begin = block * kPassCols, n = std::min(kPassCols, pass.cols - begin);
    alignas(64) double squares[kPassCols] = {};
    for (int64_t i = 0; i < pass.rows; ++i) {
      float* d = pass.d + i * pass.cols + begin;
      if (moves) {
        kernels.scale_wide(kSafeSide / length, d, d, n);
      } else {
        std::fill_n(d, n, 0.0f);
      }
      kernels.add_squares(pass.h + i * pass.cols + begin, squares, n);
    }
    for (int64_t j = 0; j < n; ++j) {
      const float v = pass.variance[begin + j];
      const double mean = squares[j] / (norms.partner_metric * static_cast<double>(pass.rows));
      pass.new_variance[begin + j] =
          moves ? static_cast<float>(pass.keep * Started(v) + (1 - pass.keep) * mean) : v;
    }
  });
}

}  // namespace stiefel
