#include "kernels/rules/shaping.h"

#include <algorithm>
#include <cmath>
#include <memory>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/cpu/cpu_backend.h"
#include "kernels/reference/dense.h"
#include "kernels/reference/reference_polar.h"

namespace stiefel {
namespace {

Rule Samuon(const char* gain, const char* deflation) {
  Rule rule = PresetRule("samuon").value();
  EXPECT_TRUE(SetOption(rule, "gain", gain).ok());
  EXPECT_TRUE(SetOption(rule, "deflation", deflation).ok());
  return rule;
}

std::vector<float> Narrow(const Dense& a) { return {a.values.begin(), a.values.end()}; }

// U = sum_i values[i] left_i right_i^T
Dense Composed(const Dense& left, const Dense& right, const std::vector<double>& values) {
  Dense scaled = left;
  for (int64_t i = 0; i < left.rows; ++i) {
    for (int64_t j = 0; j < left.cols; ++j) scaled(i, j) *= values[i];
  }
  return Multiply(Transpose(scaled), right);
}

// The directions of u, and then o shaped by them, stored transposed where asked.
Dense Shape(const Rule& rule, double weight, const Dense& u, const Dense& o, bool transposed) {
  std::unique_ptr<Backend> backend = CreateCpuBackend(2).value();
  std::unique_ptr<Stream> stream = backend->CreateStream().value();
  DeviceBuffer workspace = backend->Allocate(ShapingWorkspaceBytes(rule, u.rows, u.cols)).value();
  const int64_t m = std::min(u.rows, u.cols);
  const std::vector<float> direction = Narrow(u), state(m * ShapedDirections(rule, m));
  std::vector<float> new_state(state.size());
  std::vector<float> out = Narrow(transposed ? Transpose(o) : o);
  EnqueueLeadingDirections(stream.get(), rule, direction.data(), u.rows, u.cols, state.data(),
                           new_state.data(), workspace.data());
  const MatrixView view{out.data(), DType::kFp32, transposed ? u.cols : u.rows,
                        transposed ? u.rows : u.cols, 1};
  EnqueueShaping(stream.get(), rule, weight, view, transposed, u.rows, u.cols, workspace.data());
  EXPECT_TRUE(stream->Synchronize().ok());
  const Dense shaped(view.rows, view.cols, std::vector<double>(out.begin(), out.end()));
  return transposed ? Transpose(shaped) : shaped;
}

struct Case {
  int64_t rows, cols;
};

// With O the finite polar map of U, whose singular values f(sigma_i) are not 1.
TEST(ShapingTest, DirectionIEndsAtItsLengthTimesWhatTheMapMadeOfIt) {
  for (const Case& c : {Case{40, 60}, {60, 40}, {120, 100}, {100, 150}}) {
    for (const char* gain : {"3.54", "14"}) {
      for (double weight : {1.0, 0.3}) {
        const Rule rule = Samuon(gain, "consistent");
        const int64_t m = std::min(c.rows, c.cols), k = ShapedDirections(rule, m);
        const Dense left = RandomOrthonormalRows(m, c.rows, 1),
                    right = RandomOrthonormalRows(m, c.cols, 2);
        std::vector<double> values;
        for (int64_t i = 0; i < m; ++i) values.push_back(std::pow(0.93, static_cast<double>(i)));
        const Dense u = Composed(left, right, values), o = ReferencePolar(rule, u);
        const Dense shaped = Shape(rule, weight, u, o, c.rows > c.cols);
        const auto along = [&](const Dense& x) {
          return Multiply(left, Multiply(x, Transpose(right)));
        };
        const Dense before = along(o), after = along(shaped);
        for (int64_t i = 0; i < m; ++i) {
          const double s = std::log(i + 1.0) / std::log(static_cast<double>(k));
          const double length = 1 + (rule.gain - 1) * weight * (i < k ? s : 1);
          EXPECT_NEAR(after(i, i), length * before(i, i), 2e-5 * rule.gain) << c.rows << " " << i;
        }
      }
    }
  }
}

TEST(ShapingTest, HowTheUpdateIsStoredDoesNotMatter) {
  const Rule rule = Samuon("5", "consistent");
  for (const Case& c : {Case{12, 7}, {7, 12}, {80, 90}}) {
    const Dense u = RandomNormal(c.rows, c.cols, 5), o = ReferencePolar(rule, u);
    const Dense plain = Shape(rule, 1, u, o, false), turned = Shape(rule, 1, u, o, true);
    EXPECT_LE(MaxAbs(Combine(1, plain, -1, turned)), 1e-5);
  }
}

TEST(ShapingTest, PaperTakesTheDirectionForExactlyOrthogonal) {
  const Rule rule = Samuon("1.5", "paper");
  const Dense u = RandomNormal(20, 30, 6);
  const SingularPairs pairs = SingularValueDecomposition(u);
  const Dense o = Multiply(Transpose(pairs.left), pairs.right);  // f = 1: both deflations agree
  EXPECT_LE(MaxAbs(Combine(1, Shape(rule, 1, u, o, false), -1,
                           Shape(Samuon("1.5", "consistent"), 1, u, o, false))),
            1e-5);
  // f = 2: 2 g - (g - s_1) is left of the first direction.
  const Dense shaped = Shape(rule, 1, u, Scaled(2, o), false);
  const Dense first =
      Multiply(Transpose(Block(pairs.left, 0, 0, 1, 20)), Block(pairs.right, 0, 0, 1, 30));
  EXPECT_NEAR(Inner(first, shaped), 2 * 1.5 - 0.5, 1e-5);
}

TEST(ShapingTest, MatricesWithoutThatManyDirectionsStayFinite) {
  const Rule rule = Samuon("5", "consistent");
  Dense rank_one = Composed(RandomOrthonormalRows(1, 30, 1), RandomOrthonormalRows(1, 40, 2), {3});
  for (const Dense& u : {Dense(30, 40), Dense(1, 9), rank_one, RandomNormal(1, 300, 4)}) {
    const Dense o = ReferencePolar(rule, u);
    const Dense shaped = Shape(rule, 1, u, o, false);
    const double f = SpectralNorm(o);
    EXPECT_NEAR(SpectralNorm(shaped), f, 2e-5);  // s_1 = 1, and there is no other direction
  }
}

}  // namespace
}  // namespace stiefel
