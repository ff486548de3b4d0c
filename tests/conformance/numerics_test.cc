// Where numbers go wrong: scales, ends of the range, empty rows, non-finite input; and where bits
// must not change.
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <thread>

#include "gtest/gtest.h"
#include "tests/conformance/backend_fixture.h"

namespace stiefel {
namespace {

template <typename T>
using NumericsTest = ConformanceTest<T>;
TYPED_TEST_SUITE(NumericsTest, BackendsUnderTest);

bool SameBits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

bool AllFinite(const std::vector<float>& values) {
  for (float v : values) {
    if (!std::isfinite(v)) return false;
  }
  return true;
}

// Normal numbers whose products with 2^-100 are normal too.
Dense Moderate(int64_t rows, int64_t cols, uint64_t seed) {
  Dense g = RandomNormal(rows, cols, seed);
  for (double& v : g.values) v = static_cast<float>(v + std::copysign(0.01, v));
  return g;
}

// CASES A1. Refresh and row-wise, both axes, several steps of momentum.
TYPED_TEST(NumericsTest, PowersOfTwoDoNotChangeABit) {
  const Rule rules[] = {MakeRule("muon"), MakeRule("periodic_rowwise_muon"),
                        MakeRule("periodic_rowwise_muon", {{"row_axis", "cols"}}),
                        MakeRule("periodic_rowwise_muon", {{"row_spectral_max", "1.1"}}),
                        MakeRule("muon", {{"form", "gram"}})};
  for (const Rule& rule : rules) {
    for (const auto& [rows, cols] : {std::pair<int64_t, int64_t>{12, 30}, {30, 12}}) {
      std::vector<std::vector<float>> plain;
      for (int k = -100; k <= 100; ++k) {
        // k = -100 stands for 2^0 first.
        const double scale = k == -100 ? 1 : std::ldexp(1.0, k == 0 ? -100 : k);
        MatrixOnDevice matrix(this->backend_.get(), rule, rows, cols);
        for (int64_t step = 1; step <= 3; ++step) {
          Dense g = Moderate(rows, cols, step);
          g = Combine(scale, g, 0, g);
          const Outcome outcome = matrix.Step({WholeGradient(g)}, ArgsOf(rule, 0, step));
          if (k == -100) {
            plain.push_back(outcome.delta);
          } else {
            ASSERT_TRUE(SameBits(outcome.delta, plain[step - 1]))
                << DescribeRule(rule) << " 2^" << k << " step " << step;
          }
        }
      }
    }
  }
}

// CASES A3, A4, A31: nothing is divided by zero, and zero rows stay zero.
TYPED_TEST(NumericsTest, ZeroMatricesAndZeroRowsGiveZero) {
  for (const PresetInfo& info : Presets()) {
    const Rule rule = MakeRule(std::string(info.name));
    for (const auto& [rows, cols] :
         {std::pair<int64_t, int64_t>{1, 1}, {1, 7}, {7, 1}, {6, 9}, {9, 6}}) {
      MatrixOnDevice matrix(this->backend_.get(), rule, rows, cols);
      for (int64_t step = 1; step <= 2; ++step) {
        const Outcome outcome =
            matrix.Step({WholeGradient(Dense(rows, cols))}, ArgsOf(rule, 0, step));
        for (float v : outcome.delta) ASSERT_EQ(v, 0) << info.name << " " << rows << "x" << cols;
        EXPECT_EQ(outcome.result.nonfinite_update, 0);
        EXPECT_EQ(outcome.result.update_rms, 0);
      }
      if (rows < 2) continue;
      Dense g = RandomNormal(rows, cols, 1);
      for (int64_t j = 0; j < cols; ++j) g(1, j) = 0;
      for (int64_t step = 3; step <= 5; ++step) {
        const Outcome outcome = matrix.Step({WholeGradient(g)}, ArgsOf(rule, 0, step));
        ASSERT_TRUE(AllFinite(outcome.delta)) << info.name;
        for (int64_t j = 0; j < cols; ++j)
          EXPECT_EQ(outcome.delta[cols + j], 0) << info.name << " step " << step;
      }
    }
  }
}

// CASES A31: rank one and 1 x n end at exactly f(1), primes and very tall shapes are right.
TYPED_TEST(NumericsTest, RankOneEndsAtTheScalarMapOfOne) {
  const Rule rule = MakeRule("muon", {{"scale", "none"}, {"lr", "1"}});
  for (const auto& [rows, cols] :
       {std::pair<int64_t, int64_t>{1, 11}, {11, 1}, {1, 1}, {13, 29}, {5003, 7}, {101, 103}}) {
    const Dense u = RandomNormal(rows, 1, 2), v = RandomNormal(1, cols, 3);
    Dense g = Multiply(u, v);
    MatrixOnDevice matrix(this->backend_.get(), rule, rows, cols);
    const Outcome outcome = matrix.Step({WholeGradient(g)}, ArgsOf(rule, 0, 1));
    const Dense want =
        Combine(-0.6964364094697522 / (FrobeniusNorm(u) * FrobeniusNorm(v)), g, 0, g);
    // The rounding of the gradient itself to fp32 has a null space that the map amplifies 485-fold.
    EXPECT_LE(RelativeError(outcome.delta, want), 3e-4) << rows << "x" << cols;
  }
}

TYPED_TEST(NumericsTest, ValuesNearTheEndsOfFp32) {
  const double huge = 3e38, tiny = 1e-37;
  for (const char* preset : {"muon", "periodic_rowwise_muon", "lion"}) {
    const Rule rule = MakeRule(preset);
    for (double scale : {huge, tiny}) {
      for (const auto& [rows, cols] : {std::pair<int64_t, int64_t>{6, 9}, {9, 6}}) {
        Dense g = RandomNormal(rows, cols, 9);
        g = Combine(scale / MaxAbs(g), g, 0, g);
        MatrixOnDevice matrix(this->backend_.get(), rule, rows, cols);
        ReferenceRule reference(rule, rows, cols);
        for (int64_t step = 1; step <= 3; ++step) {
          const Outcome outcome = matrix.Step({WholeGradient(g)}, ArgsOf(rule, 0, step));
          const ReferenceStep want = reference.Step(
              ToDense(std::vector<float>(g.values.begin(), g.values.end()), rows, cols),
              ArgsOf(rule, 0, step));
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
  for (const PresetInfo& info : Presets()) {
    const Rule rule = MakeRule(std::string(info.name));
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
      EXPECT_EQ(skipped.result.nonfinite_gradient, 3) << info.name;
      for (size_t i = 0; i < before.state.size(); ++i)
        EXPECT_TRUE(SameBits(skipped.state[i], before.state[i]));
      options.commit = true;
      StepArgs args = ArgsOf(rule, 0, 3);
      args.commits = 1;
      const Outcome a = matrix.Step({WholeGradient(last)}, args, options);
      const Outcome b = untouched.Step({WholeGradient(last)}, args, options);
      EXPECT_TRUE(SameBits(a.delta, b.delta)) << info.name;
      EXPECT_TRUE(AllFinite(a.delta)) << info.name;
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

std::vector<Rule> BitIdentityRules() {
  std::vector<Rule> rules;
  for (const PresetInfo& info : Presets()) rules.push_back(MakeRule(std::string(info.name)));
  rules.push_back(MakeRule("periodic_rowwise_muon", {{"row_axis", "cols"}}));
  rules.push_back(MakeRule("periodic_rowwise_muon", {{"row_spectral_max", "0.9"}}));
  rules.push_back(MakeRule("muon", {{"form", "gram"}}));
  return rules;
}

// Large enough for several blocks of every kind; two steps, refresh and row-wise.
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

void ExpectSame(const std::vector<Outcome>& a, const std::vector<Outcome>& b,
                const std::string& where) {
  for (size_t i = 0; i < a.size(); ++i) {
    EXPECT_TRUE(SameBits(a[i].delta, b[i].delta)) << where << " step " << i + 1;
    for (size_t s = 0; s < a[i].state.size(); ++s)
      EXPECT_TRUE(SameBits(a[i].state[s], b[i].state[s])) << where;
    EXPECT_EQ(a[i].result.sum_squares, b[i].result.sum_squares) << where;
    EXPECT_EQ(a[i].result.update_rms, b[i].result.update_rms) << where;
    EXPECT_EQ(a[i].result.residual, b[i].result.residual) << where;
    EXPECT_EQ(a[i].result.row_wise_spectral, b[i].result.row_wise_spectral) << where;
  }
}

TYPED_TEST(NumericsTest, ThreadsLazyStagingAndAlignmentDoNotChangeABit) {
  const std::unique_ptr<Backend> one = this->MakeBackend(1), three = this->MakeBackend(3);
  for (const Rule& rule : BitIdentityRules()) {
    for (const auto& [rows, cols] : {std::pair<int64_t, int64_t>{230, 611}, {611, 230}}) {
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
}

// CASES A25: whoever else uses the device at the time.
TYPED_TEST(NumericsTest, OtherMatricesOnTheDeviceDoNotChangeABit) {
  const Rule rule = MakeRule("periodic_rowwise_muon");
  const std::vector<std::pair<int64_t, int64_t>> shapes = {
      {230, 611}, {300, 200}, {64, 64}, {611, 230}};
  std::vector<std::vector<Outcome>> alone;
  for (const auto& [rows, cols] : shapes)
    alone.push_back(RunTwoSteps(this->backend_.get(), rule, rows, cols, {}));
  std::vector<std::vector<Outcome>> together(shapes.size());
  std::vector<std::thread> threads;
  for (size_t i = 0; i < shapes.size(); ++i) {
    threads.emplace_back([&, i] {
      for (int repeat = 0; repeat < 3; ++repeat) {
        together[i] =
            RunTwoSteps(this->backend_.get(), rule, shapes[i].first, shapes[i].second, {});
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (size_t i = 0; i < shapes.size(); ++i) ExpectSame(together[i], alone[i], std::to_string(i));
}

// The layout of the pieces is no part of the mathematics.
TYPED_TEST(NumericsTest, PieceLayoutsDoNotChangeABit) {
  for (const char* preset : {"muon", "periodic_rowwise_muon", "adamw"}) {
    const Rule rule = MakeRule(preset);
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
    for (const std::vector<Outcome>& outcome : outcomes) ExpectSame(outcome, outcomes[0], preset);
  }
}

TYPED_TEST(NumericsTest, DeltaAndWeightsModesAgreeToTheBit) {
  for (const char* preset : {"muon_torch", "periodic_rowwise_muon", "adamw"}) {
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

// CASES B12: lr 0 never moves.
TYPED_TEST(NumericsTest, ZeroLearningRateMovesNothing) {
  for (const PresetInfo& info : Presets()) {
    const Rule rule = MakeRule(std::string(info.name));
    MatrixOnDevice matrix(this->backend_.get(), rule, 4, 6);
    StepArgs args = ArgsOf(rule, 0, 1);
    args.lr = 0;
    args.weight_decay = 0.5;
    StepOptions options;
    options.weights = std::vector<float>(24, 1.25f);
    const Outcome outcome = matrix.Step({WholeGradient(RandomNormal(4, 6, 1))}, args, options);
    EXPECT_EQ(outcome.weights, *options.weights) << info.name;
    EXPECT_GT(outcome.result.update_rms, 0) << info.name;
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
