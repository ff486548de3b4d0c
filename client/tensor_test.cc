#include "client/tensor.h"

#include <cmath>
#include <limits>
#include <random>

#include "client/apply.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace stiefel {
namespace {

using ::testing::HasSubstr;

Walk MustCheck(const TensorView& view, int64_t rows, int64_t cols) {
  const auto walk = CheckView(view, rows, cols, "w");
  EXPECT_TRUE(walk.ok()) << walk.status();
  return walk.ok() ? *walk : Walk();
}

// Every view of the same numbers gives the same bytes, in every wire dtype. CASES A18.
TEST(TensorTest, ViewsEqualTheirContiguousCopy) {
  std::mt19937_64 random(1);
  const std::vector<ElementType> types = {ElementType::kFp32, ElementType::kBf16,
                                          ElementType::kFp16, ElementType::kFp64};
  for (int trial = 0; trial < 400; ++trial) {
    const int64_t rows = 1 + random() % 9;
    const int64_t cols = 1 + random() % 700;
    const ElementType type = types[random() % types.size()];
    const int64_t size = ElementTypeSize(type);
    // Element (i, j) lies at base + i row_stride + j col_stride.
    const bool transposed = random() % 2 == 0;
    const bool reversed = random() % 2 == 0;
    const int64_t gap = 1 + random() % 3;
    int64_t row_stride = transposed ? gap : cols * gap;
    int64_t col_stride = transposed ? rows * gap : gap;
    std::vector<char> memory(rows * cols * gap * size);
    int64_t base = 0;
    if (reversed) {
      base = (rows - 1) * row_stride;
      row_stride = -row_stride;
    }
    std::vector<float> plain;
    for (int64_t i = 0; i < rows; ++i) {
      for (int64_t j = 0; j < cols; ++j) {
        const float value = static_cast<float>(static_cast<int>(random() % 257) - 128) / 16;
        plain.push_back(value);  // exact in every type
        char* at = memory.data() + (base + i * row_stride + j * col_stride) * size;
        if (type == ElementType::kFp64) {
          const double wide = value;
          std::memcpy(at, &wide, 8);
        } else {
          Convert(&value, DType::kFp32, at,
                  type == ElementType::kBf16   ? DType::kBf16
                  : type == ElementType::kFp16 ? DType::kFp16
                                               : DType::kFp32,
                  1);
        }
      }
    }
    const Walk walk = MustCheck(
        {memory.data() + base * size, type, {rows, cols}, {row_stride, col_stride}}, rows, cols);
    for (const DType wire : {DType::kFp32, DType::kBf16, DType::kFp16}) {
      std::vector<char> got(plain.size() * DTypeSize(wire));
      std::vector<char> expected(got.size());
      CopyAs(walk, wire, got.data());
      Convert(plain.data(), DType::kFp32, expected.data(), wire, plain.size());
      ASSERT_EQ(got, expected) << rows << " x " << cols << " " << ElementTypeName(type);
    }
  }
}

// Views of more dimensions: the leading ones are the rows, whatever the order in memory, and rows
// can be taken out of the middle.
TEST(TensorTest, ViewsOfAnyNumberOfDimensions) {
  std::mt19937_64 random(3);
  for (int trial = 0; trial < 300; ++trial) {
    std::vector<int64_t> shape;
    const size_t dims = 3 + random() % 3;
    for (size_t d = 0; d < dims; ++d) shape.push_back(1 + random() % 4);
    shape.back() = 1 + random() % 20;
    // Strides of a random order of the dimensions.
    std::vector<size_t> order(dims);
    for (size_t d = 0; d < dims; ++d) order[d] = d;
    if (trial % 3 != 0) std::shuffle(order.begin(), order.end(), random);
    std::vector<int64_t> strides(dims);
    int64_t elements = 1;
    for (size_t k = dims; k-- > 0;) {
      strides[order[k]] = elements;
      elements *= shape[order[k]];
    }
    const size_t boundary = 1 + random() % (dims - 1);
    int64_t rows = 1;
    for (size_t d = 0; d < boundary; ++d) rows *= shape[d];
    const int64_t cols = elements / rows;
    std::vector<float> memory(elements);
    std::vector<float> plain(elements);
    for (int64_t n = 0; n < elements; ++n) {
      int64_t offset = 0, left = n;
      for (size_t d = dims; d-- > 0;) {
        offset += left % shape[d] * strides[d];
        left /= shape[d];
      }
      memory[offset] = plain[n] = static_cast<float>(n);
    }
    Walk walk = MustCheck({memory.data(), ElementType::kFp32, shape, strides}, rows, cols);
    EXPECT_EQ(walk.contiguous, memory == plain);
    const int64_t begin = random() % rows;
    const int64_t end = begin + 1 + random() % (rows - begin);
    std::vector<float> got(elements, -1);
    CopyAs(walk, DType::kFp32, got.data());
    EXPECT_EQ(got, plain);
    const int64_t left = random() % cols;
    const int64_t right = left + 1 + random() % (cols - left);
    for (const Rect& rect : {Rect{begin, end, 0, cols}, Rect{begin, end, left, right}}) {
      std::vector<float> want;
      for (int64_t i = begin; i < end; ++i) {
        want.insert(want.end(), plain.begin() + i * cols + rect.col_begin,
                    plain.begin() + i * cols + rect.col_end);
      }
      std::vector<float> part(rect.Area());
      CopyAs(walk.Part(rect), DType::kFp32, part.data());
      EXPECT_EQ(part, want);
      // A part of a part.
      const Rect inner{rect.rows() / 2, rect.rows(), rect.cols() / 2, rect.cols()};
      const std::vector<float> all = want;
      want.clear();
      for (int64_t i = inner.row_begin; i < inner.row_end; ++i) {
        want.insert(want.end(), all.begin() + i * rect.cols() + inner.col_begin,
                    all.begin() + (i + 1) * rect.cols());
      }
      part.assign(inner.Area(), -1);
      CopyAs(walk.Part(rect).Part(inner), DType::kFp32, part.data());
      EXPECT_EQ(part, want);
    }
  }
}

// CASES A19, A21, A28.
TEST(TensorTest, RefusesWhatDoesNotFit) {
  std::vector<float> data(16);
  const auto refuse = [&](const TensorView& view, const std::string& text) {
    const absl::Status status = CheckView(view, 3, 5, "gradient of \"w\"").status();
    EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr(text));
    EXPECT_THAT(std::string(status.message()), HasSubstr("gradient of \"w\""));
  };
  refuse({data.data(), ElementType::kComplex64, {3, 5}, {}}, "complex64");
  refuse({data.data(), ElementType::kComplex128, {3, 5}, {}}, "complex128");
  refuse({data.data(), ElementType::kBool, {3, 5}, {}}, "bool");
  refuse({data.data(), ElementType::kFp32, {16}, {}}, "[16]");
  refuse({data.data(), ElementType::kFp32, {15, 1}, {}}, "[15, 1]");
  refuse({data.data(), ElementType::kFp32, {5, 3}, {}}, "[5, 3]");
  refuse({data.data(), ElementType::kFp32, {1, 5, 3}, {}}, "[1, 5, 3]");
  refuse({data.data(), ElementType::kFp32, {3, 5, 2}, {}}, "[3, 5, 2]");
  refuse({data.data(), ElementType::kFp32, {-3, -5}, {}}, "[-3, -5]");
  refuse({data.data(), ElementType::kFp32, {}, {}}, "15 elements");
  refuse({data.data(), ElementType::kFp32, {3, 5}, {1}}, "1 strides");
  refuse({data.data(), ElementType::kFp32, {15}, {std::numeric_limits<int64_t>::max()}},
         "overflows");
  refuse({nullptr, ElementType::kFp32, {3, 5}, {}}, "no data");
}

TEST(ApplyTest, DecaysThenAdds) {
  std::mt19937_64 random(2);
  std::normal_distribution<float> normal;
  for (const DType dtype : {DType::kFp32, DType::kBf16}) {
    for (const int64_t cols : {1, 7, 1500}) {
      const int64_t rows = 3;
      std::vector<float> delta(rows * cols);
      std::vector<float> weights(rows * cols * 2);
      for (float& d : delta) d = Bf16ToFloat(FloatToBf16(normal(random)));
      for (float& w : weights) w = normal(random);
      std::vector<char> wire(delta.size() * DTypeSize(dtype));
      Convert(delta.data(), DType::kFp32, wire.data(), dtype, delta.size());
      std::vector<float> expected = weights;
      for (size_t i = 0; i < delta.size(); ++i) expected[i] = 0.75f * expected[i] + delta[i];
      std::vector<float> flat = weights;
      ApplyDelta(wire.data(), dtype, 0.75f,
                 MustCheck({flat.data(), ElementType::kFp32, {rows * cols}, {}}, rows, cols));
      EXPECT_EQ(flat, expected);
      // Every second element: the others stay.
      std::vector<float> strided = weights;
      ApplyDelta(
          wire.data(), dtype, 0.75f,
          MustCheck({strided.data(), ElementType::kFp32, {rows, cols}, {2 * cols, 2}}, rows, cols));
      for (size_t i = 0; i < delta.size(); ++i) {
        EXPECT_EQ(strided[2 * i], 0.75f * weights[2 * i] + delta[i]);
        EXPECT_EQ(strided[2 * i + 1], weights[2 * i + 1]);
      }
    }
  }
}

TEST(ApplyTest, StochasticRoundingKeepsTheMeanAndTheNeighbours) {
  // 1 + 3/8 of the step between bf16 neighbours.
  const float value = 1.0f + 0.375f / 128;
  int up = 0;
  constexpr int kDraws = 100000;
  for (int i = 0; i < kDraws; ++i) {
    const uint16_t rounded = StochasticBf16(value, static_cast<uint32_t>(MixBits(i)));
    ASSERT_TRUE(rounded == FloatToBf16(1.0f) || rounded == FloatToBf16(1.0f + 1.0f / 128));
    up += rounded != FloatToBf16(1.0f);
  }
  // Four standard deviations of a binomial share.
  EXPECT_NEAR(up / double{kDraws}, 0.375, 4 * std::sqrt(0.375 * 0.625 / kDraws));
  for (const float exact : {0.0f, -0.0f, 1.5f, -2.0f, std::numeric_limits<float>::infinity()}) {
    EXPECT_EQ(StochasticBf16(exact, 0xFFFF), FloatToBf16(exact));
  }
  EXPECT_TRUE(std::isnan(Bf16ToFloat(StochasticBf16(std::nanf(""), 0xFFFF))));
  EXPECT_EQ(StochasticBf16(-value, 0xFFFF), FloatToBf16(-1.0f - 1.0f / 128));
}

// Deltas far below the bf16 step would all be lost by rounding to nearest.
TEST(ApplyTest, SmallDeltasReachBf16WeightsOnAverage) {
  std::vector<float> delta(4096, 1.0f / 4096);
  std::vector<uint16_t> weights(4096, FloatToBf16(1.0f));
  const Walk walk = MustCheck({weights.data(), ElementType::kBf16, {64, 64}, {}}, 64, 64);
  for (int step = 0; step < 64; ++step) {
    ApplyDeltaBf16(delta.data(), DType::kFp32, 1.0f, MixBits(step), 0, walk.cols, walk);
  }
  double mean = 0;
  for (const uint16_t w : weights) mean += Bf16ToFloat(w) / 4096.0;
  EXPECT_NEAR(mean, 1.0 + 64.0 / 4096, 0.001);
  EXPECT_EQ(FloatToBf16(1.0f + 1.0f / 4096), FloatToBf16(1.0f));
}

TEST(ApplyTest, CopiesWeightsToEveryType) {
  const std::vector<float> source = {1, -2.5f, 3.25f, 1e-3f, 7, 8};
  std::vector<double> wide(6);
  CopyWeights(source.data(), DType::kFp32,
              MustCheck({wide.data(), ElementType::kFp64, {2, 3}, {1, 2}}, 2, 3));
  EXPECT_EQ(wide, (std::vector<double>{1, static_cast<double>(1e-3f), -2.5, 7, 3.25, 8}));
  std::vector<uint16_t> narrow(12);
  CopyWeights(source.data(), DType::kFp32,
              MustCheck({narrow.data(), ElementType::kBf16, {6}, {2}}, 2, 3));
  for (int i = 0; i < 6; ++i) {
    EXPECT_EQ(narrow[2 * i], FloatToBf16(source[i]));
    EXPECT_EQ(narrow[2 * i + 1], 0);
  }
}

}  // namespace
}  // namespace stiefel
