#include "kernels/cpu/aol.h"

#include <algorithm>
#include <cmath>
#include <functional>

#include "kernels/cpu/scratch.h"
#include "kernels/cpu/segment_kernels.h"

namespace stiefel {
namespace {

constexpr double kAolFloor = 1e-7;  // of the largest row sum

char* Row(const MatrixView& view, int64_t row) {
  return static_cast<char*>(view.data) + row * view.cols * DTypeSize(view.dtype);
}

double AbsoluteSum(const MatrixView& view, int64_t row) {
  double sum = 0;
  if (view.dtype == DType::kFp32) {
    const auto* values = reinterpret_cast<const float*>(Row(view, row));
    for (int64_t j = 0; j < view.cols; ++j) sum += std::fabs(static_cast<double>(values[j]));
  } else {
    const auto* values = reinterpret_cast<const uint16_t*>(Row(view, row));
    for (int64_t j = 0; j < view.cols; ++j)
      sum += std::fabs(static_cast<double>(Bf16ToFloat(values[j])));
  }
  return sum;
}

// row <- factor * each * row, element by element; `each` is all ones where null.
void ScaleRow(const MatrixView& view, int64_t row, double factor, const double* each) {
  const SegmentKernels& kernels = BestSegmentKernels();
  alignas(64) float values[kSegment];
  alignas(64) double factors[kSegment];
  for (int64_t begin = 0; begin < view.cols; begin += kSegment) {
    const int64_t n = std::min(kSegment, view.cols - begin);
    char* place = Row(view, row) + begin * DTypeSize(view.dtype);
    Convert(place, view.dtype, values, DType::kFp32, n);
    if (each == nullptr) {
      kernels.scale_wide(factor, values, values, n);
    } else {
      for (int64_t j = 0; j < n; ++j) factors[j] = factor * each[begin + j];
      kernels.scale_each(factors, values, values, n);
    }
    Convert(values, DType::kFp32, place, view.dtype, n);
  }
}

}  // namespace

void AolScales(int64_t m, double* sums) {
  const double floor = kAolFloor * *std::max_element(sums, sums + m);
  for (int64_t i = 0; i < m; ++i) {
    sums[i] = sums[i] == 0 ? 0 : 1 / std::sqrt(std::max(sums[i], floor));
  }
}

void CpuRun(ThreadPool* pool, const AolPass& pass) {
  const int64_t m = pass.gram.rows, count = pass.gram.batch * m;
  auto* scales = static_cast<double*>(ThreadScratch(ScratchUse::kRows, count * sizeof(double)));
  const auto sum = [&](int64_t row) { scales[row] = AbsoluteSum(pass.gram, row); };
  const auto scale = [&](int64_t row) {
    ScaleRow(pass.gram, row, scales[row], scales + row / m * m);
    ScaleRow(pass.x, row, scales[row], nullptr);
  };
  pool->ParallelFor(count, std::ref(sum));
  for (int64_t matrix = 0; matrix < pass.gram.batch; ++matrix) {
    AolScales(m, scales + matrix * m);
  }
  pool->ParallelFor(count, std::ref(scale));
}

}  // namespace stiefel
