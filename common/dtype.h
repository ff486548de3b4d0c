#ifndef STIEFEL_COMMON_DTYPE_H_
#define STIEFEL_COMMON_DTYPE_H_

#include <cstdint>
#include <cstring>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

// The element types of gradients, weights and updates, and the conversions between them.
//
// Narrowing rounds to nearest, ties to even; what is too large becomes infinity; fp16 subnormals
// are produced and read exactly; signed zero and infinity are kept. NaN stays NaN: narrowing sets
// its quiet bit and keeps the sign and the leading payload bits. bf16 <-> fp16 goes through fp32,
// which holds both exactly, so it rounds once. Every path (scalar, vectorised, any machine) gives
// the same bits.

namespace stiefel {

enum class DType : uint8_t { kFp32 = 0, kBf16 = 1, kFp16 = 2 };

// Bytes per element.
int64_t DTypeSize(DType dtype);

// "fp32", "bf16" or "fp16".
absl::string_view DTypeName(DType dtype);

// Inverse of DTypeName; INVALID_ARGUMENT for any other name, listing the known ones.
absl::StatusOr<DType> ParseDType(absl::string_view name);

inline uint32_t BitsOfFloat(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
}

inline float FloatOfBits(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

inline float Bf16ToFloat(uint16_t bits) { return FloatOfBits(static_cast<uint32_t>(bits) << 16); }

inline uint16_t FloatToBf16(float value) {
  const uint32_t bits = BitsOfFloat(value);
  // Half of the last kept place, less one when that place is even: the carry rounds to nearest,
  // ties to even, and runs into the exponent, and from the largest finite number into infinity, as
  // it should.
  const uint32_t rounded = (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16;
  const uint32_t quiet_nan = (bits >> 16) | 0x0040u;
  return static_cast<uint16_t>((bits & 0x7FFFFFFFu) > 0x7F800000u ? quiet_nan : rounded);
}

float Fp16ToFloat(uint16_t bits);
uint16_t FloatToFp16(float value);

// Converts n elements. Equal types are copied bit for bit. src and dst need no alignment beyond
// their element's and must not overlap. REQUIRES: n >= 0.
void Convert(const void* src, DType src_dtype, void* dst, DType dst_dtype, int64_t n);

}  // namespace stiefel

#endif  // STIEFEL_COMMON_DTYPE_H_
