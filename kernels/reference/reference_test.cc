#include <cmath>
#include <string>
#include <utility>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/reference/reference_rule.h"
#include "tests/vectors/golden.h"

namespace stiefel {
namespace {

Rule With(const std::string& preset,
          const std::vector<std::pair<std::string, std::string>>& options) {
  Rule rule = PresetRule(preset).value();
  for (const auto& [key, value] : options) {
    const absl::Status status = SetOption(rule, key, value);
    EXPECT_TRUE(status.ok()) << status;
  }
  return rule;
}

StepArgs Args(const Rule& rule, int64_t phase, int64_t step) {
  StepArgs args;
  args.step = step;
  args.commits = step - 1;
  args.kind = KindAtStep(rule, phase, step);
  args.lr = rule.lr;
  return args;
}

double Difference(const Dense& a, const Dense& b) { return MaxAbs(Combine(1, a, -1, b)); }

TEST(ReferenceTest, ReproducesTheGoldenSequences) {
  const std::vector<GoldenCase> cases = GoldenCases();
  EXPECT_EQ(cases.size(), 26u);
  for (const GoldenCase& golden : cases) {
    ASSERT_TRUE(ValidateRule(golden.rule, golden.rows, golden.cols).ok()) << golden.name;
    ReferenceRule reference(golden.rule, golden.rows, golden.cols);
    for (int64_t step = 1; step <= 4; ++step) {
      const ReferenceStep result =
          reference.Step(GoldenGradient(step - 1, golden.rows, golden.cols),
                         Args(golden.rule, golden.phase, step));
      EXPECT_LE(Difference(result.delta, golden.deltas[step - 1]), 1e-12)
          << golden.name << " " << golden.rows << "x" << golden.cols << " step " << step;
    }
  }
}

TEST(ReferenceTest, PolarOfTheGoldenGradient) {
  const std::vector<std::pair<std::string, Rule>> rules = {
      {"KELLER_JORDAN", With("muon", {})},
      {"YOU", With("muon", {{"coefficients", "you"}})},
      {"POLAR_EXPRESS/1.05", With("muon", {{"coefficients", "polar_express"}})},
      {"TURBO", With("turbo_muon", {})},
      {"exact", With("muon", {{"coefficients", "convergent"}, {"steps", "30"}})}};
  for (const auto& [name, rule] : rules) {
    const Dense golden = GoldenPolar(name), u = GoldenGradient(0, 3, 5);
    const Dense wide = ReferencePolar(rule, u);
    EXPECT_LE(Difference(wide, golden), 1e-12) << name;
    // Without restarts the Gram form of 30 iterations would lose the small directions.
    if (name != "exact") {
      EXPECT_LE(Difference(ReferenceGramPolar(rule, u), golden), 1e-12) << name;
    }
    EXPECT_EQ(Difference(ReferencePolar(rule, Transpose(u)), Transpose(wide)), 0) << name;
  }
}

TEST(ReferenceTest, SingularValuesGoThroughTheScalarMap) {
  const std::vector<GoldenEnvelope> envelopes = GoldenEnvelopes();
  EXPECT_EQ(envelopes.size(), 6u);
  for (const GoldenEnvelope& envelope : envelopes) {
    Rule rule = With("muon", {{"coefficients", envelope.coefficients},
                              {"steps", std::to_string(envelope.schedule.size())}});
    rule.safety = envelope.safety;
    for (const GoldenEnvelope::Point& point : envelope.points) {
      // A second singular value takes what is left of the unit norm.
      Dense u(2, 3);
      u(0, 0) = 5 * point.x;
      u(1, 1) = 5 * std::sqrt(1 - point.x * point.x);
      EXPECT_NEAR(ReferencePolar(rule, u)(0, 0), point.y, 1e-11)
          << envelope.name << " at " << point.x;
    }
  }
}

TEST(ReferenceTest, ConvergentCoefficientsGiveTheExactFactor) {
  const Rule rule = With("muon", {{"coefficients", "convergent"}, {"steps", "30"}});
  const Dense o = ReferencePolar(rule, Dense(2, 2, {2, 0, 1, 1}));
  EXPECT_LE(Difference(o, Dense(2, 2, {0.948683298, -0.316227766, 0.316227766, 0.948683298})),
            1e-9);
}

// AOL has the limit polar(diag(s) U) on the short side, and leaves zero rows zero.
TEST(ReferenceTest, AolConvergesToThePolarFactorOfTheScaledMatrix) {
  const Rule aol = With("turbo_muon", {{"coefficients", "convergent"}, {"steps", "30"}});
  const Rule frobenius = With("muon", {{"coefficients", "convergent"}, {"steps", "30"}});
  Dense u = RandomNormal(4, 6, 3);
  for (int64_t j = 0; j < 6; ++j) u(2, j) = 0;
  const Dense a = Multiply(u, Transpose(u));
  Dense scaled = u;
  for (int64_t i = 0; i < 4; ++i) {
    double sum = 0;
    for (int64_t j = 0; j < 4; ++j) sum += std::fabs(a(i, j));
    for (int64_t j = 0; j < 6; ++j) scaled(i, j) = sum == 0 ? 0 : u(i, j) / std::sqrt(sum);
  }
  const Dense wide = ReferencePolar(aol, u);
  EXPECT_LE(Difference(wide, ReferencePolar(frobenius, scaled)), 1e-12);
  EXPECT_EQ(MaxAbs(Block(wide, 2, 0, 1, 6)), 0);
  EXPECT_EQ(Difference(ReferencePolar(aol, Transpose(u)), Transpose(wide)), 0);
  EXPECT_EQ(MaxAbs(ReferencePolar(aol, Dense(3, 5))), 0);
}

TEST(ReferenceTest, PaddingOfATileChangesNothing) {
  for (const char* preset : {"muon", "turbo_muon", "muon_torch"}) {
    const Rule rule = With(preset, {});
    for (const auto& [rows, cols] : {std::pair<int64_t, int64_t>{5, 9}, {9, 5}, {7, 7}}) {
      const Dense u = RandomNormal(rows, cols, 5);
      const std::vector<ReferenceUnit> units = ReferenceUnits(rule, u, 6);
      EXPECT_EQ(units.size(), (rows > 6 ? 2u : 1u) * (cols > 6 ? 2u : 1u));
      for (const ReferenceUnit& unit : units) {
        const Dense part =
            Block(u, unit.rect.row_begin, unit.rect.col_begin, unit.rect.rows(), unit.rect.cols());
        EXPECT_LE(Difference(unit.o, ReferencePolar(rule, part)), 1e-12)
            << preset << " " << rows << "x" << cols << " " << unit.rect.DebugString();
      }
    }
  }
}

// Every direction of U ends where section 4 says.
TEST(ReferenceTest, ShapingSetsTheLengthOfEachLeadingDirection) {
  for (const auto& [deflation, warmup, w] :
       {std::tuple<const char*, const char*, double>{"consistent", "0", 1},
        {"consistent", "4", 0.5},
        {"paper", "0", 1}}) {
    const Rule rule = With(
        "samuon",
        {{"gain", "4"}, {"shaped_directions", "3"}, {"deflation", deflation}, {"warmup", warmup}});
    Rule plain = rule;
    plain.gain = 1;
    const Dense u = RandomNormal(6, 9, 2);
    const StepArgs args = Args(rule, 0, 2);  // half of the warm-up
    const Dense shaped = ReferenceRule(rule, 6, 9).Step(u, args).update;
    const Dense o = ReferenceRule(plain, 6, 9).Step(u, args).update;
    const SingularPairs pairs = SingularValueDecomposition(u);
    for (int64_t i = 0; i < 6; ++i) {
      const Dense pair =
          Multiply(Transpose(Block(pairs.left, i, 0, 1, 6)), Block(pairs.right, i, 0, 1, 9));
      const double f = Inner(pair, o), gain = 1 + 3 * w;
      const double length = 1 + 3 * w * std::log(i + 1.0) / std::log(3.0);
      double wanted = gain * f;
      if (i < 3 && std::string(deflation) == "paper") wanted -= gain - length;
      if (i < 3 && std::string(deflation) == "consistent") wanted = length * f;
      EXPECT_NEAR(Inner(pair, shaped), wanted, 1e-12) << deflation << " " << warmup << " " << i;
    }
  }
}

TEST(ReferenceTest, RowVarianceEvensRowsOutAndKeepsTheNorm) {
  const Rule rule = With("normuon", {});
  Rule plain = rule;
  plain.row_variance_beta2.reset();
  Dense g = RandomNormal(5, 8, 4);
  for (int64_t j = 0; j < 8; ++j) g(3, j) = 0;
  ReferenceRule reference(rule, 5, 8);
  const Dense o = reference.Step(g, Args(rule, 0, 1)).update;
  const Dense before = ReferenceRule(plain, 5, 8).Step(g, Args(plain, 0, 1)).update;
  EXPECT_NEAR(FrobeniusNorm(o), FrobeniusNorm(before), 1e-6);
  EXPECT_EQ(MaxAbs(Block(o, 3, 0, 1, 8)), 0);
  // From v = 0 the first step divides every row by its own RMS.
  EXPECT_NEAR(FrobeniusNorm(Block(o, 0, 0, 1, 8)), FrobeniusNorm(Block(o, 4, 0, 1, 8)), 1e-6);
  EXPECT_GT(std::fabs(FrobeniusNorm(Block(before, 0, 0, 1, 8)) -
                      FrobeniusNorm(Block(before, 4, 0, 1, 8))),
            1e-3);
}

// A 1 x 1 pair in closed form.
TEST(ReferenceTest, PoloraOfScalars) {
  const Rule rule = With("polora", {{"product_scale", "2"}, {"factor", "a"}, {"lr", "0.3"}});
  const double a = -3, b = 0.5, g = 0.7, delta = rule.delta;
  ReferenceRule reference(rule, 1, 1);
  const std::vector<Dense> partner_state = {Dense(1, 1), Dense(1, 1)};
  const Dense weights(1, 1, {a}), partner(1, 1, {b});
  const ReferencePair pair{weights, partner, partner_state};
  const ReferenceStep step = reference.Step(Dense(1, 1, {g}), Args(rule, 0, 1), &pair);
  EXPECT_NEAR(step.delta(0, 0), -0.3 / (2 * (3 + 0.5)), 1e-15);
  const double c = b * b * (1 + delta) * (1 + delta);
  EXPECT_NEAR(reference.state()[1](0, 0), rule.beta2 * 1e-12 + (1 - rule.beta2) * g * g / c, 1e-15);
  EXPECT_NEAR(reference.state()[0](0, 0), (1 - rule.beta1) * g, 1e-15);
}

TEST(ReferenceTest, SingularValuesOfAConstructedMatrix) {
  const Dense u = RandomOrthonormalRows(7, 7, 1), v = RandomOrthonormalRows(7, 12, 2);
  Dense s(7, 7);
  for (int64_t i = 0; i < 7; ++i) s(i, i) = std::pow(10.0, -static_cast<double>(i));
  const Dense a = Multiply(Multiply(u, s), v);
  const std::vector<double> values = SingularValues(a);
  for (int64_t i = 0; i < 7; ++i) EXPECT_NEAR(values[i] / s(i, i), 1, 1e-9);
  for (const Dense& matrix : {a, Transpose(a)}) {
    const SingularPairs pairs = SingularValueDecomposition(matrix);
    Dense sum(matrix.rows, matrix.cols);
    for (int64_t i = 0; i < 7; ++i) {
      sum = Combine(1, sum, pairs.values[i],
                    Multiply(Transpose(Block(pairs.left, i, 0, 1, matrix.rows)),
                             Block(pairs.right, i, 0, 1, matrix.cols)));
    }
    EXPECT_LE(Difference(sum, matrix), 1e-14);
    EXPECT_NEAR(FrobeniusNorm(pairs.left), std::sqrt(7.0), 1e-13);
  }
}

}  // namespace
}  // namespace stiefel
