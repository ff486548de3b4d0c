// Row-wise steps. Rows without a spectral norm: one pass, each block of rows staying in the
// second-level cache between its norms and its delivery. Otherwise the direction is formed in the
// workspace first; the bits are the same.
#include <cmath>

#include "kernels/cpu/blocks.h"
#include "kernels/cpu/passes.h"
#include "kernels/cpu/scratch.h"

namespace stiefel {
namespace {

constexpr int kPowerIterations = 12;
constexpr int64_t kColumnBlock = 256;
// Longer rows do not fit the second-level cache.
constexpr int64_t kMaxFusedCols = 1 << 18;

int64_t RowsOfBlock(int64_t cols) { return std::max<int64_t>(1, kBlockElements / cols); }

// length / |x|, 0 for a zero vector.
double NormFactor(double sum_squares, double length) {
  return sum_squares == 0 ? 0 : length / std::sqrt(sum_squares);
}

double RowSum(const float* row, int64_t cols) {
  SegmentSums sums = {};
  ForSegments(0, cols, [&](int64_t i, int64_t n) { BestSegmentKernels().sums(row + i, n, &sums); });
  return sums.sum_squares;
}

// The whole step for a block of rows, in a buffer of the thread.
void RunFused(ThreadPool* pool, const RowWisePass& pass) {
  const int64_t rows = pass.element.rows, cols = pass.element.gradient->cols();
  const int64_t block_rows = RowsOfBlock(cols);
  ForBlocks(pool, CeilDiv(rows, block_rows), rows * cols, pass.element.stats,
            [&](int64_t block, StepStats* stats) {
              auto* u = static_cast<float*>(ThreadScratch(ScratchUse::kRows, cols * sizeof(float)));
              ElementWorker worker(pass.element);
              const int64_t end = std::min(rows, (block + 1) * block_rows);
              for (int64_t row = block * block_rows; row < end; ++row) {
                // The same partial sums as RowSum's, taken on the way.
                double squares = 0;
                ForSegments(0, cols, [&](int64_t i, int64_t n) {
                  squares += worker.Run(row * cols + i, n, u + i, stats);
                });
                const double factor = NormFactor(squares, pass.vectors.length);
                ForSegments(0, cols, [&](int64_t i, int64_t n) {
                  worker.Deliver(row * cols + i, n, u + i, factor, stats);
                });
              }
            });
}

// body(row) for every row of a rows x cols matrix.
template <typename Body>
void ForRows(ThreadPool* pool, int64_t rows, int64_t cols, const Body& body) {
  ForIndices(pool, CeilDiv(rows, RowsOfBlock(cols)), rows * cols, [&](int64_t block) {
    const int64_t end = std::min(rows, (block + 1) * RowsOfBlock(cols));
    for (int64_t row = block * RowsOfBlock(cols); row < end; ++row) body(row);
  });
}

void SumColumns(ThreadPool* pool, const float* u, int64_t rows, int64_t cols, double* sums) {
  ForIndices(pool, CeilDiv(cols, kColumnBlock), rows * cols, [&](int64_t block) {
    const int64_t col = block * kColumnBlock, n = std::min(kColumnBlock, cols - col);
    std::fill_n(sums + col, n, 0.0);
    for (int64_t row = 0; row < rows; ++row)
      BestSegmentKernels().add_squares(u + row * cols + col, sums + col, n);
  });
}

// o = u * length / |row| or |column|, in place.
void NormaliseRows(ThreadPool* pool, const VectorPass& pass) {
  ForRows(pool, pass.rows, pass.cols, [&](int64_t row) {
    float* u = pass.u + row * pass.cols;
    const double sum = pass.sums == nullptr ? RowSum(u, pass.cols) : pass.sums[row];
    BestSegmentKernels().scale_wide(NormFactor(sum, pass.length), u, u, pass.cols);
  });
}

void NormaliseColumns(ThreadPool* pool, const VectorPass& pass) {
  double* const factors = pass.scratch;
  const double* sums = pass.sums;
  if (sums == nullptr) {
    SumColumns(pool, pass.u, pass.rows, pass.cols, factors);
    sums = factors;
  }
  for (int64_t j = 0; j < pass.cols; ++j) factors[j] = NormFactor(sums[j], pass.length);
  ForRows(pool, pass.rows, pass.cols, [&](int64_t row) {
    float* u = pass.u + row * pass.cols;
    BestSegmentKernels().scale_each(factors, u, u, pass.cols);
  });
}

// v <- O^T O v, by rows, the contributions of kSpectralBlocks blocks of rows added in order.
void ApplyGram(ThreadPool* pool, const float* o, int64_t rows, int64_t cols, double* v,
               double* parts) {
  const SegmentKernels& kernels = BestSegmentKernels();
  const int64_t block_rows = CeilDiv(rows, kSpectralBlocks), blocks = CeilDiv(rows, block_rows);
  ForIndices(pool, blocks, rows * cols, [&](int64_t block) {
    double* part = parts + block * cols;
    std::fill_n(part, cols, 0.0);
    const int64_t begin = block * block_rows, end = std::min(rows, begin + block_rows);
    for (int64_t row = begin; row < end; ++row) {
      kernels.add_scaled_wide(kernels.dot_wide(o + row * cols, v, cols), o + row * cols, part,
                              cols);
    }
  });
  std::fill_n(v, cols, 0.0);
  for (int64_t block = 0; block < blocks; ++block) {
    for (int64_t j = 0; j < cols; ++j) v[j] += parts[block * cols + j];
  }
}

double Norm(const double* v, int64_t n) {
  double sum = 0;
  for (int64_t i = 0; i < n; ++i) sum += v[i] * v[i];
  return std::sqrt(sum);
}

// |O|_2 by power iteration from a fixed start without structure; from below, and usually within a
// few per cent.
double SpectralNorm(ThreadPool* pool, const float* o, int64_t rows, int64_t cols, double* scratch) {
  double* v = scratch;
  double* parts = scratch + cols;
  uint64_t seed = 0x9E3779B97F4A7C15u;
  for (int64_t j = 0; j < cols; ++j) {
    seed = seed * 6364136223846793005u + 1442695040888963407u;
    v[j] = static_cast<double>(seed >> 40) / (1 << 24) - 0.5;
  }
  double squared = 0;
  for (int i = 0; i < kPowerIterations; ++i) {
    const double length = Norm(v, cols);
    if (!(length > 0)) return 0;
    for (int64_t j = 0; j < cols; ++j) v[j] /= length;
    ApplyGram(pool, o, rows, cols, v, parts);
    squared = Norm(v, cols);
  }
  return std::sqrt(squared);
}

void RunInWorkspace(ThreadPool* pool, const RowWisePass& pass) {
  ElementPass momentum = pass.element;
  momentum.direction = pass.vectors.u;
  CpuRun(pool, momentum);
  CpuRun(pool, pass.vectors);
  DeliverPass deliver;
  deliver.rows = pass.vectors.rows;
  deliver.cols = deliver.stride = pass.vectors.cols;
  deliver.x = {pass.vectors.u, DType::kFp32, deliver.rows, deliver.cols, 1};
  deliver.delivery = pass.element.delivery;
  deliver.stats = pass.element.stats;
  CpuRun(pool, deliver);
}

}  // namespace

void CpuRun(ThreadPool* pool, const VectorSumsPass& pass) {
  if (pass.by_columns) return SumColumns(pool, pass.u, pass.rows, pass.cols, pass.sums);
  ForRows(pool, pass.rows, pass.cols,
          [&](int64_t row) { pass.sums[row] = RowSum(pass.u + row * pass.cols, pass.cols); });
}

void CpuRun(ThreadPool* pool, const VectorPass& pass) {
  const int64_t rows = pass.rows, cols = pass.cols;
  if (pass.by_columns) {
    NormaliseColumns(pool, pass);
  } else {
    NormaliseRows(pool, pass);
  }
  if (!pass.measure_spectral && !(pass.spectral_max > 0)) return;
  double norm = SpectralNorm(pool, pass.u, rows, cols, pass.scratch);
  if (pass.spectral_max > 0 && norm > pass.spectral_max) {
    const double cap = pass.spectral_max / norm;
    ForIndices(pool, rows, rows * cols, [&](int64_t row) {
      BestSegmentKernels().scale_wide(cap, pass.u + row * cols, pass.u + row * cols, cols);
    });
    norm = pass.spectral_max;
  }
  pass.stats->spectral_norm = norm;
}

void CpuRun(ThreadPool* pool, const RowWisePass& pass) {
  const VectorPass& vectors = pass.vectors;
  if (vectors.by_columns || vectors.measure_spectral || vectors.spectral_max > 0 ||
      vectors.cols > kMaxFusedCols) {
    RunInWorkspace(pool, pass);
  } else {
    RunFused(pool, pass);
  }
}

}  // namespace stiefel
