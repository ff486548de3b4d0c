#include "common/dtype.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>
#include <vector>

namespace stiefel {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();

// The truth in double arithmetic, by the definition of the formats.
double Value(uint16_t bits, int exponent_bits) {
  const int mantissa_bits = 15 - exponent_bits;
  const int bias = (1 << (exponent_bits - 1)) - 1;
  const int exponent = (bits >> mantissa_bits) & ((1 << exponent_bits) - 1);
  const int mantissa = bits & ((1 << mantissa_bits) - 1);
  const double sign = bits >> 15 ? -1.0 : 1.0;
  if (exponent == (1 << exponent_bits) - 1) return mantissa ? std::nan("") : sign * kInf;
  if (exponent == 0) return sign * std::ldexp(mantissa, 1 - bias - mantissa_bits);
  return sign * std::ldexp((1 << mantissa_bits) + mantissa, exponent - bias - mantissa_bits);
}

struct Format {
  DType dtype;
  int exponent_bits;
  float (*widen)(uint16_t);
  uint16_t (*narrow)(float);
  uint16_t infinity;
};

class SixteenBits : public testing::TestWithParam<Format> {};

TEST_P(SixteenBits, EveryPatternWidensExactlyAndComesBack) {
  const Format& format = GetParam();
  for (uint32_t pattern = 0; pattern < 65536; ++pattern) {
    const auto bits = static_cast<uint16_t>(pattern);
    const float wide = format.widen(bits);
    const double truth = Value(bits, format.exponent_bits);
    if (std::isnan(truth)) {
      ASSERT_TRUE(std::isnan(wide)) << pattern;
      // Quiet bit set, sign and payload kept.
      const uint16_t quiet = 1 << (14 - format.exponent_bits);
      ASSERT_EQ(format.narrow(wide), bits | quiet) << pattern;
      continue;
    }
    ASSERT_EQ(static_cast<double>(wide), truth) << pattern;
    ASSERT_EQ(std::signbit(wide), bits >> 15 != 0) << pattern;
    ASSERT_EQ(format.narrow(wide), bits) << pattern;
  }
}

// Between each two neighbours: the middle goes to the even one, and one fp32 step beside it to the
// nearer one.
TEST_P(SixteenBits, RoundsToNearestTiesToEven) {
  const Format& format = GetParam();
  for (uint16_t low = 0; low < format.infinity; ++low) {
    const auto high = static_cast<uint16_t>(low + 1);
    const double below = Value(low, format.exponent_bits);
    // The neighbour above the largest finite number is where the exponent would go on.
    const double above = high == format.infinity ? 2 * below - Value(low - 1, format.exponent_bits)
                                                 : Value(high, format.exponent_bits);
    const double exact_middle = (below + above) / 2;
    const auto middle = static_cast<float>(exact_middle);
    ASSERT_EQ(static_cast<double>(middle), exact_middle);
    const uint16_t even = low % 2 == 0 ? low : high;
    for (float sign : {1.0f, -1.0f}) {
      const uint16_t sign_bit = sign < 0 ? 0x8000 : 0;
      ASSERT_EQ(format.narrow(sign * middle), even | sign_bit) << low;
      ASSERT_EQ(format.narrow(sign * std::nextafterf(middle, 0.0f)), low | sign_bit) << low;
      ASSERT_EQ(format.narrow(sign * std::nextafterf(middle, kInf)), high | sign_bit) << low;
    }
  }
}

TEST_P(SixteenBits, Extremes) {
  const Format& format = GetParam();
  EXPECT_EQ(format.narrow(std::numeric_limits<float>::max()), format.infinity);
  EXPECT_EQ(format.narrow(-kInf), 0x8000 | format.infinity);
  EXPECT_EQ(format.narrow(std::numeric_limits<float>::denorm_min()), 0);
  EXPECT_EQ(format.narrow(-std::numeric_limits<float>::denorm_min()), 0x8000);
  // A NaN whose payload lies only in the bits that are cut must not become infinity.
  EXPECT_EQ(format.narrow(FloatOfBits(0x7F800001u)) & ~format.infinity,
            1 << (14 - format.exponent_bits));
}

// The bulk paths (vector code and tails) against the scalar ones, bit for bit, at every alignment
// and tail length.
TEST_P(SixteenBits, BulkEqualsScalar) {
  const Format& format = GetParam();
  std::vector<uint16_t> narrow(65536 + 64);
  for (size_t i = 0; i < narrow.size(); ++i) narrow[i] = static_cast<uint16_t>(i);
  for (int64_t offset : {0, 1, 3, 7}) {
    for (int64_t n :
         {int64_t{0}, int64_t{1}, int64_t{7}, int64_t{8}, int64_t{33}, int64_t{65536}}) {
      std::vector<float> wide(n + 1, 42.0f);
      Convert(narrow.data() + offset, format.dtype, wide.data(), DType::kFp32, n);
      for (int64_t i = 0; i < n; ++i) {
        ASSERT_EQ(BitsOfFloat(wide[i]), BitsOfFloat(format.widen(narrow[i + offset]))) << i;
      }
      EXPECT_EQ(wide[n], 42.0f);
    }
  }

  std::mt19937 random(3);
  std::vector<float> wide(100003);
  for (float& value : wide) value = FloatOfBits(static_cast<uint32_t>(random()));
  std::vector<uint16_t> out(wide.size());
  Convert(wide.data(), DType::kFp32, out.data(), format.dtype, static_cast<int64_t>(wide.size()));
  for (size_t i = 0; i < wide.size(); ++i) ASSERT_EQ(out[i], format.narrow(wide[i])) << wide[i];
}

INSTANTIATE_TEST_SUITE_P(Formats, SixteenBits,
                         testing::Values(Format{DType::kBf16, 8, Bf16ToFloat, FloatToBf16, 0x7F80},
                                         Format{DType::kFp16, 5, Fp16ToFloat, FloatToFp16, 0x7C00}),
                         [](const auto& info) { return std::string(DTypeName(info.param.dtype)); });

TEST(Convert, BetweenTheSixteenBitTypesRoundsOnce) {
  std::vector<uint16_t> all(65536), got(65536);
  for (size_t i = 0; i < all.size(); ++i) all[i] = static_cast<uint16_t>(i);
  Convert(all.data(), DType::kBf16, got.data(), DType::kFp16, 65536);
  for (size_t i = 0; i < all.size(); ++i) ASSERT_EQ(got[i], FloatToFp16(Bf16ToFloat(all[i])));
  Convert(all.data(), DType::kFp16, got.data(), DType::kBf16, 65536);
  for (size_t i = 0; i < all.size(); ++i) ASSERT_EQ(got[i], FloatToBf16(Fp16ToFloat(all[i])));
}

TEST(Convert, EqualTypesKeepEveryBit) {
  const std::vector<uint32_t> odd = {0x7F800001u, 0xFFC00123u, 0x80000000u, 1u};
  std::vector<uint32_t> got(odd.size());
  Convert(odd.data(), DType::kFp32, got.data(), DType::kFp32, 4);
  EXPECT_EQ(got, odd);
}

TEST(DType, NamesAndSizes) {
  for (DType dtype : {DType::kFp32, DType::kBf16, DType::kFp16}) {
    EXPECT_EQ(*ParseDType(DTypeName(dtype)), dtype);
    EXPECT_EQ(DTypeSize(dtype), dtype == DType::kFp32 ? 4 : 2);
  }
  // CASES A19
  EXPECT_EQ(ParseDType("complex64").status().code(), absl::StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace stiefel
