#include "kernels/cpu/passes.h"

#include <cmath>
#include <cstring>

#include "common/dtype.h"
#include "kernels/cpu/blocks.h"
#include "kernels/cpu/segments.h"

namespace stiefel {
namespace {

// A transposing pass moves tiles of this many rows (a cache line of the other side) and columns.
constexpr int64_t kTileRows = 16;
constexpr int64_t kTileCols = 256;

void NormaliseTransposed(ThreadPool* pool, const NormalisePass& pass, double factor) {
  const SegmentKernels& kernels = BestSegmentKernels();
  ForIndices(pool, CeilDiv(pass.rows, kTileRows), pass.rows * pass.cols, [&](int64_t block) {
    alignas(64) float tile[kTileRows][kTileCols];
    alignas(64) float column[kTileRows];
    const int64_t row = block * kTileRows, rows = std::min(kTileRows, pass.rows - row);
    for (int64_t col = 0; col < pass.cols; col += kTileCols) {
      const int64_t cols = std::min(kTileCols, pass.cols - col);
      for (int64_t i = 0; i < rows; ++i) {
        kernels.scale_wide(factor, pass.u + (row + i) * pass.stride + col, tile[i], cols);
      }
      for (int64_t j = 0; j < cols; ++j) {
        for (int64_t i = 0; i < rows; ++i) column[i] = tile[i][j];
        WriteSegment(pass.x, (col + j) * pass.rows + row, rows, column);
      }
    }
  });
}

// body(row, col, n) for segments that cover a rows x cols matrix: of whole blocks of elements where
// its rows follow each other, else row by row.
template <typename Body>
void ForMatrix(ThreadPool* pool, int64_t rows, int64_t cols, int64_t stride, const Body& body) {
  const int64_t elements = rows * cols;
  if (stride == cols) {
    ForIndices(pool, CeilDiv(elements, kBlockElements), elements, [&](int64_t block) {
      const int64_t begin = block * kBlockElements;
      ForSegments(begin, std::min(elements, begin + kBlockElements),
                  [&](int64_t i, int64_t n) { body(0, i, n); });
    });
    return;
  }
  const int64_t block_rows = std::max<int64_t>(1, kBlockElements / cols);
  ForIndices(pool, CeilDiv(rows, block_rows), elements, [&](int64_t block) {
    const int64_t end = std::min(rows, (block + 1) * block_rows);
    for (int64_t row = block * block_rows; row < end; ++row)
      ForSegments(0, cols, [&](int64_t i, int64_t n) { body(row, i, n); });
  });
}

// Reads tiles of an orthogonalised update in the matrix's orientation.
class UpdateTile {
 public:
  explicit UpdateTile(const DeliverPass& pass) : pass_(pass) {}

  // Rows [row, row + rows) and columns [col, col + cols) of o.
  void Read(int64_t row, int64_t rows, int64_t col, int64_t cols) {
    if (pass_.transposed) {
      for (int64_t j = 0; j < cols; ++j) {
        const float* column = ReadSegment(pass_.x, (col + j) * pass_.rows + row, rows, buffer_);
        for (int64_t i = 0; i < rows; ++i) tile_[i][j] = column[i];
      }
    } else {
      for (int64_t i = 0; i < rows; ++i) {
        const float* from = ReadSegment(pass_.x, (row + i) * pass_.cols + col, cols, tile_[i]);
        if (from != tile_[i]) std::memcpy(tile_[i], from, cols * sizeof(float));
      }
    }
  }

  const float* operator[](int64_t i) const { return tile_[i]; }

 private:
  const DeliverPass& pass_;
  alignas(64) float tile_[kTileRows][kTileCols];
  alignas(64) float buffer_[kTileRows];
};

double FactorOf(const DeliverPass& pass, int64_t row) {
  return pass.row_factors == nullptr ? 1 : pass.row_factors[row];
}

// Delivers tile by tile; index says where rows go.
void DeliverTiles(ThreadPool* pool, const DeliverPass& pass, const int32_t* index) {
  const int64_t stride = pass.stride, elements = pass.rows * pass.cols;
  ForBlocks(pool, CeilDiv(pass.rows, kTileRows), elements, pass.stats,
            [&](int64_t block, StepStats* stats) {
              UpdateTile tile(pass);
              const int64_t row = block * kTileRows, rows = std::min(kTileRows, pass.rows - row);
              for (int64_t col = 0; col < pass.cols; col += kTileCols) {
                const int64_t cols = std::min(kTileCols, pass.cols - col);
                tile.Read(row, rows, col, cols);
                for (int64_t i = 0; i < rows; ++i) {
                  const int64_t to = index == nullptr ? row + i : index[row + i];
                  DeliverSegment(pass.delivery, to * stride + col, cols, tile[i],
                                 FactorOf(pass, row + i), elements >= kStreamedElements, stats);
                }
              }
              BestSegmentKernels().fence();
            });
}

// Rows whose update is 0.
void DeliverOtherRows(ThreadPool* pool, const ScatterPass& pass) {
  const int64_t cols = pass.deliver.cols, elements = pass.vectors * cols;
  ForBlocks(pool, CeilDiv(pass.vectors, kTileRows), elements, pass.deliver.stats,
            [&](int64_t block, StepStats* stats) {
              alignas(64) constexpr float kZeros[kSegment] = {};
              const int64_t end = std::min(pass.vectors, (block + 1) * kTileRows);
              for (int64_t row = block * kTileRows; row < end; ++row) {
                if (pass.place[row] >= 0) continue;
                ForSegments(0, cols, [&](int64_t i, int64_t n) {
                  DeliverSegment(pass.deliver.delivery, row * pass.deliver.stride + i, n, kZeros, 1,
                                 elements >= kStreamedElements, stats);
                });
              }
              BestSegmentKernels().fence();
            });
}

void ScatterColumns(ThreadPool* pool, const ScatterPass& pass) {
  const DeliverPass& deliver = pass.deliver;
  ForBlocks(pool, CeilDiv(deliver.rows, kTileRows), deliver.rows * pass.vectors, deliver.stats,
            [&](int64_t block, StepStats* stats) {
              UpdateTile tile(deliver);
              alignas(64) float wide[kTileCols];
              const int64_t row = block * kTileRows, rows = std::min(kTileRows, deliver.rows - row);
              int64_t from = 0;  // the first selected column of those that are left
              for (int64_t col = 0; col < pass.vectors; col += kTileCols) {
                const int64_t cols = std::min(kTileCols, pass.vectors - col);
                int64_t selected = 0;
                while (from + selected < deliver.cols && pass.index[from + selected] < col + cols)
                  ++selected;
                tile.Read(row, rows, from, selected);
                for (int64_t i = 0; i < rows; ++i) {
                  std::fill_n(wide, cols, 0.0f);
                  for (int64_t j = 0; j < selected; ++j)
                    wide[pass.index[from + j] - col] = tile[i][j];
                  DeliverSegment(deliver.delivery, (row + i) * deliver.stride + col, cols, wide,
                                 FactorOf(deliver, row + i), /*streaming=*/false, stats);
                }
                from += selected;
              }
            });
}

}  // namespace

// 1 / |U|_F: the sum of squares is exact up to fp64 rounding for every
// fp32 matrix, and so is every product u / |U|_F. U and 2^k U give factors that differ by 2^-k
// exactly, and the products of the two are the same bits: a power-of-two prescale would change
// nothing.
double NormaliseFactor(const NormalisePass& pass) {
  const DirectionStats& figures = *pass.figures;
  if (figures.nonfinite > 0 || figures.sum_squares == 0) return 0;
  if (pass.power_of_two) return std::ldexp(1.0, -std::ilogb(figures.max_abs));
  return 1 / std::max(std::sqrt(figures.sum_squares) + pass.eps_add, pass.eps_floor);
}

void CpuRun(ThreadPool* pool, const ElementPass& pass) {
  const int64_t elements = pass.rows * pass.gradient->cols();
  StepStats unread = {};
  ForBlocks(pool, CeilDiv(elements, kBlockElements), elements,
            pass.stats == nullptr ? &unread : pass.stats, [&](int64_t block, StepStats* stats) {
              ElementWorker worker(pass);
              alignas(64) float local[kSegment];
              const int64_t begin = block * kBlockElements;
              ForSegments(
                  begin, std::min(elements, begin + kBlockElements), [&](int64_t i, int64_t n) {
                    if (worker.fuses()) return worker.RunAndDeliver(i, n, stats);
                    float* direction = pass.direction == nullptr ? local : pass.direction + i;
                    worker.Run(i, n, direction, stats);
                    if (pass.deliver) worker.Deliver(i, n, direction, 1, stats);
                  });
            });
}

void CpuRun(ThreadPool* pool, const MeasurePass& pass) {
  StepStats total = {};
  const int64_t block_rows = std::max<int64_t>(1, kBlockElements / pass.cols);
  ForBlocks(pool, CeilDiv(pass.rows, block_rows), pass.rows * pass.cols, &total,
            [&](int64_t block, StepStats* stats) {
              SegmentSums sums = {};
              const int64_t end = std::min(pass.rows, (block + 1) * block_rows);
              for (int64_t row = block * block_rows; row < end; ++row) {
                ForSegments(0, pass.cols, [&](int64_t i, int64_t n) {
                  BestSegmentKernels().sums(pass.u + row * pass.stride + i, n, &sums);
                });
              }
              stats->direction = {sums.sum_squares, sums.max_abs, sums.nonfinite};
            });
  *pass.figures = total.direction;
}

void CpuRun(ThreadPool* pool, const NormalisePass& pass) {
  const double factor = NormaliseFactor(pass);
  if (factor == 0) {
    std::memset(pass.x.data, 0, pass.rows * pass.cols * DTypeSize(pass.x.dtype));
    return;
  }
  if (pass.transpose) return NormaliseTransposed(pool, pass, factor);
  const SegmentKernels& kernels = BestSegmentKernels();
  ForMatrix(pool, pass.rows, pass.cols, pass.stride, [&](int64_t row, int64_t col, int64_t n) {
    alignas(64) float scaled[kSegment];
    kernels.scale_wide(factor, pass.u + row * pass.stride + col, scaled, n);
    WriteSegment(pass.x, row * pass.cols + col, n, scaled);
  });
}

void CpuRun(ThreadPool* pool, const DeliverPass& pass) {
  if (pass.transposed || pass.row_factors != nullptr || pass.stride != pass.cols)
    return DeliverTiles(pool, pass, nullptr);
  const int64_t elements = pass.rows * pass.cols;
  ForBlocks(pool, CeilDiv(elements, kBlockElements), elements, pass.stats,
            [&](int64_t block, StepStats* stats) {
              alignas(64) float buffer[kSegment];
              const int64_t begin = block * kBlockElements;
              ForSegments(begin, std::min(elements, begin + kBlockElements),
                          [&](int64_t i, int64_t n) {
                            DeliverSegment(pass.delivery, i, n, ReadSegment(pass.x, i, n, buffer),
                                           1, elements >= kStreamedElements, stats);
                          });
              BestSegmentKernels().fence();
            });
}

void CpuRun(ThreadPool* pool, const ScatterPass& pass) {
  if (pass.by_columns) return ScatterColumns(pool, pass);
  DeliverTiles(pool, pass.deliver, pass.index);
  DeliverOtherRows(pool, pass);
}

void CpuAddDiagonal(ThreadPool* pool, const MatrixView& x, float diagonal, const MatrixView& out) {
  const int64_t rows = x.batch * x.rows;
  ForIndices(pool, rows, rows * x.cols, [&](int64_t row) {
    const int64_t bytes = x.cols * DTypeSize(x.dtype);
    char* to = static_cast<char*>(out.data) + row * bytes;
    if (out.data != x.data) std::memcpy(to, static_cast<const char*>(x.data) + row * bytes, bytes);
    const int64_t place = row % x.rows;
    float entry;
    Convert(to + place * DTypeSize(x.dtype), x.dtype, &entry, DType::kFp32, 1);
    entry += diagonal;
    Convert(&entry, DType::kFp32, to + place * DTypeSize(x.dtype), x.dtype, 1);
  });
}

void CpuConvert(ThreadPool* pool, const MatrixView& from, const MatrixView& to) {
  const int64_t elements = from.rows * from.cols * from.batch;
  ForMatrix(pool, 1, elements, elements, [&](int64_t, int64_t begin, int64_t n) {
    alignas(64) float buffer[kSegment];
    WriteSegment(to, begin, n, ReadSegment(from, begin, n, buffer));
  });
}

}  // namespace stiefel
