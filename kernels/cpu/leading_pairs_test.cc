#include "kernels/cpu/leading_pairs.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/reference/dense.h"

namespace stiefel {
namespace {

std::vector<float> Narrow(const Dense& a) { return {a.values.begin(), a.values.end()}; }

Dense Widened(const std::vector<float>& x, int64_t rows, int64_t cols) {
  return Dense(rows, cols, std::vector<double>(x.begin(), x.end()));
}

class Scratch {
 public:
  explicit Scratch(int64_t bytes) : bytes_(bytes + 64) {}
  void* data() {
    void* at = bytes_.data();
    size_t space = bytes_.size();
    return std::align(64, 1, at, space);
  }

 private:
  std::vector<char> bytes_;
};

struct Pairs {
  std::vector<float> found, left, right;
};

Pairs Find(ThreadPool* pool, const std::vector<float>& u, int64_t rows, int64_t cols, int64_t count,
           std::vector<float> start = {}) {
  const int64_t m = std::min(rows, cols);
  start.resize(count * m);
  Pairs pairs{std::vector<float>(count * m), std::vector<float>(count * rows),
              std::vector<float>(count * cols)};
  Scratch scratch(LeadingPairsScratch(rows, cols, count));
  LeadingPairsPass pass;
  pass.u = u.data();
  pass.rows = rows;
  pass.cols = cols;
  pass.count = count;
  pass.start = start.data();
  pass.found = pairs.found.data();
  pass.left = pairs.left.data();
  pass.right = pairs.right.data();
  pass.scratch = scratch.data();
  EXPECT_TRUE(CpuRun(pool, pass).ok());
  return pairs;
}

// sum_i weights[i] u_i v_i^T, in which a pair's common sign does not matter.
Dense Weighted(const Pairs& pairs, int64_t rows, int64_t cols, const std::vector<double>& weights) {
  const int64_t count = static_cast<int64_t>(weights.size());
  Dense left = Widened(pairs.left, count, rows);
  for (int64_t i = 0; i < count; ++i) {
    for (int64_t j = 0; j < rows; ++j) left(i, j) *= weights[i];
  }
  return Multiply(Transpose(left), Widened(pairs.right, count, cols));
}

Dense Weighted(const SingularPairs& exact, int64_t rows, int64_t cols,
               const std::vector<double>& weights) {
  const int64_t count = static_cast<int64_t>(weights.size());
  return Weighted(Pairs{{},
                        Narrow(Block(exact.left, 0, 0, count, rows)),
                        Narrow(Block(exact.right, 0, 0, count, cols))},
                  rows, cols, weights);
}

// Different for every pair, and 0 for the last, whose subspace a close next value makes uncertain.
std::vector<double> Weights(int64_t count) {
  std::vector<double> weights;
  for (int64_t i = 0; i < count; ++i) weights.push_back(1 - static_cast<double>(i + 1) / count);
  return weights;
}

struct Case {
  int64_t rows, cols, count;
};

TEST(LeadingPairsTest, RandomMatricesAgreeWithTheirSingularValueDecomposition) {
  ThreadPool pool(2);
  int cases = 0;
  for (const Case& c : {Case{1, 9, 1},
                        {9, 1, 1},
                        {5, 3, 2},
                        {20, 33, 6},
                        {64, 64, 11},
                        {65, 65, 11},
                        {70, 130, 12},
                        {150, 90, 13},
                        {120, 120, 1},
                        {66, 90, 40}}) {
    const std::vector<float> u = Narrow(RandomNormal(c.rows, c.cols, 100 + cases++));
    const SingularPairs exact = SingularValueDecomposition(Widened(u, c.rows, c.cols));
    std::vector<double> weights = Weights(c.count);
    if (c.count == 1) weights[0] = 1;
    const Dense wanted = Weighted(exact, c.rows, c.cols, weights);
    const Pairs pairs = Find(&pool, u, c.rows, c.cols, c.count);
    const Dense error = Combine(1, Weighted(pairs, c.rows, c.cols, weights), -1, wanted);
    EXPECT_LE(MaxAbs(error), 3e-5) << c.rows << " x " << c.cols;
    // Handed on to the next search: the vectors of the short side.
    EXPECT_EQ(pairs.found, c.rows <= c.cols ? pairs.left : pairs.right);
  }
}

// U = sum_i values[i] a_i b_i^T with known orthonormal a, b.
Dense Known(int64_t rows, int64_t cols, const std::vector<double>& values) {
  const int64_t rank = static_cast<int64_t>(values.size());
  Dense a = RandomOrthonormalRows(rank, rows, 1);
  const Dense b = RandomOrthonormalRows(rank, cols, 2);
  for (int64_t i = 0; i < rank; ++i) {
    for (int64_t j = 0; j < rows; ++j) a(i, j) *= values[i];
  }
  return Multiply(Transpose(a), b);
}

TEST(LeadingPairsTest, SingularValuesOverFourDecades) {
  ThreadPool pool(2);
  for (const Case& c : {Case{40, 60, 10}, {200, 150, 18}}) {
    std::vector<double> values;
    for (int i = 0; i < 40; ++i) values.push_back(std::pow(10.0, -i / 9.0));
    const Pairs pairs = Find(&pool, Narrow(Known(c.rows, c.cols, values)), c.rows, c.cols, c.count);
    // u_i^T U v_i
    const Dense middle = Multiply(
        Widened(pairs.left, c.count, c.rows),
        Multiply(Known(c.rows, c.cols, values), Transpose(Widened(pairs.right, c.count, c.cols))));
    for (int64_t i = 0; i < c.count; ++i) EXPECT_NEAR(middle(i, i) / values[i], 1, 1e-4) << i;
  }
}

TEST(LeadingPairsTest, EqualSingularValuesGiveSomeBasisOfTheirSpace) {
  ThreadPool pool(2);
  for (const Case& c : {Case{30, 50, 6}, {100, 110, 14}}) {
    const std::vector<double> values = {2, 2, 2, 1, 1};
    const Dense u = Known(c.rows, c.cols, values);
    const Pairs pairs = Find(&pool, Narrow(u), c.rows, c.cols, c.count);
    std::vector<double> weights(c.count, 0.0);
    std::copy(values.begin(), values.end(), weights.begin());
    const Dense error = Combine(1, Weighted(pairs, c.rows, c.cols, weights), -1, u);
    EXPECT_LE(MaxAbs(error), 1e-5);
    // Beyond the rank there are no pairs.
    for (int64_t i = 5; i < c.count; ++i) {
      for (int64_t j = 0; j < c.rows; ++j) EXPECT_EQ(pairs.left[i * c.rows + j], 0);
      for (int64_t j = 0; j < c.cols; ++j) EXPECT_EQ(pairs.right[i * c.cols + j], 0);
    }
  }
}

TEST(LeadingPairsTest, ZeroAndNonFiniteMatricesHaveNoPairsAndHandTheGuessOn) {
  ThreadPool pool(2);
  for (const Case& c : {Case{6, 4, 2}, {100, 80, 12}}) {
    std::vector<float> guess(c.count * std::min(c.rows, c.cols), 0.25f);
    std::vector<float> u(c.rows * c.cols);
    for (float bad :
         {0.0f, std::numeric_limits<float>::infinity(), std::numeric_limits<float>::quiet_NaN()}) {
      u[u.size() / 2] = bad;
      const Pairs pairs = Find(&pool, u, c.rows, c.cols, c.count, guess);
      EXPECT_EQ(pairs.left, std::vector<float>(c.count * c.rows)) << bad;
      EXPECT_EQ(pairs.right, std::vector<float>(c.count * c.cols)) << bad;
      EXPECT_EQ(pairs.found, guess) << bad;
    }
  }
}

TEST(LeadingPairsTest, SameBitsOnAnyThreadsAndForAnyPowerOfTwo) {
  ThreadPool alone(1), pool(3);
  for (const Case& c : {Case{50, 40, 8}, {300, 200, 20}}) {
    std::vector<float> u = Narrow(RandomNormal(c.rows, c.cols, 7));
    for (float& v : u) v = std::fabs(v) < 1e-3f ? 1e-3f : v;  // normal numbers at 2^-110 too
    const Pairs wanted = Find(&alone, u, c.rows, c.cols, c.count);
    for (int exponent : {0, -110, -95, 40, 110}) {
      std::vector<float> scaled = u;
      for (float& v : scaled) v = std::ldexp(v, exponent);
      const Pairs pairs = Find(&pool, scaled, c.rows, c.cols, c.count);
      EXPECT_EQ(pairs.left, wanted.left) << exponent;
      EXPECT_EQ(pairs.right, wanted.right) << exponent;
      EXPECT_EQ(pairs.found, wanted.found) << exponent;
    }
  }
}

TEST(LeadingPairsTest, AGuessThatIsTheAnswerIsKept) {
  ThreadPool pool(2);
  const int64_t rows = 200, cols = 300, count = 20;
  const std::vector<float> u = Narrow(RandomNormal(rows, cols, 8));
  const Pairs cold = Find(&pool, u, rows, cols, count);
  const Pairs warm = Find(&pool, u, rows, cols, count, cold.found);
  const std::vector<double> weights = Weights(count);
  const Dense error =
      Combine(1, Weighted(warm, rows, cols, weights), -1, Weighted(cold, rows, cols, weights));
  EXPECT_LE(MaxAbs(error), 1e-5);
  // As is one of no meaning: equal vectors, which span nothing.
  const Pairs equal = Find(&pool, u, rows, cols, count, std::vector<float>(count * rows, 1.0f));
  EXPECT_LE(MaxAbs(Combine(1, Weighted(equal, rows, cols, weights), -1,
                           Weighted(cold, rows, cols, weights))),
            3e-5);
}

Dense Shaped(ThreadPool* pool, const Dense& o, const Pairs& pairs, double gain, bool measured) {
  const int64_t count = static_cast<int64_t>(pairs.left.size()) / o.rows;
  std::vector<float> out = Narrow(o);
  Scratch scratch(ShapeScratch(o.rows, o.cols, count));
  ShapePass pass;
  pass.o = {out.data(), DType::kFp32, o.rows, o.cols, 1};
  pass.count = count;
  pass.left = pairs.left.data();
  pass.right = pairs.right.data();
  pass.gain = gain;
  pass.deflate_measured = measured;
  pass.scratch = scratch.data();
  EXPECT_TRUE(CpuRun(pool, pass).ok());
  return Widened(out, o.rows, o.cols);
}

// Rounding beside the only direction there is would grow by the gain, 1e-6 of O to 1e-5.
TEST(ShapePassTest, PairsThatAreAllOfTheUpdateLeaveNoRoundingBesideThem) {
  ThreadPool pool(2);
  const int64_t cols = 50;
  const Dense direction = RandomOrthonormalRows(1, cols, 4);
  const Pairs pairs{{}, {1}, Narrow(direction)};
  const Dense noise = Scaled(1e-5, RandomNormal(1, cols, 5));
  const Dense shaped = Shaped(&pool, Combine(0.7, direction, 1, noise), pairs, 14, true);
  const double present = 0.7 + Inner(direction, noise);
  EXPECT_LE(MaxAbs(Combine(1, shaped, -present, direction)), 1e-7);
}

// SAMuon CONSISTENT ends direction i at s_i f(sigma_i); PAPER at g f(sigma_i) - (g - s_i).
TEST(ShapePassTest, LeadingDirectionsEndAtTheirLengthsAndTheOthersAtTheGain) {
  ThreadPool pool(2);
  const int64_t rows = 90, cols = 70, count = 8, rank = 20;
  const Dense left = RandomOrthonormalRows(rank, rows, 1),
              right = RandomOrthonormalRows(rank, cols, 2);
  Dense o(rows, cols);
  std::vector<double> f;
  for (int64_t i = 0; i < rank; ++i) {
    f.push_back(0.7 + 0.4 * static_cast<double>(i % 3));
    o = Combine(1, o, f[i],
                Multiply(Transpose(Block(left, i, 0, 1, rows)), Block(right, i, 0, 1, cols)));
  }
  const Pairs pairs{
      {}, Narrow(Block(left, 0, 0, count, rows)), Narrow(Block(right, 0, 0, count, cols))};
  for (double gain : {3.54, 14.0}) {
    for (bool measured : {true, false}) {
      const Dense shaped = Shaped(&pool, o, pairs, gain, measured);
      const Dense middle = Multiply(left, Multiply(shaped, Transpose(right)));
      for (int64_t i = 0; i < rank; ++i) {
        const double s = i < count ? 1 + (gain - 1) * std::log(i + 1.0) / std::log(8.0) : gain;
        const double wanted = measured ? s * f[i] : gain * f[i] - (gain - s);
        EXPECT_NEAR(middle(i, i), wanted, 1e-5 * gain) << i;
        for (int64_t j = 0; j < i; ++j) EXPECT_NEAR(middle(i, j), 0, 1e-5 * gain);
      }
    }
  }
}

TEST(ShapePassTest, OneDirectionAloneKeepsItsLengthAndZeroPairsChangeNothing) {
  ThreadPool pool(2);
  const Dense o = RandomNormal(5, 7, 3);
  const Pairs one{{}, {1, 0, 0, 0, 0}, {0, 1, 0, 0, 0, 0, 0}};
  const Dense shaped = Shaped(&pool, o, one, 5, true);
  EXPECT_NEAR(shaped(0, 1), o(0, 1), 1e-6);
  EXPECT_NEAR(shaped(0, 2), 5 * o(0, 2), 1e-5);
  const Pairs none{{}, std::vector<float>(5), std::vector<float>(7)};
  for (bool measured : {true, false}) {
    const Dense unshaped = Shaped(&pool, o, none, 5, measured);
    for (size_t i = 0; i < o.values.size(); ++i) {
      EXPECT_EQ(static_cast<float>(unshaped.values[i]), 5 * static_cast<float>(o.values[i]));
    }
  }
}

}  // namespace
}  // namespace stiefel
