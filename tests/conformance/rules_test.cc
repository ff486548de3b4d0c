// Gradients that arrive in pieces, and the forms of the polar map, against the reference.
#include <cmath>
#include <random>

#include "common/dtype.h"
#include "gtest/gtest.h"
#include "tests/conformance/backend_fixture.h"
#include "tests/conformance/differential.h"

namespace stiefel {
namespace {

template <typename T>
using RulesTest = ConformanceTest<T>;
TYPED_TEST_SUITE(RulesTest, BackendsUnderTest);

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

// Every preset on gradients of many layouts, with clipping and weight decay.
TYPED_TEST(RulesTest, GradientsInPiecesAgreeWithTheReference) {
  std::mt19937_64 random(42);
  for (const Rule& rule : EveryPreset()) {
    for (const auto& [rows, cols] :
         {std::pair<int64_t, int64_t>{1, 9}, {9, 1}, {8, 5}, {31, 17}, {5, 300}, {40, 40}}) {
      MatrixOnDevice matrix(this->backend_.get(), rule, rows, cols);
      ReferenceRule reference(rule, rows, cols);
      for (int64_t step = 1; step <= 2; ++step) {
        const HostView view = RandomView(rows, cols, &random);
        const Dense gradient = GradientOf(view, rows, cols);
        StepArgs args = ArgsOf(rule, 0, step);
        args.clip_scale = step == 2 ? 0.37 : 1;
        const Outcome got = matrix.Step(view, args);
        const ReferenceStep want = StepOf(&reference, rule, gradient, args);
        const std::string where = DescribeRule(rule) + " " + std::to_string(rows) + "x" +
                                  std::to_string(cols) + " step " + std::to_string(step);
        if (rule.family != RuleFamily::kLion) {
          EXPECT_LE(RelativeError(got.delta, want.delta), Fp32Tolerance(rule, want, args)) << where;
        }
        EXPECT_LE(got.state.empty() ? 0 : RelativeError(got.state[0], reference.state()[0]), 2e-6)
            << where;
        EXPECT_NEAR(got.result.sum_squares, Inner(gradient, gradient),
                    1e-5 * Inner(gradient, gradient))
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
      const double bound =
          SingularValues(u).back() / FrobeniusNorm(u) >= 0.01 ? kFp32Error : kIllConditionedError;
      for (const char* coefficients : {"keller_jordan", "polar_express", "you"}) {
        const Rule plain = MakeRule("muon", {{"beta", "0"},
                                             {"nesterov", "false"},
                                             {"scale", "none"},
                                             {"lr", "1"},
                                             {"compute", "fp32"},
                                             {"coefficients", coefficients}});
        const Dense truth = Scaled(-1, ReferencePolar(plain, u));
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
