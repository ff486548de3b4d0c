#include "kernels/cpu/row_gram.h"

#include <algorithm>

#include "kernels/cpu/blocks.h"
#include "kernels/cpu/scratch.h"

namespace stiefel {

void RowGram(ThreadPool* pool, const float* x, int64_t rows, int64_t cols, double* gram) {
  const SegmentKernels& kernels = BestSegmentKernels();
  ForIndices(pool, rows, rows * rows / 2 * cols, [&](int64_t i) {
    auto* wide = static_cast<double*>(ThreadScratch(ScratchUse::kRows, cols * sizeof(double)));
    std::copy_n(x + i * cols, cols, wide);
    for (int64_t j = 0; j <= i; ++j) {
      gram[i * rows + j] = gram[j * rows + i] = kernels.dot_wide(x + j * cols, wide, cols);
    }
  });
}

}  // namespace stiefel
