// The golden values of docs/mathematics.md section 7.
#include "tests/vectors/golden.h"

#include <algorithm>
#include <cmath>
#include <string>

#include "gtest/gtest.h"
#include "tests/conformance/backend_fixture.h"
#include "tests/conformance/differential.h"

namespace stiefel {
namespace {

template <typename T>
using GoldenTest = ConformanceTest<T>;
TYPED_TEST_SUITE(GoldenTest, BackendsUnderTest);

TYPED_TEST(GoldenTest, SequencesWithBothKindsOfStaging) {
  for (const GoldenCase& golden : GoldenCases()) {
    for (bool lazy : {false, true}) {
      MatrixOnDevice matrix(this->backend_.get(), golden.rule, golden.rows, golden.cols);
      for (int64_t step = 1; step <= 4; ++step) {
        StepOptions options;
        options.lazy = lazy;
        const Outcome outcome =
            matrix.Step({WholeGradient(GoldenGradient(step - 1, golden.rows, golden.cols))},
                        ArgsOf(golden.rule, golden.phase, step), options);
        EXPECT_LE(RelativeError(outcome.delta, golden.deltas[step - 1]), kFp32Error)
            << golden.name << " " << golden.rows << "x" << golden.cols << " step " << step
            << (lazy ? " lazy" : " double");
      }
    }
  }
}

// Momentum that is exactly G, no scale, lr 1: delta = -polar(G). The tables, TURBO among them, are
// tested as scalar maps, so with normalise=frobenius.
TYPED_TEST(GoldenTest, OutputSingularValuesAreThoseOfTheScalarMap) {
  for (const GoldenEnvelope& envelope : GoldenEnvelopes()) {
    const int64_t steps = static_cast<int64_t>(envelope.schedule.size());
    for (const char* form : {"standard", "gram"}) {
      if (steps > 5 && std::string(form) == "gram") continue;  // would need more restarts
      Rule rule = MakeRule("muon", {{"beta", "0"},
                                    {"nesterov", "false"},
                                    {"scale", "none"},
                                    {"lr", "1"},
                                    {"coefficients", envelope.coefficients},
                                    {"steps", std::to_string(steps)},
                                    {"normalise", "frobenius"},
                                    {"form", form}});
      rule.safety = envelope.safety;
      const auto f = [&](double x) {
        for (const Coefficients& k : envelope.schedule)
          x = k.a * x + k.b * std::pow(x, 3) + k.c * std::pow(x, 5);
        return x;
      };
      for (const GoldenEnvelope::Point& point : envelope.points) {
        // The point is one singular value; eleven others share what is left of the unit norm.
        const double s = point.x;
        Dense diagonal(12, 12);
        diagonal(0, 0) = s;
        for (int64_t i = 1; i < 12; ++i) diagonal(i, i) = std::sqrt((1 - s * s) / 11);
        const Dense u = Multiply(Multiply(RandomOrthonormalRows(12, 12, 17), diagonal),
                                 RandomOrthonormalRows(12, 40, 3));
        MatrixOnDevice matrix(this->backend_.get(), rule, u.rows, u.cols);
        const Outcome outcome = matrix.Step({WholeGradient(u)}, ArgsOf(rule, 0, 1));
        double nearest = 1;
        for (double v : SingularValues(ToDense(outcome.delta, u.rows, u.cols)))
          nearest = std::min(nearest, std::fabs(v - point.y));
        // Where the map is so steep that the rounding of the input alone moves it further (the raw
        // POLAR_EXPRESS at 1: f' = 68000), no more than that can be asked.
        const double slope = (f(s + 1e-7) - f(s - 1e-7)) / 2e-7;
        EXPECT_LE(nearest, std::max(1e-4, std::ldexp(std::fabs(slope), -23)))
            << envelope.name << " at " << s << ", " << form;
      }
    }
  }
}

}  // namespace
}  // namespace stiefel
