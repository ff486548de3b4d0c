// What is the same by another name: options that amount to nothing, and matrices that are others
// side by side. To the bit, unless a test says otherwise.
#include <algorithm>
#include <deque>
#include <string>

#include "gtest/gtest.h"
#include "tests/conformance/backend_fixture.h"
#include "tests/conformance/differential.h"

namespace stiefel {
namespace {

using Changes = std::vector<std::pair<std::string, std::string>>;

constexpr int64_t kSteps = 4;  // both kinds of every period here

template <typename T>
using IdentitiesTest = ConformanceTest<T>;
TYPED_TEST_SUITE(IdentitiesTest, BackendsUnderTest);

Dense GradientOf(int64_t rows, int64_t cols, int64_t step) {
  return Rounded(RandomNormal(rows, cols, 40 + static_cast<uint64_t>(step)));
}

std::vector<Outcome> Run(Backend* backend, const Rule& rule, int64_t rows, int64_t cols) {
  MatrixOnDevice matrix(backend, rule, rows, cols);
  std::vector<Outcome> outcomes;
  for (int64_t step = 1; step <= kSteps; ++step) {
    outcomes.push_back(
        matrix.Step({WholeGradient(GradientOf(rows, cols, step))}, ArgsOf(rule, 0, step)));
  }
  return outcomes;
}

void ExpectSameRule(Backend* backend, const Rule& a, const Rule& b) {
  for (const auto& [rows, cols] : {std::pair<int64_t, int64_t>{24, 36}, {90, 20}, {30, 30}}) {
    const std::string where = DescribeRule(a) + " and " + DescribeRule(b) + " " +
                              std::to_string(rows) + "x" + std::to_string(cols);
    const std::vector<Outcome> left = Run(backend, a, rows, cols),
                               right = Run(backend, b, rows, cols);
    for (int64_t i = 0; i < kSteps; ++i) {
      EXPECT_TRUE(SameBits(left[i].delta, right[i].delta)) << where << " step " << i + 1;
      EXPECT_TRUE(SameBits(left[i].state[0], right[i].state[0])) << where << " step " << i + 1;
    }
  }
}

TYPED_TEST(IdentitiesTest, GainOneIsMuon) {
  const Rule muon = MakeRule(
      "muon", {{"nesterov", "false"}, {"coefficients", "polar_express"}, {"scale", "spectral"}});
  ExpectSameRule(this->backend_.get(), MakeRule("samuon", {{"gain", "1"}}), muon);
  ExpectSameRule(this->backend_.get(), MakeRule("samuon_lite", {{"gain", "1"}}), muon);
}

TYPED_TEST(IdentitiesTest, PeriodOneIsMuon) {
  ExpectSameRule(this->backend_.get(), MakeRule("periodic_rowwise_muon", {{"period", "1"}}),
                 MakeRule("muon"));
  ExpectSameRule(this->backend_.get(), MakeRule("muonbp", {{"period", "1"}, {"tile", "8"}}),
                 MakeRule("muon"));
}

TYPED_TEST(IdentitiesTest, OneSplitIsNone) {
  ExpectSameRule(this->backend_.get(), MakeRule("cmuon"), MakeRule("muon"));
  for (const auto& [rows, cols] : {std::pair<int64_t, int64_t>{24, 36}, {90, 20}}) {
    const Rule split = MakeRule("cmuon", {{"splits", std::to_string(rows)}});
    const std::vector<Outcome> one = Run(this->backend_.get(), split, rows, cols);
    ExpectSame(one, Run(this->backend_.get(), MakeRule("muon"), rows, cols), DescribeRule(split));
  }
}

TYPED_TEST(IdentitiesTest, ATileAsLargeAsTheMatrixIsNone) {
  const Rule whole = MakeRule("himuon", {{"tile", "none"}, {"scale_of", "split"}});
  ExpectSameRule(this->backend_.get(), MakeRule("himuon", {{"tile", "90"}}), whole);
  // 90 x 20 and 24 x 36 have fewer than 43 * 43 elements.
  ExpectSameRule(this->backend_.get(), MakeRule("himuon", {{"tile", "43"}}), whole);
  ExpectSameRule(this->backend_.get(), MakeRule("muonbp", {{"tile", "43"}}),
                 MakeRule("muon", {{"period", "1"}}));
}

// A tile schedule is the tile of the step.
TYPED_TEST(IdentitiesTest, ATileScheduleIsTheTileInForce) {
  const int64_t rows = 24, cols = 36;
  const std::vector<Outcome> scheduled =
      Run(this->backend_.get(), MakeRule("himuon", {{"tile", "7,3:16"}}), rows, cols);
  const std::vector<Outcome> small =
      Run(this->backend_.get(), MakeRule("himuon", {{"tile", "7"}}), rows, cols);
  const std::vector<Outcome> large =
      Run(this->backend_.get(), MakeRule("himuon", {{"tile", "16"}}), rows, cols);
  for (int64_t i = 0; i < kSteps; ++i)
    EXPECT_TRUE(SameBits(scheduled[i].delta, (i < 2 ? small : large)[i].delta)) << i;
}

// f = 1 with damping = beta. The momentum is rounded once more, so not to the bit.
TYPED_TEST(IdentitiesTest, SelectingAllRowsIsHeavyBall) {
  const Rule all = MakeRule("dion2", {{"select_fraction", "1"}});
  const Rule heavy_ball = MakeRule("muon", {{"momentum", "heavy_ball"},
                                            {"nesterov", "false"},
                                            {"coefficients", "polar_express"},
                                            {"form", "gram"},
                                            {"lr", "0.01"},
                                            {"scale", "spectral"}});
  for (const auto& [rows, cols] : {std::pair<int64_t, int64_t>{24, 36}, {90, 20}}) {
    const std::vector<Outcome> a = Run(this->backend_.get(), all, rows, cols);
    const std::vector<Outcome> b = Run(this->backend_.get(), heavy_ball, rows, cols);
    for (int64_t i = 0; i < kSteps; ++i) {
      EXPECT_LE(RelativeError(a[i].delta, ToDense(b[i].delta, rows, cols)), kFp32Error) << i;
      EXPECT_LE(RelativeError(a[i].state[0], Scaled(0.95, ToDense(b[i].state[0], rows, cols))),
                1e-6)
          << i;
    }
  }
}

// Rows [begin, begin + rows) of a fused outcome, as the matrix of these rows alone would have it.
std::vector<float> RowsOf(const std::vector<float>& fused, int64_t begin, int64_t rows,
                          int64_t cols) {
  return {fused.begin() + begin * cols, fused.begin() + (begin + rows) * cols};
}

// CASES A22, A13, A15: Q, K and V fused, heads, stacked experts.
TYPED_TEST(IdentitiesTest, AFusedMatrixIsItsSplitsOneBelowTheOther) {
  const std::vector<std::pair<std::string, Changes>> rules = {
      {"cmuon", {}},
      {"cmuon", {{"form", "gram"}}},
      {"cmuon", {{"period", "3"}}},
      {"cmuon", {{"period", "2"}, {"row_axis", "short"}, {"row_spectral_max", "0.8"}}},
      {"cmuon", {{"row_variance_beta2", "0.9"}}},
      {"turbo_muon", {}},
      {"samuon", {}},
      {"himuon", {{"tile", "8"}}},
      {"muonbp", {{"tile", "8"}, {"period", "2"}}}};
  const int64_t cols = 34;
  const std::vector<std::pair<std::pair<std::string, std::string>, std::vector<int64_t>>> cuts = {
      {{"splits", "40,16,16"}, {40, 16, 16}}, {{"num_heads", "4"}, {18, 18, 18, 18}}};
  for (const auto& [preset, changes] : rules) {
    for (const auto& [cut, sizes] : cuts) {
      const Rule alone = MakeRule(preset, changes);
      Rule fused = alone;
      ASSERT_TRUE(SetOption(fused, cut.first, cut.second).ok());
      const std::string where = DescribeRule(fused);
      MatrixOnDevice whole(this->backend_.get(), fused, 72, cols);
      std::deque<MatrixOnDevice> parts;
      for (int64_t size : sizes) parts.emplace_back(this->backend_.get(), alone, size, cols);
      for (int64_t step = 1; step <= kSteps; ++step) {
        const Dense g = GradientOf(72, cols, step);
        const Outcome all = whole.Step({WholeGradient(g)}, ArgsOf(fused, 0, step));
        int64_t row = 0;
        for (size_t p = 0; p < parts.size(); ++p) {
          const Outcome one = parts[p].Step({WholeGradient(Block(g, row, 0, sizes[p], cols))},
                                            ArgsOf(alone, 0, step));
          EXPECT_TRUE(SameBits(RowsOf(all.delta, row, sizes[p], cols), one.delta))
              << where << " step " << step << " split " << p;
          EXPECT_TRUE(SameBits(RowsOf(all.state[0], row, sizes[p], cols), one.state[0]))
              << where << " step " << step << " split " << p;
          row += sizes[p];
        }
      }
    }
  }
}

// Ties go to the lower index, rows that wait do not move, and only the selected ones are damped.
TYPED_TEST(IdentitiesTest, SelectionTakesTheLargestRowsAndTheLowerOfEqualOnes) {
  const int64_t rows = 12, cols = 20;
  Dense g(rows, cols);
  for (int64_t i = 0; i < rows; ++i) {
    // Of one l1 norm, but for row 7, which is larger.
    for (int64_t j = 0; j < cols; ++j) g(i, j) = ((i * j) % 3 == 0 ? 1 : -1) * (i == 7 ? 2 : 1);
  }
  for (const char* preset : {"dion2", "dion3"}) {
    const Rule rule = MakeRule(preset, {{"select_fraction", "0.25"}});
    MatrixOnDevice matrix(this->backend_.get(), rule, rows, cols);
    const Outcome outcome = matrix.Step({WholeGradient(g)}, ArgsOf(rule, 0, 1));
    for (int64_t i = 0; i < rows; ++i) {
      const bool selected = i == 0 || i == 1 || i == 7;
      const Dense row = Block(ToDense(outcome.delta, rows, cols), i, 0, 1, cols);
      EXPECT_EQ(MaxAbs(row) > 0, selected) << preset << " row " << i;
      EXPECT_EQ(outcome.state[1][i], selected ? 1 : 0) << preset << " row " << i;
      EXPECT_FLOAT_EQ(outcome.state[0][i * cols],
                      static_cast<float>(g(i, 0) * (selected ? 0.95 : 1)))
          << preset << " row " << i;
    }
  }
}

}  // namespace
}  // namespace stiefel
