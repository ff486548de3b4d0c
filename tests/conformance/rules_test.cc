// Every rule on every backend against the golden sequences and the fp64 reference.
#include <cmath>
#include <fstream>
#include <random>

#include "gtest/gtest.h"
#include "nlohmann/json.hpp"
#include "tests/conformance/backend_fixture.h"

namespace stiefel {
namespace {

using nlohmann::json;

// docs/RULES.md, section 7: fp32 against fp64, of the largest entry.
constexpr double kFp32Error = 2e-5;

json Load(const std::string& name) {
  std::ifstream file("tests/vectors/" + name);
  EXPECT_TRUE(file.good()) << name;
  return json::parse(file);
}

Dense GoldenGradient(int64_t s, int64_t rows, int64_t cols) {
  Dense g(rows, cols);
  for (int64_t i = 0; i < rows; ++i) {
    for (int64_t j = 0; j < cols; ++j) {
      g(i, j) = static_cast<double>((7 * i + 3 * j * j + 5 + 11 * s + s * i * j) % 13 - 6) / 4;
    }
  }
  return g;
}

template <typename T>
using RulesTest = ConformanceTest<T>;
TYPED_TEST_SUITE(RulesTest, BackendsUnderTest);

TYPED_TEST(RulesTest, GoldenSequences) {
  int cases = 0;
  const json vectors = Load("rules.json");
  for (const json& golden : vectors["cases"]) {
    std::string name = golden["preset"];
    const bool phase1 = name == "periodic_rowwise_muon_phase1";
    if (phase1) name = "periodic_rowwise_muon";
    absl::StatusOr<Rule> rule = PresetRule(name);
    if (!rule.ok()) continue;  // a preset of a later version
    ++cases;
    const int64_t rows = golden["rows"], cols = golden["cols"];
    MatrixOnDevice matrix(this->backend_.get(), *rule, rows, cols);
    for (int64_t step = 1; step <= 4; ++step) {
      const HostView view{WholeGradient(GoldenGradient(step - 1, rows, cols))};
      const Outcome outcome = matrix.Step(view, ArgsOf(*rule, phase1 ? 1 : 0, step));
      Dense delta(rows, cols);
      for (int64_t i = 0; i < rows; ++i) {
        for (int64_t j = 0; j < cols; ++j) delta(i, j) = golden["deltas"][step - 1][i][j];
      }
      EXPECT_LE(RelativeError(outcome.delta, delta), kFp32Error) << name << " step " << step;
    }
  }
  EXPECT_EQ(cases, 14);
}

// Momentum that is exactly G (beta 0), scale none, lr 1: delta = -polar(G).
Rule PlainPolar(const std::string& coefficients, int64_t steps) {
  return MakeRule("muon", {{"beta", "0"},
                           {"nesterov", "false"},
                           {"scale", "none"},
                           {"lr", "1"},
                           {"coefficients", coefficients},
                           {"steps", std::to_string(steps)}});
}

TYPED_TEST(RulesTest, OutputSingularValuesAreThoseOfTheScalarMap) {
  struct Set {
    const char *name, *coefficients, *safety;
  };
  const Set sets[] = {{"KELLER_JORDAN 5", "keller_jordan", "1"},
                      {"YOU 5", "you", "1"},
                      {"TURBO (YOU, last 4)", "turbo", "1"},
                      {"POLAR_EXPRESS 5, safety 1.05", "polar_express", "1.05"},
                      {"POLAR_EXPRESS 5, raw", "polar_express", "1"},
                      {"CONVERGENT 12", "convergent", "1"}};
  const json envelopes = Load("scalar_envelopes.json");
  ASSERT_EQ(envelopes.size(), 6u);
  for (const Set& set : sets) {
    const json& envelope = envelopes.at(set.name);
    const int64_t steps = static_cast<int64_t>(envelope["coefficients"].size());
    const auto f = [&](double x) {
      for (const json& k : envelope["coefficients"]) {
        x = k[0].get<double>() * x + k[1].get<double>() * std::pow(x, 3) +
            k[2].get<double>() * std::pow(x, 5);
      }
      return x;
    };
    for (const char* form : {"standard", "gram"}) {
      if (steps > 5 && std::string(form) == "gram") continue;  // would need more restarts
      Rule rule = PlainPolar(set.coefficients, steps);
      ASSERT_TRUE(SetOption(rule, "safety", set.safety).ok());
      ASSERT_TRUE(SetOption(rule, "form", form).ok());
      for (const json& point : envelope["points"]) {
        // The point is one singular value; eleven others share what is left of the unit norm.
        const double s = point[0], wanted = point[1];
        Dense diagonal(12, 12);
        diagonal(0, 0) = s;
        for (int64_t i = 1; i < 12; ++i) diagonal(i, i) = std::sqrt((1 - s * s) / 11);
        const Dense u = Multiply(Multiply(RandomOrthonormalRows(12, 12, 17), diagonal),
                                 RandomOrthonormalRows(12, 40, 3));
        MatrixOnDevice matrix(this->backend_.get(), rule, u.rows, u.cols);
        const Outcome outcome = matrix.Step({WholeGradient(u)}, ArgsOf(rule, 0, 1));
        double nearest = 1;
        for (double v : SingularValues(ToDense(outcome.delta, u.rows, u.cols))) {
          nearest = std::min(nearest, std::fabs(v - wanted));
        }
        // Where the map is so steep that the rounding of the input alone moves it further (the raw
        // POLAR_EXPRESS at 1: f' = 68000), no more than that can be asked.
        const double slope = (f(s + 1e-7) - f(s - 1e-7)) / 2e-7;
        EXPECT_LE(nearest, std::max(1e-4, std::ldexp(std::fabs(slope), -23)))
            << set.name << " at " << s << ", " << form;
      }
    }
  }
}

// A normal matrix, one with a geometric spectrum of condition number 1e3, one of low rank with a
// little noise.
Dense BadlyConditioned(int kind, int64_t rows, int64_t cols) {
  const Dense normal = RandomNormal(rows, cols, 100 + kind);
  if (kind == 0) return normal;
  if (kind == 2)
    return Combine(1, Multiply(RandomNormal(rows, 4, 7), RandomNormal(4, cols, 8)), 0.01, normal);
  const int64_t m = std::min(rows, cols);
  Dense s(m, m);
  for (int64_t i = 0; i < m; ++i)
    s(i, i) = std::pow(1e-3, static_cast<double>(i) / static_cast<double>(m - 1));
  return Multiply(Multiply(Transpose(RandomOrthonormalRows(m, rows, 5)), s),
                  RandomOrthonormalRows(m, cols, 6));
}

// CASES A10: bf16 keeps the singular values within the fp64 range and the alignment with U.
TYPED_TEST(RulesTest, Bf16MeetsTheCriterion) {
  if (!this->backend_->Info().has_bf16) GTEST_SKIP() << "no bf16 on this device";
  for (const auto& [rows, cols] :
       {std::pair<int64_t, int64_t>{64, 64}, {64, 200}, {150, 80}, {96, 300}}) {
    for (int kind = 0; kind < 3; ++kind) {
      const Dense u = BadlyConditioned(kind, rows, cols);
      Rule rule = PlainPolar("keller_jordan", 5);
      const Dense truth = ReferencePolar(rule, u);
      const std::vector<double> wanted = SingularValues(truth);
      ASSERT_TRUE(SetOption(rule, "compute", "bf16").ok());
      for (const char* form : {"standard", "gram"}) {
        ASSERT_TRUE(SetOption(rule, "form", form).ok());
        MatrixOnDevice matrix(this->backend_.get(), rule, rows, cols);
        const Outcome outcome = matrix.Step({WholeGradient(u)}, ArgsOf(rule, 0, 1));
        const Dense o = Combine(-1, ToDense(outcome.delta, rows, cols), 0, u);
        const std::vector<double> got = SingularValues(o);
        const std::string where = std::to_string(rows) + "x" + std::to_string(cols) + " input " +
                                  std::to_string(kind) + " " + form;
        EXPECT_LE(got.front(), wanted.front() + 0.05) << where;
        EXPECT_GE(got.back(), wanted.back() - 0.05) << where;
        EXPECT_NEAR(Inner(o, u) / Inner(truth, u), 1, 0.02) << where;
      }
    }
  }
}

// Pieces of every layout: whole, rows, columns, a grid; one or three ranks, groups, weights,
// dtypes, holes.
HostView RandomView(int64_t rows, int64_t cols, std::mt19937_64* random) {
  const auto pick = [&](int64_t n) {
    return static_cast<int64_t>((*random)() % static_cast<uint64_t>(n));
  };
  const auto cut = [&](int64_t size) {
    std::vector<int64_t> ends = {0, size};
    if (pick(2) == 0 && size > 1) ends.insert(ends.begin() + 1, 1 + pick(size - 1));
    return ends;
  };
  HostView view;
  view.mean = pick(3) > 0;
  view.grad_scale = pick(2) == 0 ? 1 : 3.5;
  std::normal_distribution<double> normal;
  const int64_t ranks = 1 + 2 * pick(2);
  for (int64_t rank = 0; rank < ranks; ++rank) {
    const int32_t group = static_cast<int32_t>(pick(2) == 0 ? rank : 0);
    const std::vector<int64_t> row_ends = cut(rows), col_ends = cut(cols);
    for (size_t i = 0; i + 1 < row_ends.size(); ++i) {
      for (size_t j = 0; j + 1 < col_ends.size(); ++j) {
        if (ranks > 1 && pick(6) == 0) continue;  // absent
        HostPiece piece;
        piece.rect = {row_ends[i], row_ends[i + 1], col_ends[j], col_ends[j + 1]};
        piece.dtype = static_cast<DType>(pick(3));
        piece.group = group;
        piece.weight = group == 0 ? 1.5 : group == 1 ? 0.25 : 0;
        piece.values.resize(piece.rect.Area());
        for (double& v : piece.values) {
          // What the wire dtype holds, so that the reference sees the same numbers.
          float narrow = static_cast<float>(normal(*random));
          uint32_t raw = 0;
          Convert(&narrow, DType::kFp32, &raw, piece.dtype, 1);
          Convert(&raw, piece.dtype, &narrow, DType::kFp32, 1);
          v = narrow;
        }
        view.pieces.push_back(std::move(piece));
      }
    }
  }
  return view;
}

Dense GradientOf(const HostView& view, int64_t rows, int64_t cols) {
  GradientView gradient;
  gradient.mean = view.mean;
  gradient.grad_scale = view.grad_scale;
  std::vector<std::vector<float>> data;
  data.reserve(view.pieces.size());
  for (const HostPiece& piece : view.pieces) {
    data.emplace_back(piece.values.begin(), piece.values.end());
    gradient.pieces.push_back(
        {piece.rect, data.back().data(), DType::kFp32, piece.weight, piece.group, piece.group});
  }
  return ReferenceGradient(gradient, rows, cols);
}

// Every preset, many shapes and layouts of pieces, overrides of lr, beta, weight decay and kind,
// clipping; two steps in DELTA mode and a third in WEIGHTS mode.
TYPED_TEST(RulesTest, DifferentialAgainstTheReference) {
  const std::pair<int64_t, int64_t> shapes[] = {{1, 1},  {1, 9},   {9, 1},   {3, 5},   {8, 4},
                                                {7, 13}, {31, 17}, {5, 300}, {257, 3}, {40, 40}};
  std::vector<Rule> rules;
  for (const PresetInfo& info : Presets()) rules.push_back(MakeRule(std::string(info.name)));
  rules.push_back(MakeRule("muon", {{"momentum", "ema_bias_corrected"}}));
  rules.push_back(MakeRule(
      "muon",
      {{"momentum", "ema_bias_corrected"}, {"nesterov", "false"}, {"scale", "spectral_max"}}));
  rules.push_back(MakeRule("sgd", {{"beta", "0.9"}}));
  rules.push_back(MakeRule("periodic_rowwise_muon", {{"row_axis", "cols"}, {"row_scale", "unit"}}));
  rules.push_back(MakeRule("periodic_rowwise_muon",
                           {{"row_axis", "long"}, {"row_scale", "rms"}, {"row_rms", "0.2"}}));
  rules.push_back(
      MakeRule("periodic_rowwise_muon", {{"row_axis", "short"}, {"off_refresh_lr_ratio", "0.3"}}));
  std::mt19937_64 random(42);
  for (const Rule& rule : rules) {
    for (const auto& [rows, cols] : shapes) {
      MatrixOnDevice matrix(this->backend_.get(), rule, rows, cols);
      ReferenceRule reference(rule, rows, cols);
      for (int64_t step = 1; step <= 3; ++step) {
        const HostView view = RandomView(rows, cols, &random);
        StepArgs args = ArgsOf(rule, 0, step);
        args.lr = 0.5 / static_cast<double>(step);
        args.weight_decay = 0.1;
        args.clip_scale = step == 2 ? 0.37 : 1;
        if (step == 3 && !matrix.rule().State().empty()) args.beta = 0.8;
        StepOptions options;
        options.lazy = step == 2;
        std::vector<float> weights(rows * cols);
        for (float& w : weights) w = static_cast<float>(random() % 1000) / 500 - 1;
        if (step == 3) options.weights = weights;
        const Dense gradient = GradientOf(view, rows, cols);
        const Outcome got = matrix.Step(view, args, options);
        const ReferenceStep want = reference.Step(gradient, args);
        const std::string where = DescribeRule(rule) + " " + std::to_string(rows) + "x" +
                                  std::to_string(cols) + " step " + std::to_string(step);
        // A matrix whose small singular values are near fp32's noise may differ more
        // (docs/RULES.md, section 7).
        const std::vector<double> values = SingularValues(want.direction);
        const double conditioning = values.back() / FrobeniusNorm(want.direction);
        const double bound =
            rule.family == RuleFamily::kSpectral && !(conditioning >= 0.01) ? 3e-4 : kFp32Error;
        if (step == 3) {
          EXPECT_LE(RelativeError(got.weights,
                                  ReferenceRule::Apply(ToDense(weights, rows, cols), want, args)),
                    bound)
              << where;
        } else if (rule.family != RuleFamily::kLion) {
          EXPECT_LE(RelativeError(got.delta, want.delta), bound) << where;
        }
        for (size_t i = 0; i < got.state.size(); ++i) {
          EXPECT_LE(RelativeError(got.state[i], reference.state()[i]), 2e-6)
              << where << " state " << i;
        }
        EXPECT_NEAR(got.result.sum_squares, Inner(gradient, gradient),
                    1e-5 * Inner(gradient, gradient))
            << where;
        const double rms = ScaleFactor(rule, rows, cols) * FrobeniusNorm(want.update) /
                           std::sqrt(static_cast<double>(rows * cols));
        EXPECT_NEAR(got.result.update_rms, rms, 3e-4 * rms) << where;
        EXPECT_EQ(got.result.nonfinite_gradient + got.result.nonfinite_update, 0) << where;
        EXPECT_EQ(got.result.newton_schulz,
                  rule.family == RuleFamily::kSpectral && args.kind == StepKind::kRefresh)
            << where;
      }
    }
  }
}

// Random inputs and a geometric spectrum down to 1e-8.
TYPED_TEST(RulesTest, EveryFormAgreesWithTheReference) {
  for (const auto& [rows, cols] :
       {std::pair<int64_t, int64_t>{64, 64}, {70, 300}, {400, 96}, {193, 250}}) {
    const int64_t m = std::min(rows, cols);
    Dense s(m, m);
    for (int64_t i = 0; i < m; ++i)
      s(i, i) = std::pow(1e-8, static_cast<double>(i) / static_cast<double>(m - 1));
    const Dense ill = Multiply(Multiply(Transpose(RandomOrthonormalRows(m, rows, 5)), s),
                               RandomOrthonormalRows(m, cols, 6));
    for (const Dense& u : {RandomNormal(rows, cols, 3), ill}) {
      const double bound = SingularValues(u).back() / FrobeniusNorm(u) >= 0.01 ? kFp32Error : 3e-4;
      for (const char* coefficients : {"keller_jordan", "polar_express", "you"}) {
        const Rule plain = PlainPolar(coefficients, 5);
        const Dense truth = Combine(-1, ReferencePolar(plain, u), 0, u);
        for (const char* form : {"standard", "gram", "auto"}) {
          Rule rule = plain;
          ASSERT_TRUE(SetOption(rule, "form", form).ok());
          MatrixOnDevice matrix(this->backend_.get(), rule, rows, cols);
          const Outcome outcome = matrix.Step({WholeGradient(u)}, ArgsOf(rule, 0, 1));
          EXPECT_LE(RelativeError(outcome.delta, truth), bound)
              << rows << "x" << cols << " " << coefficients << " " << form << " bound " << bound;
        }
      }
    }
  }
}

}  // namespace
}  // namespace stiefel
