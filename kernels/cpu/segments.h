// Runs of elements of a matrix in its dtype, as fp32.
#ifndef STIEFEL_KERNELS_CPU_SEGMENTS_H_
#define STIEFEL_KERNELS_CPU_SEGMENTS_H_

#include <cstdint>

#include "kernels/backend.h"

namespace stiefel {

// The n elements from `offset` on: a pointer into x where it is fp32 already, else `buffer` filled.
const float* ReadSegment(const MatrixView& x, int64_t offset, int64_t n, float* buffer);
void WriteSegment(const MatrixView& x, int64_t offset, int64_t n, const float* values);

}  // namespace stiefel

#endif  // STIEFEL_KERNELS_CPU_SEGMENTS_H_
