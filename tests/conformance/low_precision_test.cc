// The criterion of docs/mathematics.md section 7 for bf16, of what the polar map gives, per split
// and tile.
#include <algorithm>
#include <cmath>
#include <iostream>
#include <string>

#include "gtest/gtest.h"
#include "tests/conformance/backend_fixture.h"

namespace stiefel {
namespace {

// A normal matrix, one with a geometric spectrum of condition number 1e3, one of low rank with a
// little noise.
Dense Input(int kind, int64_t rows, int64_t cols) {
  const Dense normal = RandomNormal(rows, cols, 100 + static_cast<uint64_t>(kind));
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

template <typename T>
using LowPrecisionTest = ConformanceTest<T>;
TYPED_TEST_SUITE(LowPrecisionTest, BackendsUnderTest);

struct Setting {
  int64_t rows, cols;
  std::string preset;
  std::vector<std::pair<std::string, std::string>> options;
};

TYPED_TEST(LowPrecisionTest, SingularValuesAndAlignmentOfEveryUnit) {
  if (!this->backend_->Info().has_bf16) GTEST_SKIP() << "no bf16 on this device";
  const std::vector<Setting> settings = {
      {64, 64, "muon", {}},
      {64, 200, "muon", {}},
      {150, 80, "muon", {}},
      {96, 300, "muon", {{"coefficients", "polar_express"}}},
      {150, 80, "muon", {{"coefficients", "you"}}},
      {200, 72, "turbo_muon", {}},
      {72, 180, "turbo_muon", {}},
      {216, 96, "cmuon", {{"splits", "72,80,64"}}},
      {192, 130, "cmuon", {{"num_heads", "3"}, {"coefficients", "polar_express"}}},
      {150, 216, "himuon", {{"tile", "72"}}},
      {144, 144, "himuon", {{"tile", "72"}, {"coefficients", "polar_express"}}}};
  int units = 0;
  double worst_value = 0, worst_alignment = 0;
  for (const Setting& setting : settings) {
    for (int kind = 0; kind < 3; ++kind) {
      for (const char* form : {"standard", "gram"}) {
        Rule rule = MakeRule(setting.preset, setting.options);
        for (const auto& [key, value] :
             std::vector<std::pair<std::string, std::string>>{{"beta", "0"},
                                                              {"nesterov", "false"},
                                                              {"scale", "none"},
                                                              {"scale_of", "split"},
                                                              {"lr", "1"},
                                                              {"compute", "bf16"},
                                                              {"form", form}}) {
          ASSERT_TRUE(SetOption(rule, key, value).ok());
        }
        const Dense u = Rounded(Input(kind, setting.rows, setting.cols));
        MatrixOnDevice matrix(this->backend_.get(), rule, setting.rows, setting.cols);
        const Outcome outcome = matrix.Step({WholeGradient(u)}, ArgsOf(rule, 0, 1));
        const Dense o = Scaled(-1, ToDense(outcome.delta, setting.rows, setting.cols));
        ReferenceRule reference(rule, setting.rows, setting.cols);
        for (const ReferenceUnit& unit : reference.Step(u, ArgsOf(rule, 0, 1)).units) {
          const Rect& r = unit.rect;
          if (std::min(r.rows(), r.cols()) < 64) continue;
          ++units;
          const Dense part = Block(o, r.row_begin, r.col_begin, r.rows(), r.cols());
          const std::vector<double> wanted = SingularValues(unit.o), got = SingularValues(part);
          const std::string where =
              DescribeRule(rule) + " input " + std::to_string(kind) + " " + r.DebugString();
          EXPECT_LE(got.front(), wanted.front() + 0.05) << where;
          EXPECT_GE(got.back(), wanted.back() - 0.05) << where;
          const double alignment = Inner(part, unit.u) / Inner(unit.o, unit.u);
          EXPECT_NEAR(alignment, 1, 0.02) << where;
          worst_value =
              std::max({worst_value, got.front() - wanted.front(), wanted.back() - got.back()});
          worst_alignment = std::max(worst_alignment, std::fabs(alignment - 1));
        }
      }
    }
  }
  std::cout << units << " units: singular values at most " << worst_value
            << " outside the fp64 range (0.05), alignment at most " << worst_alignment
            << " from 1 (0.02)\n";
}

}  // namespace
}  // namespace stiefel
