#include "kernels/cpu/amx/tile_kernels.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <iostream>
#include <limits>
#include <random>
#include <vector>

#include "common/dtype.h"
#include "gtest/gtest.h"
#include "kernels/cpu/amx/support.h"

namespace stiefel {
namespace {

template <typename T>
class Aligned {
 public:
  explicit Aligned(int64_t n) : memory_(n + 64 / sizeof(T)), n_(n) {}
  Aligned(const Aligned& other) : Aligned(other.n_) { std::copy_n(other.data(), n_, data()); }
  T* data() const {
    const auto address = reinterpret_cast<uintptr_t>(memory_.data());
    return memory_.data() + (64 - address % 64) % 64 / sizeof(T);
  }
  T& operator[](int64_t i) { return data()[i]; }
  int64_t bytes() const { return n_ * static_cast<int64_t>(sizeof(T)); }

 private:
  mutable std::vector<T> memory_;
  int64_t n_;
};

std::vector<const TileKernels*> RunnableKernels() {
  std::vector<const TileKernels*> kernels = {&kEmulatedTileKernels};
  if (CpuHasAvx512Bf16()) kernels.push_back(&kEmulatedAvx512TileKernels);
  if (CpuHasAmx()) kernels.push_back(&kAmxTileKernels);
  return kernels;
}

int64_t BlockPlace(int64_t row, int64_t col) {
  return (row / 16 * 2 + col / 16) * 256 + row % 16 * 16 + col % 16;
}

// What conversions can meet: ordinary numbers, ties, subnormal numbers, zeros, overflow and NaN.
void FillFloats(uint32_t seed, Aligned<float>* block) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  for (int64_t i = 0; i < kBlockValues; ++i) (*block)[i] = normal(random);
  const uint32_t special[] = {0x00000000, 0x80000000, 0x00000001, 0x807FFFFF, 0x00800000,
                              0x3F808000, 0x3F818000, 0x3F808001, 0x7F7FFFFF, 0xFF7F8000,
                              0x7F800000, 0xFF800000, 0x7FC00001, 0x7F800001, 0x007FFFFF};
  for (uint32_t bits : special) (*block)[random() % kBlockValues] = FloatOfBits(bits);
}

uint16_t Rounded(float x) {
  if (std::fpclassify(x) == FP_SUBNORMAL) return std::signbit(x) ? 0x8000 : 0;
  return FloatToBf16(x);
}

TEST(TileKernelsTest, LayoutsAreWhatTheHeaderSays) {
  for (const TileKernels* kernels : RunnableKernels()) {
    SCOPED_TRACE(kernels->name);
    Aligned<float> block(kBlockValues);
    Aligned<uint16_t> rows(kBlockValues), pairs(kBlockValues), transposed(kBlockValues);
    FillFloats(1, &block);
    kernels->to_row_tiles(block.data(), rows.data());
    kernels->to_pair_tiles(rows.data(), pairs.data());
    kernels->transpose(rows.data(), transposed.data());
    for (int64_t row = 0; row < 32; ++row) {
      for (int64_t col = 0; col < 32; ++col) {
        const uint16_t want = Rounded(block[BlockPlace(row, col)]);
        ASSERT_EQ(rows[row / 16 * 512 + row % 16 * 32 + col], want) << row << " " << col;
        ASSERT_EQ(pairs[col / 16 * 512 + row / 2 * 32 + col % 16 * 2 + row % 2], want);
        // Pair tiles of the transposed block: element (col, row) of it.
        ASSERT_EQ(transposed[row / 16 * 512 + col / 2 * 32 + row % 16 * 2 + col % 2], want);
      }
    }
  }
}

TEST(TileKernelsTest, CombineAddsWhatTheTilesHold) {
  Aligned<uint16_t> rows(kBlockValues);
  Aligned<float> block(kBlockValues);
  FillFloats(2, &block);
  kEmulatedTileKernels.to_row_tiles(block.data(), rows.data());
  for (const TileKernels* kernels : RunnableKernels()) {
    SCOPED_TRACE(kernels->name);
    FillFloats(3, &block);
    Aligned<float> result = block;
    kernels->combine(2.03f, -4.775f, rows.data(), result.data());
    for (int64_t row = 0; row < 32; ++row) {
      for (int64_t col = 0; col < 32; ++col) {
        const float left = 2.03f * block[BlockPlace(row, col)];
        const float right = -4.775f * Bf16ToFloat(rows[row / 16 * 512 + row % 16 * 32 + col]);
        const float want = left + right, got = result[BlockPlace(row, col)];
        ASSERT_TRUE(BitsOfFloat(got) == BitsOfFloat(want) || (std::isnan(got) && std::isnan(want)))
            << got << " " << want;
      }
    }
  }
}

float Flushed(float x) { return std::fpclassify(x) == FP_SUBNORMAL ? std::copysign(0.0f, x) : x; }

// A strip and what it must give: the instruction as the manual describes it, with fused operations.
struct StripCase {
  static constexpr int64_t kBlocks = 3, kSteps = 5;

  explicit StripCase(uint32_t seed, float magnitude) {
    std::mt19937 random(seed);
    std::normal_distribution<float> normal(0, magnitude);
    for (int64_t i = 0; i < a.bytes() / 2; ++i) a[i] = FloatToBf16(normal(random));
    for (int64_t i = 0; i < b.bytes() / 2; ++i) b[i] = FloatToBf16(normal(random));
    for (int64_t i = 0; i < c.bytes() / 4; ++i) c[i] = normal(random);
  }

  float A(int64_t row, int64_t k) {
    const int64_t place = (row / 32 * kSteps + k / 32) * kBlockValues;
    return Flushed(Bf16ToFloat(a[place + row % 32 / 16 * 512 + row % 16 * 32 + k % 32]));
  }
  float B(int64_t k, int64_t col) {
    const int64_t place = k / 32 * kBlockValues + col / 16 * 512;
    return Flushed(Bf16ToFloat(b[place + k % 32 / 2 * 32 + col % 16 * 2 + k % 2]));
  }

  float Wanted(bool first, int64_t row, int64_t col) {
    float sum = first ? 0 : c[row / 32 * kBlockValues + BlockPlace(row % 32, col)];
    for (int64_t step = 0; step < kSteps; ++step) {
      float halves[2] = {0, 0};
      for (int64_t k = 0; k < 32; ++k) {
        float& half = halves[k % 2];
        half = Flushed(std::fma(A(row, step * 32 + k), B(step * 32 + k, col), half));
      }
      sum = Flushed(Flushed(sum) + Flushed(halves[0] + halves[1]));
    }
    return sum;
  }

  // The product, with the steps cut into strips of `cut`.
  Aligned<float> Run(const TileKernels& kernels, bool first, int64_t cut) {
    Aligned<float> result = c;
    kernels.open();
    for (int64_t k = 0; k < kSteps; k += cut) {
      TileStrip strip = {a.data() + k * kBlockValues,
                         kSteps * kBlockValues,
                         b.data() + k * kBlockValues,
                         kBlocks,
                         std::min(cut, kSteps - k),
                         first && k == 0,
                         result.data(),
                         k + cut < kSteps ? b.data() + (k + cut) * kBlockValues : nullptr};
      kernels.multiply(strip);
    }
    kernels.close();
    return result;
  }

  Aligned<uint16_t> a{kBlocks * kSteps * kBlockValues}, b{kSteps * kBlockValues};
  Aligned<float> c{kBlocks * kBlockValues};
};

TEST(TileKernelsTest, TheEmulationDoesWhatTheManualSaysToTheBit) {
  // The last has products that vanish and sums that are subnormal.
  for (float magnitude : {1.0f, 1e15f, 3e-19f}) {
    StripCase strip(7, magnitude);
    for (bool first : {true, false}) {
      for (const TileKernels* kernels : RunnableKernels()) {
        if (kernels == &kAmxTileKernels) continue;  // below
        Aligned<float> result = strip.Run(*kernels, first, StripCase::kSteps);
        for (int64_t row = 0; row < 32 * StripCase::kBlocks; ++row) {
          for (int64_t col = 0; col < 32; ++col) {
            const float got = result[row / 32 * kBlockValues + BlockPlace(row % 32, col)];
            const float want = strip.Wanted(first, row, col);
            // A subnormal product is rounded by the emulation before it is added.
            const float slack = magnitude < 1e-10f ? 32 * 0x1p-126f : 0;
            ASSERT_LE(std::fabs(got - want), slack) << kernels->name << " " << row << " " << col;
          }
        }
      }
    }
  }
}

TEST(TileKernelsTest, AStripMayBeCutAnywhereAlongTheInnerDimension) {
  StripCase strip(8, 1.0f);
  for (const TileKernels* kernels : RunnableKernels()) {
    Aligned<float> whole = strip.Run(*kernels, true, StripCase::kSteps);
    for (int64_t cut : {1, 2, 3}) {
      Aligned<float> pieces = strip.Run(*kernels, true, cut);
      EXPECT_EQ(std::memcmp(whole.data(), pieces.data(), whole.bytes()), 0)
          << kernels->name << " " << cut;
    }
  }
}

// Only a machine with AMX can show this.
TEST(TileKernelsTest, TheHardwareAgreesWithTheEmulation) {
  if (!CpuHasAmx()) GTEST_SKIP() << "no AMX on this processor";
  for (float magnitude : {1.0f, 1e15f}) {
    for (bool first : {true, false}) {
      StripCase strip(9, magnitude);
      Aligned<float> hardware = strip.Run(kAmxTileKernels, first, 2);
      Aligned<float> emulated = strip.Run(kEmulatedTileKernels, first, 2);
      int64_t different = 0;
      for (int64_t i = 0; i < StripCase::kBlocks * kBlockValues; ++i) {
        different += hardware[i] != emulated[i];
        // 160 terms of magnitude^2, of either sign.
        ASSERT_LE(std::fabs(hardware[i] - emulated[i]), 160 * 0x1p-23 * magnitude * magnitude);
      }
      std::cout << different << " of " << StripCase::kBlocks * kBlockValues
                << " sums differ in the last places\n";
    }
  }
}

}  // namespace
}  // namespace stiefel
