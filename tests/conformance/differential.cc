#include "tests/conformance/differential.h"

#include <algorithm>
#include <cmath>

namespace stiefel {
namespace {

constexpr double kStateError = 2e-6;
// The norm that row_spectral_max holds against its bound is a dozen rounds of power iteration.
constexpr double kCapError = 0.1;

// How much a perturbation of an iterate can grow in what is left of the iterations: the largest
// slope, over the singular values and between them, of the map from any iterate to the end.
double Amplification(const std::vector<Coefficients>& schedule, double least, double largest) {
  constexpr int kPoints = 200;
  double amplification = 0;
  for (int i = 0; i <= kPoints; ++i) {
    double x = least + (largest - least) * i / kPoints;
    std::vector<double> slopes;
    for (const Coefficients& k : schedule) {
      const double square = x * x;
      slopes.push_back(k.a + square * (3 * k.b + 5 * square * k.c));
      x *= k.a + square * (k.b + square * k.c);
    }
    double to_the_end = 1;
    for (auto slope = slopes.rbegin(); slope != slopes.rend(); ++slope) {
      to_the_end *= std::fabs(*slope);
      amplification = std::max(amplification, to_the_end);
    }
  }
  return amplification;
}

double PolarTolerance(const Rule& rule, const Dense& u) {
  const Dense x = ReferencePreconditioned(rule, u.rows <= u.cols ? u : Transpose(u));
  const double norm = FrobeniusNorm(x);
  if (norm == 0) return kFp32Error;
  const std::vector<double> values = SingularValues(x);
  // A Gram form, or restarts, that the rule asks for where auto would not choose them.
  const double forced = rule.form == PolarForm::kGram || rule.restarts ? 2 : 1;
  const double stated = values.back() / norm >= 0.01 ? kFp32Error : forced * kIllConditionedError;
  // Two roundings of an iterate, each at its worst.
  return std::max(
      stated,
      std::ldexp(Amplification(PolarCoefficients(rule), values.back(), values.front()), -22));
}

// 4 gain x 1e-6 sigma_1 / the least gap beside a shaped direction.
double ShapingError(const Rule& rule, const Dense& u) {
  const std::vector<double> values = SingularValues(u);
  const int64_t d = static_cast<int64_t>(values.size()), k = ShapedDirections(rule, d);
  double gap = values[0];
  for (int64_t i = 0; i < std::min(k, d - 1); ++i) gap = std::min(gap, values[i] - values[i + 1]);
  return gap == 0 ? 0 : 4 * rule.gain * 1e-6 * values[0] / gap;
}

// The bounds are those of fp32, also on devices where compute=auto takes bf16 (low_precision_test).
Rule InFp32(Rule rule) {
  if (rule.family == RuleFamily::kSpectral) rule.compute = ComputeType::kFp32;
  return rule;
}

// Steps for which the state of small buffers has no entry-wise bound: vectors are given up to sign.
bool ComparesState(const StateBuffer& buffer) { return buffer.name != "leading_directions"; }

std::vector<float> RandomWeights(int64_t rows, int64_t cols, uint64_t seed) {
  const Dense weights = RandomNormal(rows, cols, seed);
  return std::vector<float>(weights.values.begin(), weights.values.end());
}

double AbsoluteError(const std::vector<float>& a, const Dense& b) {
  double largest = 0;
  for (size_t i = 0; i < a.size(); ++i) largest = std::max(largest, std::fabs(a[i] - b.values[i]));
  return AllFinite(a) ? largest : INFINITY;
}

void CompareFigures(const Outcome& got, const ReferenceStep& want, const Rule& rule,
                    const StepArgs& args, const Dense& gradient, double tolerance,
                    const std::string& where) {
  const double squares = Inner(gradient, gradient);
  EXPECT_NEAR(got.result.sum_squares, squares, 1e-5 * squares) << where;
  const double ratio = args.kind == StepKind::kOffRefresh ? rule.off_refresh_lr_ratio : 1;
  const double rms = FrobeniusNorm(want.delta) / (args.lr * ratio) /
                     std::sqrt(static_cast<double>(gradient.rows * gradient.cols));
  EXPECT_NEAR(got.result.update_rms, rms, std::max(3e-4, tolerance) * rms) << where;
  EXPECT_EQ(got.result.nonfinite_gradient + got.result.nonfinite_update, 0) << where;
  const bool polar = rule.family == RuleFamily::kPolora || !want.units.empty();
  EXPECT_EQ(got.result.newton_schulz, polar) << where;
}

}  // namespace

double Fp32Tolerance(const Rule& rule, const ReferenceStep& step, const StepArgs& args) {
  if (rule.family == RuleFamily::kPolora) return kIllConditionedError / std::sqrt(rule.delta);
  if (step.units.empty() && rule.row_spectral_max > 0) return kCapError;
  double tolerance = kFp32Error;
  for (const ReferenceUnit& unit : step.units)
    tolerance = std::max(tolerance, PolarTolerance(rule, unit.u));
  if (rule.gain == 1 || args.kind != StepKind::kRefresh) return tolerance;
  double shaping = 0;
  for (const ReferenceUnit& unit : step.units)
    shaping = std::max(shaping, ShapingError(rule, unit.u));
  return tolerance * std::max(1.0, rule.gain) + shaping;
}

void Agreement::Take(double error_over_tolerance, const std::string& at) {
  if (error_over_tolerance > worst) {
    worst = error_over_tolerance;
    where = at;
  }
}

void CompareWithReference(Backend* backend, const Rule& rule, int64_t rows, int64_t cols,
                          int64_t phase, int64_t steps, uint64_t seed, Agreement* agreement) {
  MatrixOnDevice matrix(backend, InFp32(rule), rows, cols);
  const auto step = [&matrix](const HostView& view, const StepArgs& args,
                              const StepOptions& options) {
    return matrix.Step(view, args, options);
  };
  CompareWithReference(step, rule, rows, cols, phase, steps, seed, agreement);
}

void CompareWithReference(const StepUnderTest& under_test, const Rule& rule, int64_t rows,
                          int64_t cols, int64_t phase, int64_t steps, uint64_t seed,
                          Agreement* agreement) {
  const std::vector<StateBuffer> specs = RuleState(rule, rows, cols);
  ReferenceRule reference(rule, rows, cols);
  const bool keeps_momentum = !specs.empty();
  double state_tolerance = 0;  // small state adds up what updates so far were off by
  for (int64_t step = 1; step <= steps; ++step) {
    const Dense gradient = Rounded(RandomNormal(rows, cols, seed + static_cast<uint64_t>(step)));
    StepArgs args = ArgsOf(rule, phase, step);
    args.lr = 0.5 / static_cast<double>(step);
    if (step == 2) args.clip_scale = 0.37;
    if (step == 3 && keeps_momentum) args.beta = 0.8;
    StepOptions options;
    options.lazy = step == 2;
    if (step == 3) options.weights = RandomWeights(rows, cols, seed);
    const Outcome got = under_test({WholeGradient(gradient)}, args, options);
    const ReferenceStep want = StepOf(&reference, rule, gradient, args, options);
    const std::string where = DescribeRule(rule) + " " + std::to_string(rows) + "x" +
                              std::to_string(cols) + " phase " + std::to_string(phase) + " step " +
                              std::to_string(step);
    const double tolerance = Fp32Tolerance(rule, want, args);
    state_tolerance = std::max(state_tolerance, tolerance);
    // A sign that differs is a whole unit, and says nothing where the argument is a rounding of 0.
    if (rule.family != RuleFamily::kLion || step == 3) {
      double error = RelativeError(got.delta, want.delta);
      if (step == 3) {  // of weights of about 1
        const Dense weights =
            ReferenceRule::Apply(ToDense(*options.weights, rows, cols), want, args);
        error = AbsoluteError(got.weights, weights) / std::max(MaxAbs(want.delta), 1.0);
      }
      EXPECT_LE(error, tolerance) << where;
      agreement->Take(error / tolerance, where);
      agreement->worst_error = std::max(agreement->worst_error, error);
    }
    const std::vector<Dense> state = reference.state();
    ASSERT_EQ(got.state.size(), state.size()) << where;
    for (size_t i = 0; i < state.size(); ++i) {
      const StateBuffer& buffer = specs[i];
      if (!ComparesState(buffer)) continue;
      // Momentum may cancel: its terms are as large as the gradient.
      const double scale =
          buffer.elementwise ? std::max(MaxAbs(state[i]), MaxAbs(gradient)) : MaxAbs(state[i]);
      const double bound = (buffer.elementwise ? kStateError : 2 * state_tolerance) * scale;
      EXPECT_LE(AbsoluteError(got.state[i], state[i]), bound) << where << " " << buffer.name;
    }
    CompareFigures(got, want, rule, args, gradient, tolerance, where);
  }
}

}  // namespace stiefel
