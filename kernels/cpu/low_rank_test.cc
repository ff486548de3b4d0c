#include "kernels/cpu/low_rank.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/reference/dense.h"

namespace stiefel {
namespace {

std::vector<float> Narrow(const Dense& a) { return {a.values.begin(), a.values.end()}; }

TEST(MetricPassTest, ScalesTheColumnsOfTheMatrixOrOfItsTranspose) {
  ThreadPool pool(2);
  const int64_t rows = 3, cols = 300;
  const Dense x = RandomNormal(rows, cols, 1);
  const std::vector<float> plain = Narrow(x), turned = Narrow(Transpose(x));
  std::vector<float> variance(cols);
  for (int64_t j = 0; j < cols; ++j) variance[j] = static_cast<float>(j % 7) * 2e-12f;
  for (double power : {0.5, -0.5}) {
    for (bool transpose : {false, true}) {
      std::vector<float> out(rows * cols);
      MetricPass pass;
      pass.x = transpose ? turned.data() : plain.data();
      pass.rows = transpose ? cols : rows;
      pass.cols = transpose ? rows : cols;
      pass.transpose = transpose;
      pass.variance = variance.data();
      pass.power = power;
      pass.floor = 1e-4;
      pass.out = out.data();
      CpuRun(&pool, pass);
      for (int64_t i = 0; i < rows; ++i) {
        for (int64_t j = 0; j < cols; ++j) {
          const double v = j % 7 == 0 ? 1e-12 : static_cast<double>(j % 7) * 2e-12;
          const double wanted = plain[i * cols + j] * std::pow(v / 12e-12 + 1e-4, power);
          EXPECT_NEAR(out[i * cols + j], wanted, 1e-6 * std::fabs(wanted) + 1e-12);
        }
      }
      pass.variance = nullptr;
      CpuRun(&pool, pass);
      EXPECT_EQ(out, plain);
    }
  }
}

struct Root {
  double largest = -1;
  std::vector<float> root;
};

Root RootOf(const std::vector<float>& x, int64_t rows, int64_t cols, double damping) {
  ThreadPool pool(2);
  std::vector<double> scratch(GramScratch(rows) / sizeof(double));
  Root result;
  result.root.resize(rows * rows);
  GramPass pass;
  pass.x = x.data();
  pass.rows = rows;
  pass.cols = cols;
  pass.largest = &result.largest;
  pass.inverse_root = result.root.data();
  pass.damping = damping;
  pass.scratch = scratch.data();
  CpuRun(&pool, pass);
  return result;
}

TEST(GramPassTest, TheRootWhitensAndTheDampingHoldsWhereTheMatrixIsSingular) {
  for (int64_t cols : {40, 3}) {  // full rank, and rank 3 of 6
    for (double scale : {1.0, 1e-15, 1e18}) {
      const int64_t rows = 6;
      const std::vector<float> x = Narrow(Scaled(scale, RandomNormal(rows, cols, 2)));
      const Root found = RootOf(x, rows, cols, 1e-4);
      const Dense wide(rows, cols, std::vector<double>(x.begin(), x.end()));
      const double norm = SpectralNorm(wide);
      EXPECT_NEAR(found.largest / (norm * norm), 1, 1e-12);
      // R (C / l + damping I) R = I
      Dense damped = Scaled(1 / (norm * norm), Multiply(wide, Transpose(wide)));
      for (int64_t i = 0; i < rows; ++i) damped(i, i) += 1e-4;
      const Dense root(rows, rows, std::vector<double>(found.root.begin(), found.root.end()));
      const Dense identity = Multiply(root, Multiply(damped, root));
      for (int64_t i = 0; i < rows; ++i) {
        for (int64_t j = 0; j < rows; ++j) EXPECT_NEAR(identity(i, j), i == j, 2e-4);
      }
    }
  }
}

TEST(GramPassTest, ZeroGivesZeroAndNanGivesNan) {
  const Root zero = RootOf(std::vector<float>(12), 3, 4, 1e-4);
  EXPECT_EQ(zero.largest, 0);
  EXPECT_EQ(zero.root, std::vector<float>(9));
  std::vector<float> x(12, 1.0f);
  x[5] = std::numeric_limits<float>::quiet_NaN();
  const Root bad = RootOf(x, 3, 4, 1e-4);
  EXPECT_TRUE(std::isnan(bad.largest));
  EXPECT_TRUE(std::isnan(bad.root[0]));
}

TEST(PoloraPassTest, ScalesTheStepAndMovesTheVarianceUnlessThereIsNothingToStep) {
  ThreadPool pool(2);
  const int64_t rows = 2, cols = 3;
  const std::vector<float> d = {1, 2, 3, 4, 5, 6}, h = {1, 0, 2, 1, 0, 2};
  const std::vector<float> variance = {0, 0.5f, 1};
  for (const PoloraNorms& norms : {PoloraNorms{4, 9, 2, 16}, {4, 9, 0, 16}, {4, 9, 2, 0}}) {
    std::vector<float> step = d, moved(cols);
    PoloraPass pass;
    pass.d = step.data();
    pass.h = h.data();
    pass.rows = rows;
    pass.cols = cols;
    pass.norms = &norms;
    pass.product_scale = 0.5;
    pass.variance = variance.data();
    pass.new_variance = moved.data();
    pass.keep = 0.75;
    CpuRun(&pool, pass);
    if (norms.partner_metric == 0 || norms.step == 0) {
      EXPECT_EQ(step, std::vector<float>(6));
      EXPECT_EQ(moved, variance);
      continue;
    }
    for (int i = 0; i < 6; ++i) {
      EXPECT_NEAR(step[i], d[i] / (0.5 * (2 + 3) * 4), 1e-6);
      EXPECT_LT(step[i], d[i] / (0.5 * (2 + 3) * 4));  // the safe side
    }
    EXPECT_FLOAT_EQ(moved[0], 0.75 * 1e-12 + 0.25 * 2 / (2 * 2));
    EXPECT_FLOAT_EQ(moved[1], 0.75 * 0.5);
    EXPECT_FLOAT_EQ(moved[2], 0.75 + 0.25 * 8 / (2 * 2));
  }
}

}  // namespace
}  // namespace stiefel
