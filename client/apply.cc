#include "client/apply.h"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace stiefel {
namespace {

// The caller's view was writable: CheckView only reads its shape.
char* Writable(const char* address) { return const_cast<char*>(address); }

// Delta elements [begin, begin + count) as fp32: in place, or converted into `scratch`.
const float* AsFloats(const void* delta, DType dtype, int64_t begin, int64_t count,
                      float* scratch) {
  const char* source = static_cast<const char*>(delta) + begin * DTypeSize(dtype);
  if (dtype == DType::kFp32 && reinterpret_cast<uintptr_t>(source) % alignof(float) == 0) {
    return reinterpret_cast<const float*>(source);
  }
  Convert(source, dtype, scratch, DType::kFp32, count);
  return scratch;
}

}  // namespace

uint16_t StochasticBf16(float value, uint32_t random_bits) {
  if (!std::isfinite(value)) return FloatToBf16(value);
  // The magnitude's low half is the distance to the neighbour below in units of 2^-16 steps; a
  // carry takes the magnitude up.
  return static_cast<uint16_t>((BitsOfFloat(value) + (random_bits & 0xFFFFu)) >> 16);
}

void ApplyDelta(const void* delta, DType dtype, float decay, const Walk& weights) {
  float scratch[kWalkRun];
  ForEachRun(weights, [&](int64_t first, const char* address, int64_t stride, int64_t count) {
    const float* d = AsFloats(delta, dtype, first, count, scratch);
    char* target = Writable(address);
    if (stride == 1 && reinterpret_cast<uintptr_t>(target) % alignof(float) == 0) {
      float* w = reinterpret_cast<float*>(target);
      for (int64_t k = 0; k < count; ++k) w[k] = decay * w[k] + d[k];
      return;
    }
    for (int64_t k = 0; k < count; ++k) {
      float w;
      std::memcpy(&w, target + k * stride * 4, sizeof(w));
      w = decay * w + d[k];
      std::memcpy(target + k * stride * 4, &w, sizeof(w));
    }
  });
}

void ApplyDeltaBf16(const void* delta, DType dtype, float decay, uint64_t seed,
                    int64_t first_number, int64_t row_stride, const Walk& weights) {
  float scratch[kWalkRun];
  ForEachRun(weights, [&](int64_t first, const char* address, int64_t stride, int64_t count) {
    const float* d = AsFloats(delta, dtype, first, count, scratch);
    char* target = Writable(address);
    for (int64_t k = 0; k < count; ++k) {
      const int64_t element = first + k;
      const int64_t place = row_stride == weights.cols
                                ? element
                                : element / weights.cols * row_stride + element % weights.cols;
      const uint64_t number = static_cast<uint64_t>(first_number + place);
      const uint64_t bits = MixBits(seed + number / 4) >> (16 * (number % 4));
      uint16_t w;
      std::memcpy(&w, target + k * stride * 2, sizeof(w));
      w = StochasticBf16(decay * Bf16ToFloat(w) + d[k], static_cast<uint32_t>(bits));
      std::memcpy(target + k * stride * 2, &w, sizeof(w));
    }
  });
}

void CopyWeights(const void* source, DType dtype, const Walk& weights) {
  const int64_t size = ElementTypeSize(weights.type);
  const DType to = weights.type == ElementType::kBf16   ? DType::kBf16
                   : weights.type == ElementType::kFp16 ? DType::kFp16
                                                        : DType::kFp32;
  char scratch[kWalkRun * 4];
  ForEachRun(weights, [&](int64_t first, const char* address, int64_t stride, int64_t count) {
    const char* from = static_cast<const char*>(source) + first * DTypeSize(dtype);
    char* target = Writable(address);
    if (stride == 1 && weights.type != ElementType::kFp64) {
      return Convert(from, dtype, target, to, count);
    }
    Convert(from, dtype, scratch, to, count);
    for (int64_t k = 0; k < count; ++k) {
      if (weights.type == ElementType::kFp64) {
        float narrow;
        std::memcpy(&narrow, scratch + k * 4, sizeof(narrow));
        const double wide = narrow;
        std::memcpy(target + k * stride * size, &wide, sizeof(wide));
      } else {
        std::memcpy(target + k * stride * size, scratch + k * size, static_cast<size_t>(size));
      }
    }
  });
}

}  // namespace stiefel
