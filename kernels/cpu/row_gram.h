#ifndef STIEFEL_KERNELS_CPU_ROW_GRAM_H_
#define STIEFEL_KERNELS_CPU_ROW_GRAM_H_

#include <cstdint>

#include "kernels/cpu/thread_pool.h"

namespace stiefel {

// gram = X X^T in fp64, symmetric to the bit; X is rows x cols.
void RowGram(ThreadPool* pool, const float* x, int64_t rows, int64_t cols, double* gram);

}  // namespace stiefel

#endif  // STIEFEL_KERNELS_CPU_ROW_GRAM_H_
