#include "tests/bench/quality_study/problem.h"

#include <cmath>

#include "gtest/gtest.h"
#include "tests/bench/quality_study/study.h"

namespace stiefel::quality {
namespace {

// The expected error of the linear network is not the batch's, so its gradients are checked through
// descent alone.
TEST(Problems, GradientOfTheFactorisationIsThatOfItsMetric) {
  const std::unique_ptr<Problem> problem = MakeFactorisation(3);
  const auto loss = [&] { return 0.5 * std::pow(problem->Evaluate(), 2); };
  for (const Array& array : problem->arrays()) {
    for (const int64_t i : {int64_t{0}, int64_t{77}, array.rows * array.cols - 1}) {
      problem->Gradients(1);
      const double gradient = (*array.gradient)[i];
      float& weight = (*array.weights)[i];
      const float before = weight;
      const float h = 1e-2f;
      weight = before + h;
      const double above = loss();
      weight = before - h;
      const double below = loss();
      weight = before;
      EXPECT_NEAR((above - below) / (2 * h), gradient, 1e-3 * std::fabs(gradient) + 1e-5)
          << array.name << " " << i;
    }
  }
}

TEST(Problems, FollowFromTheSeed) {
  for (const auto& make : {&MakeFactorisation, &MakeLinearNetwork}) {
    const std::unique_ptr<Problem> a = make(5), b = make(5), c = make(6);
    EXPECT_EQ(a->Evaluate(), b->Evaluate());
    EXPECT_NE(a->Evaluate(), c->Evaluate());
    a->Gradients(2);
    b->Gradients(2);
    EXPECT_EQ(*a->arrays()[1].gradient, *b->arrays()[1].gradient);
  }
}

TEST(Study, TunedRulesLearnAndDivergenceIsSeen) {
  const auto make = [](uint64_t seed) -> absl::StatusOr<std::unique_ptr<Problem>> {
    return MakeLinearNetwork(seed);
  };
  Rule muon = *PresetRule("muon"), sgd = *PresetRule("sgd");
  sgd.lr = 1e6;  // diverges at every point of the grid
  Budget budget;
  budget.grid_points = 2;
  budget.tuning_seeds = 1;
  budget.final_seeds = 3;
  ProblemInfo info = LinearNetworkInfo();
  info.steps = 100;
  const auto scores = Compare(info, make, {{"muon", muon}, {"sgd", sgd}}, budget);
  ASSERT_TRUE(scores.ok()) << scores.status();
  EXPECT_LT((*scores)[0].median, 0.5);
  EXPECT_LE((*scores)[0].min, (*scores)[0].median);
  EXPECT_LE((*scores)[0].median, (*scores)[0].max);
  EXPECT_TRUE(std::isinf((*scores)[1].median));
  // Threads change nothing.
  budget.threads = 1;
  const auto again = Compare(info, make, {{"muon", muon}, {"sgd", sgd}}, budget);
  EXPECT_EQ((*scores)[0].median, (*again)[0].median);
}

}  // namespace
}  // namespace stiefel::quality
