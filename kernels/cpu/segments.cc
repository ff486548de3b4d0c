#include "kernels/cpu/segments.h"

#include <cstring>

#include "common/dtype.h"
#include "kernels/cpu/segment_kernels.h"

namespace stiefel {

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

}  // namespace stiefel
