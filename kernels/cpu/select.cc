// Row and column selection: norms, the largest of them, and what is done to the vectors selected.
#include <cmath>
#include <cstring>
#include <limits>

#include "kernels/cpu/blocks.h"
#include "kernels/cpu/passes.h"

namespace stiefel {
namespace {

constexpr int64_t kColumnBlock = 256;

int64_t RowsOfBlock(int64_t cols) { return std::max<int64_t>(1, kBlockElements / cols); }

// body(row) for all rows of a rows x cols matrix.
template <typename Body>
void ForRows(ThreadPool* pool, int64_t rows, int64_t cols, const Body& body) {
  const int64_t block_rows = RowsOfBlock(cols);
  ForIndices(pool, CeilDiv(rows, block_rows), rows * cols, [&](int64_t block) {
    const int64_t end = std::min(rows, (block + 1) * block_rows);
    for (int64_t row = block * block_rows; row < end; ++row) body(row);
  });
}

// l1 norms; NaN becomes infinity, so that they can be ordered.
void Norms(ThreadPool* pool, const SelectPass& pass) {
  const SegmentKernels& kernels = BestSegmentKernels();
  const auto ordered = [](double norm) {
    return std::isnan(norm) ? std::numeric_limits<double>::infinity() : norm;
  };
  if (!pass.by_columns) {
    ForRows(pool, pass.rows, pass.cols, [&](int64_t row) {
      double norm = 0;
      ForSegments(0, pass.cols, [&](int64_t i, int64_t n) {
        norm += kernels.sum_abs(pass.u + row * pass.cols + i, n);
      });
      pass.scratch[row] = ordered(norm);
    });
    return;
  }
  ForIndices(pool, CeilDiv(pass.cols, kColumnBlock), pass.rows * pass.cols, [&](int64_t block) {
    const int64_t col = block * kColumnBlock, n = std::min(kColumnBlock, pass.cols - col);
    double* norms = pass.scratch + col;
    std::fill_n(norms, n, 0.0);
    for (int64_t row = 0; row < pass.rows; ++row)
      kernels.add_abs(pass.u + row * pass.cols + col, norms, n);
    for (int64_t j = 0; j < n; ++j) norms[j] = ordered(norms[j]);
  });
}

}  // namespace

void CpuRun(ThreadPool* pool, const SelectPass& pass) {
  Norms(pool, pass);
  const int64_t vectors = pass.by_columns ? pass.cols : pass.rows;
  int32_t* order = pass.place;  // until the places are known
  for (int64_t i = 0; i < vectors; ++i) order[i] = static_cast<int32_t>(i);
  std::nth_element(order, order + pass.count - 1, order + vectors, [&](int32_t a, int32_t b) {
    const double x = pass.scratch[a], y = pass.scratch[b];
    return x > y || (x == y && a < b);
  });
  std::fill_n(pass.selected, vectors, 0.0f);
  for (int64_t i = 0; i < pass.count; ++i) pass.selected[order[i]] = 1;
  int32_t next = 0;
  for (int64_t i = 0; i < vectors; ++i) {
    const bool selected = pass.selected[i] != 0;
    pass.place[i] = selected ? next : -1;
    if (selected) pass.index[next++] = static_cast<int32_t>(i);
  }
}

void CpuRun(ThreadPool* pool, const DampPass& pass) {
  const SegmentKernels& kernels = BestSegmentKernels();
  ForRows(pool, pass.rows, pass.cols, [&](int64_t row) {
    float* m = pass.m + row * pass.cols;
    if (pass.by_columns) {
      for (int64_t j = 0; j < pass.cols; ++j)
        m[j] = pass.selected[j] != 0 ? m[j] * pass.factor : m[j];
    } else if (pass.selected[row] != 0) {
      kernels.scale(pass.factor, m, m, pass.cols);
    }
  });
}

void CpuRun(ThreadPool* pool, const GatherPass& pass) {
  if (!pass.by_columns) {
    ForRows(pool, pass.count, pass.cols, [&](int64_t i) {
      std::memcpy(pass.out + i * pass.cols, pass.u + pass.index[i] * pass.cols,
                  pass.cols * sizeof(float));
    });
    return;
  }
  ForRows(pool, pass.rows, pass.count, [&](int64_t row) {
    for (int64_t j = 0; j < pass.count; ++j)
      pass.out[row * pass.count + j] = pass.u[row * pass.cols + pass.index[j]];
  });
}

}  // namespace stiefel
