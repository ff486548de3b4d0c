// SAMuon's lengths and Turbo-Muon's preconditioner, of which the right answer is known without the
// reference's steps.
#include <cmath>
#include <string>

#include "gtest/gtest.h"
#include "tests/conformance/backend_fixture.h"
#include "tests/conformance/differential.h"

namespace stiefel {
namespace {

template <typename T>
using ShapingTest = ConformanceTest<T>;
TYPED_TEST_SUITE(ShapingTest, BackendsUnderTest);

double ScalarMap(const Rule& rule, double x) {
  for (const Coefficients& k : PolarCoefficients(rule))
    x = k.a * x + k.b * std::pow(x, 3) + k.c * std::pow(x, 5);
  return x;
}

// left^T diag(values) right, rows x cols.
struct Spectrum {
  Dense left, right;  // d x rows, d x cols
  std::vector<double> values;

  Dense Matrix() const {
    Dense scaled = right;
    for (int64_t i = 0; i < scaled.rows; ++i) {
      for (int64_t j = 0; j < scaled.cols; ++j) scaled(i, j) *= values[i];
    }
    return Multiply(Transpose(left), scaled);
  }
  // u_i^T a v_i
  double Along(int64_t i, const Dense& a) const {
    return Inner(Multiply(Block(left, i, 0, 1, left.cols), a), Block(right, i, 0, 1, right.cols));
  }
};

Spectrum Geometric(int64_t rows, int64_t cols, double ratio) {
  const int64_t d = std::min(rows, cols);
  Spectrum spectrum{RandomOrthonormalRows(d, rows, 11), RandomOrthonormalRows(d, cols, 12), {}};
  for (int64_t i = 0; i < d; ++i)
    spectrum.values.push_back(3 * std::pow(ratio, static_cast<double>(i)));
  return spectrum;
}

// With the momentum exactly G and no scale, delta = -O_SA. The gradient keeps its directions while
// its spectrum changes, so that later steps start from the directions of earlier ones.
TYPED_TEST(ShapingTest, ConsistentDeflationEndsDirectionsAtTheirOwnLengths) {
  for (const auto& [rows, cols] : {std::pair<int64_t, int64_t>{24, 40}, {70, 33}}) {
    for (const char* gain : {"0.5", "3.54", "5", "14"}) {
      for (const int64_t k : {1, 3, 8}) {
        const Rule rule = MakeRule("samuon", {{"gain", gain},
                                              {"shaped_directions", std::to_string(k)},
                                              {"beta", "0"},
                                              {"scale", "none"},
                                              {"lr", "1"}});
        MatrixOnDevice matrix(this->backend_.get(), rule, rows, cols);
        for (int64_t step = 1; step <= 3; ++step) {
          const Spectrum spectrum = Geometric(rows, cols, 0.8 + 0.03 * static_cast<double>(step));
          const Dense u = spectrum.Matrix();
          const Outcome outcome = matrix.Step({WholeGradient(u)}, ArgsOf(rule, 0, step));
          const Dense o = Scaled(-1, ToDense(outcome.delta, rows, cols));
          for (int64_t i = 0; i < k + 2; ++i) {
            const double f = ScalarMap(rule, spectrum.values[i] / FrobeniusNorm(u));
            double length = rule.gain;
            if (i < k) {
              length = 1;
              if (k > 1) length += (rule.gain - 1) * std::log(i + 1.0) / std::log(1.0 * k);
            }
            // The turn of a pair is at most 1e-6 sigma_1 over its gap: here 1e-4 at most.
            EXPECT_NEAR(spectrum.Along(i, o) / (length * f), 1, 1e-3)
                << rows << "x" << cols << " gain " << gain << " k " << k << " step " << step
                << " direction " << i;
          }
        }
      }
    }
  }
}

// The limit of AOL is the polar factor of diag(s) U, on the short side, not of U.
TYPED_TEST(ShapingTest, TurboConvergesToThePolarFactorOfTheScaledMatrix) {
  const Rule rule = MakeRule("turbo_muon", {{"beta", "0"},
                                            {"nesterov", "false"},
                                            {"scale", "none"},
                                            {"lr", "1"},
                                            {"coefficients", "convergent"},
                                            {"steps", "30"},
                                            {"form", "standard"}});
  for (const auto& [rows, cols] : {std::pair<int64_t, int64_t>{16, 50}, {50, 16}, {20, 20}}) {
    Dense u = Rounded(RandomNormal(rows, cols, 8));
    for (int64_t i = 0; i < rows; ++i) {
      for (int64_t j = 0; j < cols; ++j) u(i, j) *= static_cast<double>((1 + i % 4) * (1 + j % 3));
    }
    const Dense wide = rows <= cols ? u : Transpose(u);
    const SingularPairs scaled = SingularValueDecomposition(ReferencePreconditioned(rule, wide));
    const SingularPairs plain = SingularValueDecomposition(wide);
    const Dense factor = Multiply(Transpose(scaled.left), scaled.right);
    const Dense other = Multiply(Transpose(plain.left), plain.right);
    MatrixOnDevice matrix(this->backend_.get(), rule, rows, cols);
    const Outcome outcome = matrix.Step({WholeGradient(u)}, ArgsOf(rule, 0, 1));
    const Dense want = Scaled(-1, rows <= cols ? factor : Transpose(factor));
    EXPECT_LE(RelativeError(outcome.delta, want), kIllConditionedError) << rows << "x" << cols;
    EXPECT_GT(MaxAbs(Combine(1, factor, -1, other)), 0.02);
  }
}

// CASES A31: rank one and 1 x n end at exactly f(1), primes and very tall shapes are right.
TYPED_TEST(ShapingTest, RankOneEndsAtTheScalarMapOfOne) {
  for (const char* preset : {"muon", "turbo_muon", "himuon", "normuon", "cmuon"}) {
    // In fp32, also on devices that are faster in bf16.
    Rule rule = MakeRule(
        preset, {{"scale", "none"}, {"scale_of", "split"}, {"lr", "1"}, {"compute", "fp32"}});
    rule.row_variance_beta2.reset();
    const double one = ScalarMap(rule, 1);
    for (const auto& [rows, cols] :
         {std::pair<int64_t, int64_t>{1, 11}, {11, 1}, {1, 1}, {13, 29}, {5003, 7}, {101, 103}}) {
      // With AOL u v^T becomes that of sign(u) sqrt |u|, of the short side; equal entries stay.
      Dense u = RandomNormal(rows, 1, 2), v = RandomNormal(1, cols, 3);
      for (double& x : (rows <= cols ? u : v).values) x = x > 0 ? 1 : -1;
      const Dense g = Multiply(u, v);
      MatrixOnDevice matrix(this->backend_.get(), rule, rows, cols);
      const Outcome outcome = matrix.Step({WholeGradient(g)}, ArgsOf(rule, 0, 1));
      const Dense want = Scaled(-one / FrobeniusNorm(g), g);
      // The rounding of the gradient itself to fp32 has a null space that the map amplifies.
      EXPECT_LE(RelativeError(outcome.delta, want), kIllConditionedError)
          << preset << " " << rows << "x" << cols;
    }
  }
}

}  // namespace
}  // namespace stiefel
