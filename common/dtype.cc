#include "common/dtype.h"

#include <algorithm>

#include "absl/strings/str_cat.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace stiefel {
namespace {

// Elements of the fp32 buffer through which bf16 <-> fp16 goes.
constexpr int64_t kBounceElements = 2048;

// The generic loops: plain C++ that is right on every machine, inlined into functions for wider
// vector units.
__attribute__((always_inline)) inline void Bf16ToFp32Loop(const uint16_t* src, float* dst,
                                                          int64_t n) {
  for (int64_t i = 0; i < n; ++i) dst[i] = Bf16ToFloat(src[i]);
}

__attribute__((always_inline)) inline void Fp32ToBf16Loop(const float* src, uint16_t* dst,
                                                          int64_t n) {
  for (int64_t i = 0; i < n; ++i) dst[i] = FloatToBf16(src[i]);
}

void Bf16ToFp32Generic(const uint16_t* src, float* dst, int64_t n) { Bf16ToFp32Loop(src, dst, n); }
void Fp32ToBf16Generic(const float* src, uint16_t* dst, int64_t n) { Fp32ToBf16Loop(src, dst, n); }

void Fp16ToFp32Generic(const uint16_t* src, float* dst, int64_t n) {
  for (int64_t i = 0; i < n; ++i) dst[i] = Fp16ToFloat(src[i]);
}

void Fp32ToFp16Generic(const float* src, uint16_t* dst, int64_t n) {
  for (int64_t i = 0; i < n; ++i) dst[i] = FloatToFp16(src[i]);
}

#if defined(__x86_64__)

__attribute__((target("avx2"))) void Bf16ToFp32Avx2(const uint16_t* src, float* dst, int64_t n) {
  Bf16ToFp32Loop(src, dst, n);
}

__attribute__((target("avx2"))) void Fp32ToBf16Avx2(const float* src, uint16_t* dst, int64_t n) {
  Fp32ToBf16Loop(src, dst, n);
}

__attribute__((target("avx,f16c"))) void Fp16ToFp32F16c(const uint16_t* src, float* dst,
                                                        int64_t n) {
  int64_t i = 0;
  for (; i + 8 <= n; i += 8) {
    const __m128i half = _mm_loadu_si128(reinterpret_cast<const __m128i*>(src + i));
    _mm256_storeu_ps(dst + i, _mm256_cvtph_ps(half));
  }
  for (; i < n; ++i) dst[i] = Fp16ToFloat(src[i]);
}

__attribute__((target("avx,f16c"))) void Fp32ToFp16F16c(const float* src, uint16_t* dst,
                                                        int64_t n) {
  int64_t i = 0;
  for (; i + 8 <= n; i += 8) {
    const __m128i half =
        _mm256_cvtps_ph(_mm256_loadu_ps(src + i), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(dst + i), half);
  }
  for (; i < n; ++i) dst[i] = FloatToFp16(src[i]);
}

#endif

// What this machine runs; chosen once. Not target_clones: its resolvers run before the sanitizers
// are ready.
struct Loops {
  void (*bf16_to_fp32)(const uint16_t*, float*, int64_t) = Bf16ToFp32Generic;
  void (*fp32_to_bf16)(const float*, uint16_t*, int64_t) = Fp32ToBf16Generic;
  void (*fp16_to_fp32)(const uint16_t*, float*, int64_t) = Fp16ToFp32Generic;
  void (*fp32_to_fp16)(const float*, uint16_t*, int64_t) = Fp32ToFp16Generic;

  Loops() {
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx2")) {
      bf16_to_fp32 = Bf16ToFp32Avx2;
      fp32_to_bf16 = Fp32ToBf16Avx2;
      // Every processor with AVX2 has F16C; __builtin_cpu_supports of older compilers does not know
      // its name.
      fp16_to_fp32 = Fp16ToFp32F16c;
      fp32_to_fp16 = Fp32ToFp16F16c;
    }
#endif
  }
};

const Loops& ThisMachine() {
  static const Loops loops;
  return loops;
}

void ToFp32(const void* src, DType dtype, float* dst, int64_t n) {
  const auto* half = static_cast<const uint16_t*>(src);
  dtype == DType::kBf16 ? ThisMachine().bf16_to_fp32(half, dst, n)
                        : ThisMachine().fp16_to_fp32(half, dst, n);
}

void FromFp32(const float* src, void* dst, DType dtype, int64_t n) {
  auto* half = static_cast<uint16_t*>(dst);
  dtype == DType::kBf16 ? ThisMachine().fp32_to_bf16(src, half, n)
                        : ThisMachine().fp32_to_fp16(src, half, n);
}

}  // namespace

int64_t DTypeSize(DType dtype) { return dtype == DType::kFp32 ? 4 : 2; }

absl::string_view DTypeName(DType dtype) {
  switch (dtype) {
    case DType::kFp32:
      return "fp32";
    case DType::kBf16:
      return "bf16";
    case DType::kFp16:
      return "fp16";
  }
  return "?";
}

absl::StatusOr<DType> ParseDType(absl::string_view name) {
  for (DType dtype : {DType::kFp32, DType::kBf16, DType::kFp16}) {
    if (name == DTypeName(dtype)) return dtype;
  }
  return absl::InvalidArgumentError(
      absl::StrCat("dtype '", name, "' is not known: it is fp32, bf16 or fp16"));
}

float Fp16ToFloat(uint16_t bits) {
  const uint32_t sign = static_cast<uint32_t>(bits & 0x8000u) << 16;
  const uint32_t exponent = (bits >> 10) & 0x1Fu;
  const uint32_t mantissa = bits & 0x3FFu;
  if (exponent == 0x1F) {  // Infinity, or NaN made quiet, as the processor does.
    return FloatOfBits(sign | 0x7F800000u | (mantissa << 13) | (mantissa != 0 ? 0x400000u : 0u));
  }
  if (exponent == 0) {  // Zero or subnormal: mantissa * 2^-24, exact in fp32.
    return FloatOfBits(sign | BitsOfFloat(static_cast<float>(mantissa) * 0x1p-24f));
  }
  return FloatOfBits(sign | ((exponent + 112) << 23) | (mantissa << 13));
}

uint16_t FloatToFp16(float value) {
  const uint32_t bits = BitsOfFloat(value);
  const uint32_t sign = (bits >> 16) & 0x8000u;
  const uint32_t magnitude = bits & 0x7FFFFFFFu;
  if (magnitude > 0x7F800000u) {
    return static_cast<uint16_t>(sign | 0x7E00u | ((magnitude >> 13) & 0x3FFu));
  }
  if (magnitude >= 0x47800000u) return static_cast<uint16_t>(sign | 0x7C00u);  // 2^16 and more.
  if (magnitude < 0x38800000u) {
    // Below 2^-14, the least normal fp16: adding 0.5 puts the unit 2^-24 in the sum's last place,
    // so the fp32 addition itself rounds to nearest even. (From 2^-14 - 2^-25 on the result is the
    // least normal: right too.)
    const float sum = FloatOfBits(magnitude) + 0.5f;
    return static_cast<uint16_t>(sign | (BitsOfFloat(sum) - 0x3F000000u));
  }
  const uint32_t odd = (magnitude >> 13) & 1u;
  // Rebias the exponent by 127 - 15 and round; from 65520 on the carry reaches infinity.
  return static_cast<uint16_t>(sign | ((magnitude - 0x38000000u + 0xFFFu + odd) >> 13));
}

void Convert(const void* src, DType src_dtype, void* dst, DType dst_dtype, int64_t n) {
  if (n == 0) return;
  if (src_dtype == dst_dtype) {
    std::memcpy(dst, src, static_cast<size_t>(n * DTypeSize(src_dtype)));
  } else if (dst_dtype == DType::kFp32) {
    ToFp32(src, src_dtype, static_cast<float*>(dst), n);
  } else if (src_dtype == DType::kFp32) {
    FromFp32(static_cast<const float*>(src), dst, dst_dtype, n);
  } else {
    float bounce[kBounceElements];
    for (int64_t done = 0; done < n; done += kBounceElements) {
      const int64_t piece = std::min(kBounceElements, n - done);
      ToFp32(static_cast<const uint16_t*>(src) + done, src_dtype, bounce, piece);
      FromFp32(bounce, static_cast<uint16_t*>(dst) + done, dst_dtype, piece);
    }
  }
}

}  // namespace stiefel
