#include "kernels/cpu/amx/tile_matrix.h"

#include <algorithm>
#include <functional>

#include "kernels/cpu/scratch.h"

namespace stiefel {
namespace {

// A task's piece of the product, in blocks: so many rows that with the inner dimension they stay in
// the second-level cache while the columns pass by. Pieces are halved until there are some for each
// thread; elements get the same bits in any piece.
constexpr int64_t kTaskRows = 8, kTaskCols = 4;
constexpr int64_t kTasksPerThread = 4;
// Steps of the inner dimension for which a column block of the right operand (16 KB) stays in the
// first-level cache.
constexpr int64_t kStripSteps = 8;
// Inner dimensions above kLongSteps go through in passes of kPassSteps, with the task's results
// kept between.
constexpr int64_t kLongSteps = 64, kPassSteps = 32;

struct Range {
  int64_t begin, end;
};

int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }

// One task: blocks rows x cols of the product.
class Task {
 public:
  Task(const TileKernels& kernels, const TileOperand& a, const TileOperand& b, bool symmetric,
       TileProducts::Epilogue epilogue, Range rows, Range cols)
      : kernels_(kernels),
        a_(a),
        b_(b),
        symmetric_(symmetric),
        epilogue_(epilogue),
        rows_(rows),
        cols_(cols),
        pass_steps_(a.steps > kLongSteps ? kPassSteps : a.steps) {}

  void Run() const {
    const int64_t height = rows_.end - rows_.begin;
    const int64_t columns = Passes() == 1 ? 1 : cols_.end - cols_.begin;
    auto* results = static_cast<float*>(ThreadScratch(
        ScratchUse::kTile, height * columns * kBlockValues * static_cast<int64_t>(sizeof(float))));
    kernels_.open();
    for (int64_t pass = 0; pass < Passes(); ++pass) {
      for (int64_t j = cols_.begin; j < cols_.end; ++j) {
        const int64_t kept = Passes() == 1 ? 0 : j - cols_.begin;
        Column(pass, j, results + kept * height * kBlockValues);
      }
    }
    kernels_.close();
  }

 private:
  int64_t Passes() const { return CeilDiv(a_.steps, pass_steps_); }

  // The steps of one pass for the strip of blocks (rows, j).
  void Column(int64_t pass, int64_t j, float* results) const {
    const int64_t top = symmetric_ ? std::max(rows_.begin, j) : rows_.begin;
    if (top >= rows_.end) return;
    const int64_t end = std::min(a_.steps, (pass + 1) * pass_steps_);
    for (int64_t k = pass * pass_steps_; k < end; k += kStripSteps) {
      TileStrip strip;
      strip.a = a_.At(top, k);
      strip.a_stride = a_.steps * kBlockValues;
      strip.b = b_.At(j, k);
      strip.blocks = rows_.end - top;
      strip.steps = std::min(kStripSteps, end - k);
      strip.first = k == 0;
      strip.c = results;
      strip.next = k + kStripSteps < end ? b_.At(j, k + kStripSteps)
                   : j + 1 < cols_.end   ? b_.At(j + 1, pass * pass_steps_)
                                         : nullptr;
      kernels_.multiply(strip);
    }
    if (end < a_.steps) return;
    for (int64_t i = top; i < rows_.end; ++i) epilogue_(results + (i - top) * kBlockValues, i, j);
  }

  const TileKernels& kernels_;
  const TileOperand &a_, &b_;
  const bool symmetric_;
  const TileProducts::Epilogue epilogue_;
  const Range rows_, cols_;
  const int64_t pass_steps_;
};

}  // namespace

void TileProducts::ForEach(int64_t count, absl::FunctionRef<void(int64_t)> body) const {
  pool_->ParallelFor(count, std::ref(body));
}

void TileProducts::Multiply(const TileOperand& a, const TileOperand& b, bool symmetric,
                            Epilogue epilogue) const {
  const int64_t threads = pool_->threads();
  const int64_t columns = CeilDiv(b.panels, kTaskCols);
  int64_t height = std::min(kTaskRows, a.panels);
  while (threads > 1 && height > 1 &&
         CeilDiv(a.panels, height) * columns < threads * kTasksPerThread) {
    height = CeilDiv(height, 2);
  }
  const int64_t strips = CeilDiv(a.panels, height);
  ForEach(strips * columns, [&](int64_t task) {
    // The rows with most blocks of a triangle first: the small tasks even out at the end.
    const int64_t top = (strips - 1 - task / columns) * height;
    const Range rows = {top, std::min(a.panels, top + height)};
    const int64_t left = task % columns * kTaskCols;
    const Range cols = {left, std::min(symmetric ? rows.end : b.panels, left + kTaskCols)};
    if (cols.begin < cols.end) Task(kernels_, a, b, symmetric, epilogue, rows, cols).Run();
  });
}

void StoreSymmetric(const TileKernels& kernels, float* block, int64_t i, int64_t j,
                    const SymmetricTiles& matrix) {
  if (i == j) {
    const auto place = [](int64_t row, int64_t col) {
      return row / kTileSide * 512 + col / kTileSide * 256 + row % kTileSide * kTileSide +
             col % kTileSide;
    };
    for (int64_t row = 0; row < kBlockSide; ++row) {
      for (int64_t col = 0; col < row; ++col) block[place(col, row)] = block[place(row, col)];
    }
  }
  alignas(64) uint16_t scratch[kBlockValues];
  uint16_t* rows = matrix.rows.At(i, j);
  uint16_t* pairs = matrix.pairs.data == nullptr ? scratch : matrix.pairs.At(j, i);
  kernels.to_row_tiles(block, rows);
  kernels.to_pair_tiles(rows, pairs);
  if (i == j) return;
  kernels.transpose(pairs, matrix.rows.At(j, i));
  if (matrix.pairs.data != nullptr) kernels.transpose(rows, matrix.pairs.At(i, j));
}

}  // namespace stiefel
