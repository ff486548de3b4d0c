#include "kernels/rules/polora_rule.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/cpu/cpu_backend.h"
#include "kernels/reference/reference_rule.h"

namespace stiefel {
namespace {

using Values = std::vector<float>;

Values Narrow(const Dense& a) { return {a.values.begin(), a.values.end()}; }

Dense Widened(const Values& x, int64_t rows, int64_t cols) {
  return Dense(rows, cols, std::vector<double>(x.begin(), x.end()));
}

Rule PoloraOptions(const std::string& pair, std::vector<std::pair<std::string, std::string>> set) {
  Rule rule = PresetRule("polora").value();
  set.emplace_back("pair", pair);
  for (const auto& [key, value] : set) EXPECT_TRUE(SetOption(rule, key, value).ok()) << key;
  return rule;
}

// One factor with its state, on the CPU backend and in the reference.
struct Factor {
  Factor(const Rule& rule, int64_t rows, int64_t cols, std::pair<int64_t, int64_t> partner,
         Backend* backend, const Dense& start)
      : rows(rows),
        cols(cols),
        rule(MatrixRule::Create(rule, rows, cols, backend, partner).value()),
        workspace(backend->Allocate(this->rule->WorkspaceBytes()).value()),
        weights(Narrow(start)),
        reference(rule, rows, cols),
        exact(Widened(weights, rows, cols)) {
    for (const StateBuffer& buffer : this->rule->State()) {
      state.emplace_back(buffer.rows * buffer.cols);
    }
  }

  int64_t rows, cols;
  std::unique_ptr<MatrixRule> rule;
  DeviceBuffer workspace;
  Values weights;
  std::vector<Values> state;
  ReferenceRule reference;
  Dense exact;  // the reference's weights
};

// What a step of one factor gives, before it is committed.
struct Staged {
  Values delta, weights;
  std::vector<Values> state;
  StepResult result;
};

class Pair {
 public:
  Pair(int64_t d_out, int64_t rank, int64_t d_in, int threads, const Dense& a, const Dense& b,
       std::vector<std::pair<std::string, std::string>> options = {})
      : backend_(CreateCpuBackend(threads).value()), stream_(backend_->CreateStream().value()) {
    auto with = [&](const char* factor) {
      auto set = options;
      set.emplace_back("factor", factor);
      return set;
    };
    a_ = std::make_unique<Factor>(PoloraOptions("b", with("a")), rank, d_in,
                                  std::make_pair(d_out, rank), backend_.get(), a);
    b_ = std::make_unique<Factor>(PoloraOptions("a", with("b")), d_out, rank,
                                  std::make_pair(rank, d_in), backend_.get(), b);
  }

  Factor& a() { return *a_; }
  Factor& b() { return *b_; }

  Staged Compute(Factor* own, const Factor& other, const Values& gradient, const StepArgs& args) {
    Staged staged;
    staged.delta.resize(own->weights.size());
    staged.weights.resize(own->weights.size());
    staged.state = own->state;
    StepBuffers buffers;
    for (Values& s : own->state) buffers.state.push_back(s.data());
    for (Values& s : staged.state) buffers.staged_state.push_back(s.data());
    for (const Values& s : other.state) buffers.partner_state.push_back(s.data());
    buffers.partner_weights = other.weights.data();
    buffers.weights = own->weights.data();
    buffers.staged_weights = staged.weights.data();
    buffers.delta = staged.delta.data();
    GradientView view;
    view.pieces.emplace_back();
    view.pieces[0].rect = {0, own->rows, 0, own->cols};
    view.pieces[0].data = gradient.data();
    EXPECT_TRUE(
        own->rule->Compute(stream_.get(), view, args, buffers, &own->workspace, &staged.result)
            .ok());
    EXPECT_TRUE(stream_->Synchronize().ok());
    return staged;
  }

  // Both factors from what was before the step; then committed.
  std::pair<Staged, Staged> Step(const Values& ga, const Values& gb, const StepArgs& args) {
    Staged a = Compute(a_.get(), *b_, ga, args), b = Compute(b_.get(), *a_, gb, args);
    a_->weights = a.weights;
    a_->state = a.state;
    b_->weights = b.weights;
    b_->state = b.state;
    return {std::move(a), std::move(b)};
  }

  // The same in fp64; the deltas.
  std::pair<Dense, Dense> ReferenceStepOf(const Values& ga, const Values& gb,
                                          const StepArgs& args) {
    const std::vector<Dense> state_a = a_->reference.state(), state_b = b_->reference.state();
    const ReferencePair of_a{a_->exact, b_->exact, state_b}, of_b{b_->exact, a_->exact, state_a};
    const ReferenceStep a = a_->reference.Step(Widened(ga, a_->rows, a_->cols), args, &of_a);
    const ReferenceStep b = b_->reference.Step(Widened(gb, b_->rows, b_->cols), args, &of_b);
    a_->exact = ReferenceRule::Apply(a_->exact, a, args);
    b_->exact = ReferenceRule::Apply(b_->exact, b, args);
    return {a.delta, b.delta};
  }

 private:
  std::unique_ptr<Backend> backend_;
  std::unique_ptr<Stream> stream_;
  std::unique_ptr<Factor> a_, b_;
};

StepArgs Args(int64_t step) {
  StepArgs args;
  args.step = step;
  args.commits = step - 1;
  args.lr = 0.02;
  return args;
}

double LargestDifference(const Values& x, const Dense& y) {
  return MaxAbs(Combine(1, Widened(x, y.rows, y.cols), -1, y)) / MaxAbs(y);
}

struct Shape {
  int64_t d_out, rank, d_in;
};

TEST(PoloraRuleTest, StepsOfBothFactorsAgreeWithTheReference) {
  int cases = 0;
  for (const Shape& s : {Shape{12, 4, 20}, {9, 1, 7}, {30, 16, 24}, {100, 33, 70}, {5, 8, 40}}) {
    Pair pair(s.d_out, s.rank, s.d_in, 2, RandomNormal(s.rank, s.d_in, 10 + cases),
              RandomNormal(s.d_out, s.rank, 20 + cases), {{"product_scale", "2"}});
    for (int64_t step = 1; step <= 4; ++step) {
      const Values ga = Narrow(RandomNormal(s.rank, s.d_in, 100 * ++cases)),
                   gb = Narrow(RandomNormal(s.d_out, s.rank, 100 * cases + 1));
      const auto [a, b] = pair.Step(ga, gb, Args(step));
      const auto [wanted_a, wanted_b] = pair.ReferenceStepOf(ga, gb, Args(step));
      EXPECT_LE(LargestDifference(a.delta, wanted_a), 2e-5) << s.rank << " step " << step;
      EXPECT_LE(LargestDifference(b.delta, wanted_b), 2e-5) << s.rank << " step " << step;
      EXPECT_TRUE(a.result.newton_schulz);
    }
    const Dense q = pair.a().reference.state()[1], p = pair.b().reference.state()[1];
    EXPECT_LE(LargestDifference(pair.a().state[1], q), 1e-4);
    EXPECT_LE(LargestDifference(pair.b().state[1], p), 1e-4);
  }
}

// c |B dA + dB A|_2 <= eta, what the method promises, whatever the factors look like.
TEST(PoloraRuleTest, TheProductMovesByTheLearningRateAtMost) {
  int cases = 0;
  double closest = 0;
  for (double c : {0.5, 16.0}) {
    for (double size_a : {1e-3, 1.0}) {
      for (int64_t rank : {1, 3, 20}) {
        const Shape s{31, rank, 45};
        // The last rows of A are nearly dependent on the first.
        Dense a = Scaled(size_a, RandomNormal(rank, s.d_in, 1 + cases));
        for (int64_t j = 0; rank > 2 && j < s.d_in; ++j) a(2, j) = 1e-4 * a(2, j) + a(0, j);
        Pair pair(s.d_out, rank, s.d_in, 2, a, RandomNormal(s.d_out, rank, 50 + cases),
                  {{"product_scale", std::to_string(c)}});
        for (int64_t step = 1; step <= 3; ++step) {
          ++cases;
          const Dense before_a = Widened(pair.a().weights, rank, s.d_in),
                      before_b = Widened(pair.b().weights, s.d_out, rank);
          const auto [da, db] =
              pair.Step(Narrow(RandomNormal(rank, s.d_in, 7 * cases)),
                        Narrow(RandomNormal(s.d_out, rank, 9 * cases)), Args(step));
          const Dense moved = Combine(c, Multiply(before_b, Widened(da.delta, rank, s.d_in)), c,
                                      Multiply(Widened(db.delta, s.d_out, rank), before_a));
          const double ratio = SpectralNorm(moved) / Args(step).lr;
          EXPECT_LE(ratio, 1);
          closest = std::max(closest, ratio);
        }
      }
    }
  }
  EXPECT_GT(closest, 0.3);  // and that is not because it hardly moves
  RecordProperty("cases", cases);
}

TEST(PoloraRuleTest, FromBZeroOnlyBMovesFirstAndNothingIsEverNan) {
  const Shape s{18, 4, 26};
  const Dense a = RandomNormal(s.rank, s.d_in, 3);
  Pair pair(s.d_out, s.rank, s.d_in, 2, a, Dense(s.d_out, s.rank));
  for (int64_t step = 1; step <= 5; ++step) {
    const Dense before_b = Widened(pair.b().weights, s.d_out, s.rank);
    // The gradients of a loss in B A: dA = B^T G, dB = G A^T.
    const Dense g = RandomNormal(s.d_out, s.d_in, 60 + step);
    const Dense ga = Multiply(Transpose(before_b), g),
                gb = Multiply(g, Transpose(Widened(pair.a().weights, s.rank, s.d_in)));
    const auto [da, db] = pair.Step(Narrow(ga), Narrow(gb), Args(step));
    if (step == 1) {
      EXPECT_EQ(da.delta, Values(s.rank * s.d_in));
      EXPECT_EQ(da.weights, Narrow(a));
      EXPECT_EQ(da.state[1], Values(s.d_in));  // q
    } else {
      EXPECT_GT(MaxAbs(Widened(da.delta, s.rank, s.d_in)), 0);
    }
    EXPECT_GT(MaxAbs(Widened(db.delta, s.d_out, s.rank)), 0);
    for (const Staged* staged : {&da, &db}) {
      EXPECT_EQ(staged->result.nonfinite_update, 0);
      for (float v : staged->weights) ASSERT_TRUE(std::isfinite(v));
      for (float v : staged->state[1]) ASSERT_TRUE(std::isfinite(v) && v >= 0);
    }
  }
}

TEST(PoloraRuleTest, AGradientOfZerosMovesNeitherWeightsNorVariance) {
  Pair pair(8, 3, 9, 1, RandomNormal(3, 9, 1), RandomNormal(8, 3, 2));
  const Values before = pair.a().weights;
  const auto [a, b] = pair.Step(Values(27), Values(24), Args(1));
  EXPECT_EQ(a.weights, before);
  EXPECT_EQ(a.state[1], Values(9));
  EXPECT_EQ(b.state[1], Values(8));
  EXPECT_EQ(a.result.update_rms, 0);
}

TEST(PoloraRuleTest, AGradientThatIsNotFiniteIsCounted) {
  Pair pair(8, 3, 9, 1, RandomNormal(3, 9, 1), RandomNormal(8, 3, 2));
  Values gradient = Narrow(RandomNormal(3, 9, 5));
  gradient[4] = std::numeric_limits<float>::quiet_NaN();
  gradient[7] = std::numeric_limits<float>::infinity();
  const Staged staged = pair.Compute(&pair.a(), pair.b(), gradient, Args(1));
  EXPECT_EQ(staged.result.nonfinite_gradient, 2);
}

TEST(PoloraRuleTest, SameBitsOnAnyNumberOfThreads) {
  const Shape s{700, 40, 900};
  std::vector<Values> weights;
  for (int threads : {1, 3}) {
    Pair pair(s.d_out, s.rank, s.d_in, threads, RandomNormal(s.rank, s.d_in, 1),
              RandomNormal(s.d_out, s.rank, 2));
    for (int64_t step = 1; step <= 2; ++step) {
      pair.Step(Narrow(RandomNormal(s.rank, s.d_in, 10 + step)),
                Narrow(RandomNormal(s.d_out, s.rank, 20 + step)), Args(step));
    }
    weights.push_back(pair.a().weights);
    weights.push_back(pair.b().weights);
  }
  EXPECT_EQ(weights[0], weights[2]);
  EXPECT_EQ(weights[1], weights[3]);
}

TEST(PoloraRuleTest, AMatrixWithoutPartnerOrWithOneOfAnotherRankIsRefused) {
  std::unique_ptr<Backend> backend = CreateCpuBackend(1).value();
  const Rule rule = PoloraOptions("b", {});
  const auto alone = MatrixRule::Create(rule, 4, 20, backend.get());
  EXPECT_EQ(alone.status().code(), absl::StatusCode::kInvalidArgument);
  const auto other = MatrixRule::Create(rule, 4, 20, backend.get(), std::make_pair(30, 5));
  EXPECT_EQ(other.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_NE(std::string(other.status().message()).find("must be d_out x 4"), std::string::npos)
      << other.status();
}

}  // namespace
}  // namespace stiefel
