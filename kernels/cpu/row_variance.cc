#include <cmath>
#include <cstring>

#include "kernels/cpu/blocks.h"
#include "kernels/cpu/passes.h"
#include "kernels/cpu/segments.h"

namespace stiefel {
namespace {

constexpr int64_t kColumnBlock = 256;

// sums[i] = sum_j o_ij^2
void RowSums(ThreadPool* pool, const RowVariancePass& pass, double* sums) {
  const SegmentKernels& kernels = BestSegmentKernels();
  const int64_t elements = pass.rows * pass.cols;
  if (!pass.transposed) {
    const int64_t block_rows = std::max<int64_t>(1, kBlockElements / pass.cols);
    ForIndices(pool, CeilDiv(pass.rows, block_rows), elements, [&](int64_t block) {
      alignas(64) float buffer[kSegment];
      const int64_t end = std::min(pass.rows, (block + 1) * block_rows);
      for (int64_t row = block * block_rows; row < end; ++row) {
        SegmentSums row_sums = {};
        ForSegments(0, pass.cols, [&](int64_t i, int64_t n) {
          kernels.sums(ReadSegment(pass.x, row * pass.cols + i, n, buffer), n, &row_sums);
        });
        sums[row] = row_sums.sum_squares;
      }
    });
    return;
  }
  ForIndices(pool, CeilDiv(pass.rows, kColumnBlock), elements, [&](int64_t block) {
    alignas(64) float buffer[kColumnBlock];
    const int64_t row = block * kColumnBlock, n = std::min(kColumnBlock, pass.rows - row);
    std::fill_n(sums + row, n, 0.0);
    for (int64_t col = 0; col < pass.cols; ++col)
      kernels.add_squares(ReadSegment(pass.x, col * pass.rows + row, n, buffer), sums + row, n);
  });
}

}  // namespace

void CpuRun(ThreadPool* pool, const RowVariancePass& pass) {
  double* factors = pass.factors;  // the sums of squares, until the factors are known
  RowSums(pool, pass, factors);
  std::memcpy(pass.new_v, pass.v, pass.state_rows * sizeof(float));
  double before = 0, after = 0;  // squared Frobenius norms
  for (int64_t i = 0; i < pass.rows; ++i) {
    const int64_t row = pass.index == nullptr ? i : pass.index[i];
    const double sum = factors[i];
    const double mean = sum / static_cast<double>(pass.cols);
    const auto v = static_cast<float>(pass.keep * pass.v[row] + pass.gain * mean);
    pass.new_v[row] = v;
    factors[i] = sum == 0 ? 0 : 1 / (std::sqrt(static_cast<double>(v)) + pass.eps);
    before += sum;
    after += sum * factors[i] * factors[i];
  }
  const double rescale = before == 0 ? 0 : std::sqrt(before) / std::max(std::sqrt(after), pass.eps);
  for (int64_t i = 0; i < pass.rows; ++i) factors[i] *= rescale;
}

}  // namespace stiefel
