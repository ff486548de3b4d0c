// Where numbers go wrong: scales, ends of the range, empty rows, non-finite input.
#include <cmath>
#include <iostream>
#include <limits>

#include "gtest/gtest.h"
#include "tests/conformance/backend_fixture.h"
#include "tests/conformance/differential.h"
#include "tests/model/scale.h"

namespace stiefel {
namespace {

template <typename T>
using NumericsTest = ConformanceTest<T>;
TYPED_TEST_SUITE(NumericsTest, BackendsUnderTest);

// Normal numbers whose products with 2^-100 are normal too.
Dense Moderate(int64_t rows, int64_t cols, uint64_t seed) {
  Dense g = RandomNormal(rows, cols, seed);
  for (double& v : g.values) v = static_cast<float>(v + std::copysign(0.01, v));
  return g;
}

// Deltas of three steps of gradients scaled by 2^k.
std::vector<std::vector<float>> DeltasAtScale(Backend* backend, const Rule& rule, int64_t rows,
                                              int64_t cols, int k) {
  std::vector<std::vector<float>> deltas;
  MatrixOnDevice matrix(backend, rule, rows, cols);
  for (int64_t step = 1; step <= 3; ++step) {
    const Dense g = Scaled(std::ldexp(1.0, k), Moderate(rows, cols, static_cast<uint64_t>(step)));
    deltas.push_back(matrix.Step({WholeGradient(g)}, ArgsOf(rule, 0, step)).delta);
  }
  return deltas;
}

// CASES A1. Every spectral preset without eps, refresh and what is in between.
TYPED_TEST(NumericsTest, PowersOfTwoDoNotChangeABit) {
  std::vector<Rule> rules = {MakeRule("periodic_rowwise_muon", {{"row_axis", "cols"}}),
                             MakeRule("periodic_rowwise_muon", {{"row_spectral_max", "1.1"}}),
                             MakeRule("muon", {{"form", "gram"}}),
                             MakeRule("turbo_muon", {{"form", "gram"}}),
                             MakeRule("cmuon", {{"num_heads", "3"}})};
  for (const Rule& rule : EveryPreset()) {
    if (rule.family == RuleFamily::kSpectral && rule.eps_mode == EpsMode::kNone)
      rules.push_back(rule);
  }
  int64_t compared = 0;
  for (const Rule& rule : rules) {
    for (const auto& [rows, cols] : {std::pair<int64_t, int64_t>{12, 30}, {30, 12}}) {
      const auto plain = DeltasAtScale(this->backend_.get(), rule, rows, cols, 0);
      for (int k = -100; k <= 100; k += k == 0 || model::FullScale() ? 1 : 25, ++compared) {
        const auto scaled = DeltasAtScale(this->backend_.get(), rule, rows, cols, k);
        for (size_t i = 0; i < plain.size(); ++i) {
          ASSERT_TRUE(SameBits(scaled[i], plain[i])) << DescribeRule(rule) << " " << rows << "x"
                                                     << cols << " 2^" << k << " step " << i + 1;
        }
      }
    }
  }
  std::cout << rules.size() << " rules, " << compared << " scales compared\n";
}

// CASES A3, A4, A31: nothing is divided by zero, and zero rows stay zero.
TYPED_TEST(NumericsTest, ZeroMatricesAndZeroRowsGiveZero) {
  for (const Rule& rule : EveryPreset()) {
    for (const auto& [rows, cols] :
         {std::pair<int64_t, int64_t>{1, 1}, {1, 7}, {7, 1}, {6, 9}, {9, 6}, {31, 23}}) {
      const std::string where =
          DescribeRule(rule) + " " + std::to_string(rows) + "x" + std::to_string(cols);
      MatrixOnDevice matrix(this->backend_.get(), rule, rows, cols);
      for (int64_t step = 1; step <= 2; ++step) {
        const Outcome outcome =
            matrix.Step({WholeGradient(Dense(rows, cols))}, ArgsOf(rule, 0, step));
        for (float v : outcome.delta) ASSERT_EQ(v, 0) << where;
        EXPECT_EQ(outcome.result.nonfinite_update, 0) << where;
        EXPECT_EQ(outcome.result.update_rms, 0) << where;
      }
      if (rows < 2) continue;
      Dense g = RandomNormal(rows, cols, 1);
      for (int64_t j = 0; j < cols; ++j) g(1, j) = 0;
      for (int64_t step = 3; step <= 5; ++step) {
        const Outcome outcome = matrix.Step({WholeGradient(g)}, ArgsOf(rule, 0, step));
        ASSERT_TRUE(AllFinite(outcome.delta)) << where;
        // The metric of polora mixes rows.
        if (rule.family == RuleFamily::kPolora) continue;
        // Shaping adds singular vectors, whose zeros are zero to rounding.
        const Dense delta = ToDense(outcome.delta, rows, cols);
        EXPECT_LE(MaxAbs(Block(delta, 1, 0, 1, cols)), rule.gain == 1 ? 0 : 1e-12 * MaxAbs(delta))
            << where << " step " << step;
      }
    }
  }
}

// Prime and extreme shapes, every preset, against the reference.
TYPED_TEST(NumericsTest, UnusualShapesAgreeWithTheReference) {
  Agreement agreement;
  for (const Rule& rule : EveryPreset()) {
    for (const auto& [rows, cols] :
         {std::pair<int64_t, int64_t>{1, 1}, {13, 29}, {67, 61}, {1031, 3}, {2, 997}}) {
      // A polora of rank 1000 is none.
      if (rule.family == RuleFamily::kPolora && rows * cols > 1000) continue;
      CompareWithReference(this->backend_.get(), rule, rows, cols, 0, 3, 5, &agreement);
    }
  }
  std::cout << "largest error " << agreement.worst << " of the tolerance, at " << agreement.where
            << "\n";
}

TYPED_TEST(NumericsTest, ValuesNearTheEndsOfFp32) {
  const double huge = 3e38, tiny = 1e-37;
  for (const char* preset : {"muon", "periodic_rowwise_muon", "turbo_muon", "normuon", "lion"}) {
    const Rule rule = MakeRule(preset);
    for (double scale : {huge, tiny}) {
      for (const auto& [rows, cols] : {std::pair<int64_t, int64_t>{6, 9}, {9, 6}}) {
        Dense g = RandomNormal(rows, cols, 9);
        g = Rounded(Scaled(scale / MaxAbs(g), g));
        MatrixOnDevice matrix(this->backend_.get(), rule, rows, cols);
        ReferenceRule reference(rule, rows, cols);
        for (int64_t step = 1; step <= 3; ++step) {
          const Outcome outcome = matrix.Step({WholeGradient(g)}, ArgsOf(rule, 0, step));
          const ReferenceStep want = reference.Step(g, ArgsOf(rule, 0, step));
          EXPECT_LE(RelativeError(outcome.delta, want.delta), 2e-5)
              << preset << " " << scale << " step " << step;
          EXPECT_EQ(outcome.result.nonfinite_update + outcome.result.nonfinite_gradient, 0);
        }
      }
    }
  }
  // The mean of two ranks near the end does not overflow on the way.
  const Rule sgd = MakeRule("sgd", {{"lr", "1"}});
  MatrixOnDevice matrix(this->backend_.get(), sgd, 1, 2);
  const HostPiece a{{0, 1, 0, 2}, {3e38, -3e38}, DType::kFp32, 1, 0},
      b{{0, 1, 0, 2}, {3e38, -3e38}, DType::kFp32, 1, 1};
  const Outcome outcome = matrix.Step({{a, b}}, ArgsOf(sgd, 0, 1));
  EXPECT_EQ(outcome.delta[0], -3e38f);
  EXPECT_EQ(outcome.delta[1], 3e38f);
}

// CASES A6: non-finite input is counted whatever the update looks like, and an uncommitted step
// changes nothing.
TYPED_TEST(NumericsTest, NonfiniteGradientsAreCountedAndLeaveNoTrace) {
  const double inf = std::numeric_limits<double>::infinity(),
               nan = std::numeric_limits<double>::quiet_NaN();
  for (const Rule& rule : EveryPreset()) {
    for (bool lazy : {false, true}) {
      MatrixOnDevice matrix(this->backend_.get(), rule, 5, 8),
          untouched(this->backend_.get(), rule, 5, 8);
      const Dense first = RandomNormal(5, 8, 1), last = RandomNormal(5, 8, 3);
      Dense bad = RandomNormal(5, 8, 2);
      bad(0, 0) = inf;
      bad(2, 3) = -inf;
      bad(4, 7) = nan;
      StepOptions options;
      options.lazy = lazy;
      matrix.Step({WholeGradient(first)}, ArgsOf(rule, 0, 1), options);
      const Outcome before = untouched.Step({WholeGradient(first)}, ArgsOf(rule, 0, 1), options);
      options.commit = false;
      const Outcome skipped = matrix.Step({WholeGradient(bad)}, ArgsOf(rule, 0, 2), options);
      EXPECT_EQ(skipped.result.nonfinite_gradient, 3) << DescribeRule(rule);
      for (size_t i = 0; i < before.state.size(); ++i)
        EXPECT_TRUE(SameBits(skipped.state[i], before.state[i]));
      options.commit = true;
      StepArgs args = ArgsOf(rule, 0, 3);
      args.commits = 1;
      const Outcome a = matrix.Step({WholeGradient(last)}, args, options);
      const Outcome b = untouched.Step({WholeGradient(last)}, args, options);
      EXPECT_TRUE(SameBits(a.delta, b.delta)) << DescribeRule(rule);
      EXPECT_TRUE(AllFinite(a.delta)) << DescribeRule(rule);
    }
  }
}

TYPED_TEST(NumericsTest, OverflowOfStateOrOutputIsCounted) {
  // State: v = g^2 does not fit, though m / sqrt(v) would be finite.
  const Rule adamw = MakeRule("adamw");
  MatrixOnDevice adam(this->backend_.get(), adamw, 1, 3);
  const Outcome state = adam.Step({WholeGradient(Dense(1, 3, {1, 1e30, 2}))}, ArgsOf(adamw, 0, 1));
  EXPECT_EQ(state.result.nonfinite_gradient, 0);
  EXPECT_GE(state.result.nonfinite_update, 1);
  // Output: finite in fp32, infinite in the delta's dtype.
  const Rule sgd = MakeRule("sgd", {{"lr", "1"}});
  MatrixOnDevice matrix(this->backend_.get(), sgd, 1, 3);
  StepOptions options;
  options.delta_dtype = DType::kFp16;
  const Outcome half =
      matrix.Step({WholeGradient(Dense(1, 3, {1, 70000, -70000}))}, ArgsOf(sgd, 0, 1), options);
  EXPECT_EQ(half.result.nonfinite_update, 2);
  options.delta_dtype = DType::kBf16;
  const Outcome bf16 =
      matrix.Step({WholeGradient(Dense(1, 3, {1, 3.4e38, -70000}))}, ArgsOf(sgd, 0, 1), options);
  EXPECT_EQ(bf16.result.nonfinite_update, 1);
  options.weights = std::vector<float>{1, 2, 3};
  options.payload_dtype = DType::kFp16;
  const Outcome payload =
      matrix.Step({WholeGradient(Dense(1, 3, {1, 70000, 1}))}, ArgsOf(sgd, 0, 1), options);
  EXPECT_EQ(payload.result.nonfinite_update, 1);
}

// CASES B12: lr 0 never moves.
TYPED_TEST(NumericsTest, ZeroLearningRateMovesNothing) {
  for (const Rule& rule : EveryPreset()) {
    MatrixOnDevice matrix(this->backend_.get(), rule, 4, 6);
    StepArgs args = ArgsOf(rule, 0, 1);
    args.lr = 0;
    args.weight_decay = 0.5;
    StepOptions options;
    options.weights = std::vector<float>(24, 1.25f);
    const Outcome outcome = matrix.Step({WholeGradient(RandomNormal(4, 6, 1))}, args, options);
    EXPECT_EQ(outcome.weights, *options.weights) << DescribeRule(rule);
    EXPECT_GT(outcome.result.update_rms, 0) << DescribeRule(rule);
  }
}

TYPED_TEST(NumericsTest, SpectralNormOfRowWiseStepsIsMeasuredAndCapped) {
  // All rows alike: every row of O is the same vector, so |O|_2 = |O|_F = sqrt(min(rows, cols)).
  const int64_t rows = 20, cols = 50;
  Dense g(rows, cols);
  for (int64_t i = 0; i < rows; ++i) {
    for (int64_t j = 0; j < cols; ++j) g(i, j) = std::cos(static_cast<double>(j));
  }
  const Rule rule = MakeRule("periodic_rowwise_muon", {{"lr", "1"}});
  MatrixOnDevice matrix(this->backend_.get(), rule, rows, cols);
  StepArgs args = ArgsOf(rule, 1, 1);
  ASSERT_EQ(args.kind, StepKind::kOffRefresh);
  const Outcome outcome = matrix.Step({WholeGradient(g)}, args);
  EXPECT_NEAR(outcome.result.row_wise_spectral, std::sqrt(20.0), 1e-5);
  EXPECT_FALSE(outcome.result.newton_schulz);
  EXPECT_EQ(outcome.result.residual, StepResult::kNotMeasured);

  const Rule capped = MakeRule("periodic_rowwise_muon", {{"lr", "1"}, {"row_spectral_max", "1.5"}});
  MatrixOnDevice capped_matrix(this->backend_.get(), capped, rows, cols);
  args.step = 200;  // not one that is measured anyway
  const Outcome capped_outcome = capped_matrix.Step({WholeGradient(g)}, args);
  EXPECT_NEAR(SingularValues(ToDense(capped_outcome.delta, rows, cols))[0], 1.5, 1e-4);
  MatrixOnDevice unmeasured(this->backend_.get(), rule, rows, cols);
  EXPECT_EQ(unmeasured.Step({WholeGradient(g)}, args).result.row_wise_spectral,
            StepResult::kNotMeasured);
}

TYPED_TEST(NumericsTest, ResidualIsThatOfTheOrthogonalisedUpdate) {
  for (const auto& [rows, cols] : {std::pair<int64_t, int64_t>{9, 12}, {12, 9}, {150, 200}}) {
    const Rule rule = MakeRule("muon", {{"lr", "1"}, {"scale", "none"}});
    MatrixOnDevice matrix(this->backend_.get(), rule, rows, cols);
    const Outcome outcome =
        matrix.Step({WholeGradient(RandomNormal(rows, cols, 6))}, ArgsOf(rule, 0, 1));
    Dense o = ToDense(outcome.delta, rows, cols);
    if (rows > cols) o = Transpose(o);
    Dense gram = Multiply(o, Transpose(o));
    for (int64_t i = 0; i < gram.rows; ++i) gram(i, i) -= 1;
    const double exact = FrobeniusNorm(gram) / std::sqrt(static_cast<double>(gram.rows));
    EXPECT_NEAR(outcome.result.residual, exact, (gram.rows <= 16 ? 1e-4 : 0.15) * exact)
        << rows << "x" << cols;
  }
}

TYPED_TEST(NumericsTest, WrongArgumentsAreRefusedWithTheNumbers) {
  const Rule rule = MakeRule("sgd");
  std::unique_ptr<MatrixRule> sgd =
      std::move(MatrixRule::Create(rule, 2, 3, this->backend_.get())).value();
  const std::unique_ptr<Stream> stream = std::move(this->backend_->CreateStream()).value();
  DeviceBuffer workspace = std::move(this->backend_->Allocate(sgd->WorkspaceBytes())).value();
  DeviceBuffer delta = std::move(this->backend_->Allocate(24)).value();
  StepBuffers buffers;
  buffers.delta = delta.data();
  StepResult result;
  const auto message = [&](const StepArgs& args, const StepBuffers& b, DeviceBuffer* w) {
    const absl::Status status = sgd->Compute(stream.get(), {}, args, b, w, &result);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    return std::string(status.message());
  };
  StepArgs args = ArgsOf(rule, 0, 1);
  EXPECT_TRUE(sgd->Compute(stream.get(), {}, args, buffers, &workspace, &result).ok());
  args.lr = std::nan("");
  EXPECT_NE(message(args, buffers, &workspace).find("lr=nan"), std::string::npos);
  args = ArgsOf(rule, 0, 1);
  args.beta = 0.5;
  EXPECT_NE(message(args, buffers, &workspace).find("keeps no momentum"), std::string::npos);
  args = ArgsOf(rule, 0, 1);
  args.step = 0;
  EXPECT_NE(message(args, buffers, &workspace).find("step=0"), std::string::npos);
  DeviceBuffer small = std::move(this->backend_->Allocate(1)).value();
  EXPECT_NE(message(ArgsOf(rule, 0, 1), buffers, &small).find("workspace of 1 bytes"),
            std::string::npos);
  buffers.state.push_back(nullptr);
  EXPECT_NE(message(ArgsOf(rule, 0, 1), buffers, &workspace).find("1 state"), std::string::npos);
  EXPECT_FALSE(MatrixRule::Create(MakeRule("muon"), 0, 3, this->backend_.get()).ok());
}

TYPED_TEST(NumericsTest, AllocationsAreCountedAndRefusedWithTheSizes) {
  const int64_t before = this->backend_->AllocatedBytes();
  {
    DeviceBuffer buffer = std::move(this->backend_->Allocate(1000)).value();
    EXPECT_EQ(reinterpret_cast<uintptr_t>(buffer.data()) % 64, 0u);
    EXPECT_EQ(this->backend_->AllocatedBytes(), before + 1000);
  }
  EXPECT_EQ(this->backend_->AllocatedBytes(), before);
  // CASES D16: ten tebibytes.
  const absl::Status status = this->backend_->Allocate(int64_t{10} << 40).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_NE(status.message().find("10995116277760"), absl::string_view::npos);
  EXPECT_EQ(this->backend_->Allocate(-1).status().code(), absl::StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace stiefel
