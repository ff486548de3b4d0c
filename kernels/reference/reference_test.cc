#include <cmath>
#include <fstream>

#include "gtest/gtest.h"
#include "kernels/reference/reference_rule.h"
#include "nlohmann/json.hpp"

namespace stiefel {
namespace {

using nlohmann::json;

json Load(const std::string& name) {
  std::ifstream file("tests/vectors/" + name);
  EXPECT_TRUE(file.good()) << name;
  return json::parse(file);
}

// The gradient that the vectors' "gradient" field describes; s = step - 1.
Dense GoldenGradient(int64_t s, int64_t rows, int64_t cols) {
  Dense g(rows, cols);
  for (int64_t i = 0; i < rows; ++i) {
    for (int64_t j = 0; j < cols; ++j) {
      g(i, j) = static_cast<double>((7 * i + 3 * j * j + 5 + 11 * s + s * i * j) % 13 - 6) / 4;
    }
  }
  return g;
}

TEST(ReferenceTest, ReproducesTheGoldenSequences) {
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
    ReferenceRule reference(*rule, rows, cols);
    for (int64_t step = 1; step <= 4; ++step) {
      StepArgs args;
      args.step = step;
      args.commits = step - 1;
      args.kind = KindAtStep(*rule, phase1 ? 1 : 0, step);
      args.lr = rule->lr;
      args.weight_decay = rule->weight_decay;
      const ReferenceStep result = reference.Step(GoldenGradient(step - 1, rows, cols), args);
      for (int64_t i = 0; i < rows; ++i) {
        for (int64_t j = 0; j < cols; ++j) {
          ASSERT_NEAR(result.delta(i, j), golden["deltas"][step - 1][i][j].get<double>(), 1e-12)
              << name << " step " << step << " at " << i << ", " << j;
        }
      }
    }
  }
  EXPECT_EQ(cases, 14);
}

TEST(ReferenceTest, PolarOfTheGoldenGradient) {
  const json vectors = Load("rules.json");
  Rule rule = *PresetRule("muon");
  for (const auto& [table, key] :
       {std::pair<CoefficientTable, const char*>{CoefficientTable::kKellerJordan, "KELLER_JORDAN"},
        {CoefficientTable::kYou, "YOU"},
        {CoefficientTable::kPolarExpress, "POLAR_EXPRESS/1.05"}}) {
    rule.coefficients = table;
    const Dense wide = ReferencePolar(rule, GoldenGradient(0, 3, 5));
    const Dense gram = ReferenceGramPolar(rule, GoldenGradient(0, 3, 5));
    const Dense tall = ReferencePolar(rule, Transpose(GoldenGradient(0, 3, 5)));
    for (int64_t i = 0; i < 3; ++i) {
      for (int64_t j = 0; j < 5; ++j) {
        const double golden = vectors["polar_of_grad0_3x5"][key][i][j];
        EXPECT_NEAR(wide(i, j), golden, 1e-12) << key;
        EXPECT_NEAR(gram(i, j), golden, 1e-12) << key;
        EXPECT_EQ(tall(j, i), wide(i, j)) << key;
      }
    }
  }
}

TEST(ReferenceTest, ConvergentCoefficientsGiveTheExactFactor) {
  Rule rule = *PresetRule("muon");
  rule.coefficients = CoefficientTable::kConvergent;
  const Dense o = ReferencePolar(rule, Dense(2, 2, {2, 0, 1, 1}));
  EXPECT_NEAR(o(0, 0), 0.948683298, 1e-9);
  EXPECT_NEAR(o(0, 1), -0.316227766, 1e-9);
  EXPECT_NEAR(o(1, 0), 0.316227766, 1e-9);
  EXPECT_NEAR(o(1, 1), 0.948683298, 1e-9);
}

TEST(ReferenceTest, SingularValuesOfAConstructedMatrix) {
  const Dense u = RandomOrthonormalRows(7, 7, 1), v = RandomOrthonormalRows(7, 12, 2);
  Dense s(7, 7);
  for (int64_t i = 0; i < 7; ++i) s(i, i) = std::pow(10.0, -static_cast<double>(i));
  const std::vector<double> values = SingularValues(Multiply(Multiply(u, s), v));
  for (int64_t i = 0; i < 7; ++i) EXPECT_NEAR(values[i] / s(i, i), 1, 1e-9);
}

}  // namespace
}  // namespace stiefel
