#include "kernels/cpu/passes.h"

#include <cmath>
#include <cstring>

#include "kernels/cpu/blocks.h"
#include "kernels/cpu/row_wise.h"

namespace stiefel {
namespace {

// A transposing pass moves tiles of this many rows (a cache line of the other side) and columns.
constexpr int64_t kTileRows = 16;
constexpr int64_t kTileCols = 256;

// n elements of an orthogonalised matrix as fp32; a pointer into it where it is fp32 already.
const float* ReadSegment(const MatrixView& x, int64_t offset, int64_t n, float* buffer) {
  if (x.dtype == DType::kFp32) return static_cast<const float*>(x.data) + offset;
  Convert(static_cast<const char*>(x.data) + offset * DTypeSize(x.dtype), x.dtype, buffer,
          DType::kFp32, n);
  return buffer;
}

void WriteSegment(const MatrixView& x, int64_t offset, int64_t n, const float* values) {
  char* out = static_cast<char*>(x.data) + offset * DTypeSize(x.dtype);
  if (x.dtype == DType::kBf16) {
    BestSegmentKernels().round_bf16(1, values, 0, nullptr, reinterpret_cast<uint16_t*>(out), n);
  } else {
    std::memcpy(out, values, n * sizeof(float));
  }
}

// 1 / |U|_F. The sum of squares is exact up to fp64 rounding for every fp32 matrix, so U and 2^k U
// give factors that differ by 2^-k exactly, and the products of the two are the same bits: a
// power-of-two prescale would change nothing.
double NormaliseFactor(const NormalisePass& pass) {
  const StepStats& stats = *pass.stats;
  if (stats.nonfinite_gradient > 0 || stats.nonfinite_direction > 0 ||
      stats.direction_sum_squares == 0)
    return 0;
  return 1 / std::max(std::sqrt(stats.direction_sum_squares) + pass.eps_add, pass.eps_floor);
}

void NormaliseTransposed(ThreadPool* pool, const NormalisePass& pass, double factor) {
  const SegmentKernels& kernels = BestSegmentKernels();
  ForBlocks(pool, CeilDiv(pass.rows, kTileRows), nullptr, [&](int64_t block, StepStats*) {
    alignas(64) float tile[kTileRows][kTileCols];
    alignas(64) float column[kTileRows];
    const int64_t row = block * kTileRows, rows = std::min(kTileRows, pass.rows - row);
    for (int64_t col = 0; col < pass.cols; col += kTileCols) {
      const int64_t cols = std::min(kTileCols, pass.cols - col);
      for (int64_t i = 0; i < rows; ++i) {
        kernels.scale_wide(factor, pass.direction + (row + i) * pass.cols + col, tile[i], cols);
      }
      for (int64_t j = 0; j < cols; ++j) {
        for (int64_t i = 0; i < rows; ++i) column[i] = tile[i][j];
        WriteSegment(pass.x, (col + j) * pass.rows + row, rows, column);
      }
    }
  });
}

void DeliverTransposed(ThreadPool* pool, const DeliverPass& pass) {
  ForBlocks(pool, CeilDiv(pass.rows, kTileRows), pass.stats, [&](int64_t block, StepStats* stats) {
    alignas(64) float tile[kTileRows][kTileCols];
    alignas(64) float buffer[kTileRows];
    const int64_t row = block * kTileRows, rows = std::min(kTileRows, pass.rows - row);
    for (int64_t col = 0; col < pass.cols; col += kTileCols) {
      const int64_t cols = std::min(kTileCols, pass.cols - col);
      for (int64_t j = 0; j < cols; ++j) {
        const float* column = ReadSegment(pass.x, (col + j) * pass.rows + row, rows, buffer);
        for (int64_t i = 0; i < rows; ++i) tile[i][j] = column[i];
      }
      for (int64_t i = 0; i < rows; ++i) {
        DeliverSegment(pass.delivery, (row + i) * pass.cols + col, cols, tile[i], stats);
      }
    }
  });
}

}  // namespace

void CpuRun(ThreadPool* pool, const ElementPass& pass) {
  const int64_t elements = pass.gradient->rows() * pass.gradient->cols();
  ForBlocks(
      pool, CeilDiv(elements, kBlockElements), pass.stats, [&](int64_t block, StepStats* stats) {
        ElementWorker worker(pass);
        alignas(64) float local[kSegment];
        const int64_t begin = block * kBlockElements;
        ForSegments(begin, std::min(elements, begin + kBlockElements), [&](int64_t i, int64_t n) {
          float* direction = pass.direction == nullptr ? local : pass.direction + i;
          worker.Run(i, n, direction, stats);
          if (pass.deliver) DeliverSegment(pass.delivery, i, n, direction, stats);
        });
      });
}

void CpuRun(ThreadPool* pool, const RowWisePass& pass) { RunRowWise(pool, pass); }

void CpuRun(ThreadPool* pool, const NormalisePass& pass) {
  const double factor = NormaliseFactor(pass);
  if (factor == 0) {
    std::memset(pass.x.data, 0, pass.rows * pass.cols * DTypeSize(pass.x.dtype));
    return;
  }
  if (pass.transpose) return NormaliseTransposed(pool, pass, factor);
  const SegmentKernels& kernels = BestSegmentKernels();
  const int64_t elements = pass.rows * pass.cols;
  ForBlocks(pool, CeilDiv(elements, kBlockElements), nullptr, [&](int64_t block, StepStats*) {
    alignas(64) float scaled[kSegment];
    const int64_t begin = block * kBlockElements;
    ForSegments(begin, std::min(elements, begin + kBlockElements), [&](int64_t i, int64_t n) {
      kernels.scale_wide(factor, pass.direction + i, scaled, n);
      WriteSegment(pass.x, i, n, scaled);
    });
  });
}

void CpuRun(ThreadPool* pool, const DeliverPass& pass) {
  if (pass.transposed) return DeliverTransposed(pool, pass);
  const int64_t elements = pass.rows * pass.cols;
  ForBlocks(
      pool, CeilDiv(elements, kBlockElements), pass.stats, [&](int64_t block, StepStats* stats) {
        alignas(64) float buffer[kSegment];
        const int64_t begin = block * kBlockElements;
        ForSegments(begin, std::min(elements, begin + kBlockElements), [&](int64_t i, int64_t n) {
          DeliverSegment(pass.delivery, i, n, ReadSegment(pass.x, i, n, buffer), stats);
        });
      });
}

void CpuAddDiagonal(ThreadPool* pool, const MatrixView& x, float diagonal, const MatrixView& out) {
  pool->ParallelFor(x.batch * x.rows, [&](int64_t row) {
    const int64_t bytes = x.cols * DTypeSize(x.dtype);
    char* to = static_cast<char*>(out.data) + row * bytes;
    std::memcpy(to, static_cast<const char*>(x.data) + row * bytes, bytes);
    const int64_t place = row % x.rows;
    float entry;
    Convert(to + place * DTypeSize(x.dtype), x.dtype, &entry, DType::kFp32, 1);
    entry += diagonal;
    Convert(&entry, DType::kFp32, to + place * DTypeSize(x.dtype), x.dtype, 1);
  });
}

}  // namespace stiefel
