// What must not change a bit: threads, staging, alignment, layout of pieces, and who else computes.
#include <cmath>
#include <thread>

#include "gtest/gtest.h"
#include "tests/conformance/backend_fixture.h"

namespace stiefel {
namespace {

template <typename T>
using InvarianceTest = ConformanceTest<T>;
TYPED_TEST_SUITE(InvarianceTest, BackendsUnderTest);

// Rules that cover every pass, on matrices of several blocks; those that have passes of their own
// for large matrices, on large ones.
struct Setting {
  Rule rule;
  int64_t rows, cols;
};

std::vector<Setting> Settings() {
  std::vector<Setting> settings;
  for (const auto& [rows, cols] : {std::pair<int64_t, int64_t>{110, 271}, {271, 110}}) {
    std::vector<Rule> rules = EveryPreset();
    rules.push_back(MakeRule("turbo_muon", {{"form", "gram"}}));
    rules.push_back(MakeRule("dion3", {{"select_axis", "short"}, {"period", "2"}}));
    const std::string splits = std::to_string(rows / 2) + "," + std::to_string(rows - rows / 2);
    rules.push_back(MakeRule("cmuon", {{"splits", splits}, {"row_variance_beta2", "0.9"}}));
    for (const Rule& rule : rules) settings.push_back({rule, rows, cols});
  }
  for (const auto& [rows, cols] : {std::pair<int64_t, int64_t>{230, 611}, {611, 230}}) {
    for (const Rule& rule :
         {MakeRule("muon"), MakeRule("muon", {{"form", "gram"}}), MakeRule("normuon"),
          MakeRule("periodic_rowwise_muon"),
          MakeRule("periodic_rowwise_muon", {{"row_axis", "cols"}}),
          MakeRule("periodic_rowwise_muon", {{"row_spectral_max", "0.9"}}), MakeRule("adamw")}) {
      settings.push_back({rule, rows, cols});
    }
  }
  return settings;
}

// Two steps, the second an off-refresh one of periodic rules.
std::vector<Outcome> RunTwoSteps(Backend* backend, const Rule& rule, int64_t rows, int64_t cols,
                                 const StepOptions& options) {
  MatrixOnDevice matrix(backend, rule, rows, cols);
  std::vector<Outcome> outcomes;
  for (int64_t step = 1; step <= 2; ++step) {
    outcomes.push_back(matrix.Step({WholeGradient(RandomNormal(rows, cols, step))},
                                   ArgsOf(rule, 0, step), options));
  }
  return outcomes;
}

TYPED_TEST(InvarianceTest, ThreadsLazyStagingAndAlignmentDoNotChangeABit) {
  const std::unique_ptr<Backend> one = this->MakeBackend(1), three = this->MakeBackend(3);
  for (const auto& [rule, rows, cols] : Settings()) {
    const std::string where =
        DescribeRule(rule) + " " + std::to_string(rows) + "x" + std::to_string(cols);
    const std::vector<Outcome> plain = RunTwoSteps(one.get(), rule, rows, cols, {});
    ExpectSame(RunTwoSteps(this->backend_.get(), rule, rows, cols, {}), plain,
               where + " 2 threads");
    ExpectSame(RunTwoSteps(three.get(), rule, rows, cols, {}), plain, where + " 3 threads");
    StepOptions lazy;
    lazy.lazy = true;
    ExpectSame(RunTwoSteps(one.get(), rule, rows, cols, lazy), plain, where + " lazy");
    StepOptions shifted;
    shifted.misalign = 1;
    ExpectSame(RunTwoSteps(one.get(), rule, rows, cols, shifted), plain, where + " shifted");
  }
}

// CASES A25: whoever else uses the device at the time.
TYPED_TEST(InvarianceTest, OtherMatricesOnTheDeviceDoNotChangeABit) {
  const std::vector<Setting> matrices = {{MakeRule("periodic_rowwise_muon"), 230, 611},
                                         {MakeRule("turbo_muon"), 300, 200},
                                         {MakeRule("muon"), 64, 64},
                                         {MakeRule("himuon", {{"tile", "64"}}), 200, 230},
                                         {MakeRule("dion3"), 200, 90},
                                         {MakeRule("samuon"), 90, 60},
                                         {MakeRule("polora"), 8, 300}};
  std::vector<std::vector<Outcome>> alone;
  for (const Setting& m : matrices)
    alone.push_back(RunTwoSteps(this->backend_.get(), m.rule, m.rows, m.cols, {}));
  std::vector<std::vector<Outcome>> together(matrices.size());
  std::vector<std::thread> threads;
  for (size_t i = 0; i < matrices.size(); ++i) {
    threads.emplace_back([&, i] {
      const Setting& m = matrices[i];
      for (int repeat = 0; repeat < 3; ++repeat)
        together[i] = RunTwoSteps(this->backend_.get(), m.rule, m.rows, m.cols, {});
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (size_t i = 0; i < matrices.size(); ++i)
    ExpectSame(together[i], alone[i], DescribeRule(matrices[i].rule));
}

// The layout of the pieces is no part of the mathematics.
TYPED_TEST(InvarianceTest, PieceLayoutsDoNotChangeABit) {
  for (const Rule& rule :
       {MakeRule("muon"), MakeRule("periodic_rowwise_muon"), MakeRule("adamw"), MakeRule("dion3"),
        MakeRule("cmuon", {{"splits", "77,53"}}), MakeRule("polora")}) {
    const int64_t rows = 130, cols = 301;
    const Dense g = RandomNormal(rows, cols, 4);
    const auto piece = [&](Rect rect) {
      HostPiece p{rect, {}};
      for (int64_t i = rect.row_begin; i < rect.row_end; ++i) {
        for (int64_t j = rect.col_begin; j < rect.col_end; ++j) p.values.push_back(g(i, j));
      }
      return p;
    };
    const std::vector<std::vector<HostPiece>> layouts = {
        {piece({0, rows, 0, cols})},
        {piece({0, rows, 0, 100}), piece({0, rows, 100, cols})},
        {piece({0, 77, 0, cols}), piece({77, rows, 0, cols})},
        {piece({0, 1, 0, 5}), piece({0, 1, 5, cols}), piece({1, rows, 0, 299}),
         piece({1, rows, 299, cols})}};
    std::vector<std::vector<Outcome>> outcomes;
    for (const std::vector<HostPiece>& layout : layouts) {
      MatrixOnDevice matrix(this->backend_.get(), rule, rows, cols);
      outcomes.emplace_back();
      for (int64_t step = 1; step <= 2; ++step)
        outcomes.back().push_back(matrix.Step({layout}, ArgsOf(rule, 0, step)));
    }
    for (const std::vector<Outcome>& outcome : outcomes)
      ExpectSame(outcome, outcomes[0], DescribeRule(rule));
  }
}

TYPED_TEST(InvarianceTest, DeltaAndWeightsModesAgreeToTheBit) {
  for (const char* preset :
       {"muon_torch", "periodic_rowwise_muon", "himuon", "dion3", "cmuon", "adamw"}) {
    const Rule rule = MakeRule(preset, {{"weight_decay", "0.1"}});
    const int64_t rows = 33, cols = 20;
    MatrixOnDevice by_delta(this->backend_.get(), rule, rows, cols),
        by_weights(this->backend_.get(), rule, rows, cols);
    std::vector<float> weights(rows * cols);
    for (size_t i = 0; i < weights.size(); ++i) weights[i] = std::sin(static_cast<float>(i));
    std::vector<float> applied = weights;
    for (int64_t step = 1; step <= 3; ++step) {
      const HostView view{WholeGradient(RandomNormal(rows, cols, step))};
      const StepArgs args = ArgsOf(rule, 0, step);
      StepOptions options;
      options.weights = weights;
      weights = by_weights.Step(view, args, options).weights;
      const std::vector<float> delta = by_delta.Step(view, args).delta;
      const float decay = static_cast<float>(1 - args.lr * args.weight_decay);
      for (size_t i = 0; i < applied.size(); ++i) {
        const volatile float decayed = decay * applied[i];
        applied[i] = decayed + delta[i];
      }
      EXPECT_TRUE(SameBits(weights, applied)) << preset << " step " << step;
    }
  }
}

}  // namespace
}  // namespace stiefel
