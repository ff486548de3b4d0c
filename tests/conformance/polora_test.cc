// PoLoRA's coupled pair over several steps, each factor with its own state.
#include <cmath>
#include <iostream>
#include <memory>
#include <string>

#include "gtest/gtest.h"
#include "tests/conformance/backend_fixture.h"
#include "tests/conformance/differential.h"
#include "tests/model/scale.h"

namespace stiefel {
namespace {

template <typename T>
using PoloraTest = ConformanceTest<T>;
TYPED_TEST_SUITE(PoloraTest, BackendsUnderTest);

constexpr double kEta = 0.05;

// A (r x d_in) and B (d_out x r) on a device.
class PairOnDevice {
 public:
  PairOnDevice(Backend* backend, double product_scale, Dense a, Dense b)
      : rule_a_(MakeRule("polora", {{"factor", "a"},
                                    {"lr", std::to_string(kEta)},
                                    {"product_scale", std::to_string(product_scale)}})),
        rule_b_(rule_a_),
        a_(std::move(a)),
        b_(std::move(b)) {
    rule_b_.factor = PoloraFactor::kB;
    on_device_a_ = std::make_unique<MatrixOnDevice>(backend, rule_a_, a_.rows, a_.cols,
                                                    std::make_pair(b_.rows, b_.cols));
    on_device_b_ = std::make_unique<MatrixOnDevice>(backend, rule_b_, b_.rows, b_.cols,
                                                    std::make_pair(a_.rows, a_.cols));
    for (const StateBuffer& buffer : on_device_a_->rule().State())
      state_a_.emplace_back(buffer.rows, buffer.cols);
    for (const StateBuffer& buffer : on_device_b_->rule().State())
      state_b_.emplace_back(buffer.rows, buffer.cols);
  }

  // Both factors' steps, each from what was before either.
  void Step(const Dense& gradient_a, const Dense& gradient_b, int64_t step) {
    StepOptions options_a, options_b;
    options_a.pair = PairOnHost{a_, b_, state_b_};
    options_b.pair = PairOnHost{b_, a_, state_a_};
    const Outcome a =
        on_device_a_->Step({WholeGradient(gradient_a)}, ArgsOf(rule_a_, 0, step), options_a);
    const Outcome b =
        on_device_b_->Step({WholeGradient(gradient_b)}, ArgsOf(rule_b_, 0, step), options_b);
    ASSERT_TRUE(AllFinite(a.delta) && AllFinite(b.delta)) << "step " << step;
    EXPECT_EQ(a.result.nonfinite_update + b.result.nonfinite_update, 0);
    delta_a = ToDense(a.delta, a_.rows, a_.cols);
    delta_b = ToDense(b.delta, b_.rows, b_.cols);
    // |B dA + dB A|_2, before the step is taken.
    product_step = SpectralNorm(Combine(1, Multiply(b_, delta_a), 1, Multiply(delta_b, a_)));
    a_ = Rounded(Combine(1, a_, 1, delta_a));
    b_ = Rounded(Combine(1, b_, 1, delta_b));
    for (size_t i = 0; i < state_a_.size(); ++i) {
      state_a_[i].values.assign(a.state[i].begin(), a.state[i].end());
      state_b_[i].values.assign(b.state[i].begin(), b.state[i].end());
    }
  }

  Dense delta_a, delta_b;
  double product_step = 0;
  const std::vector<Dense>& state_a() const { return state_a_; }

 private:
  Rule rule_a_, rule_b_;
  Dense a_, b_;
  std::vector<Dense> state_a_, state_b_;
  std::unique_ptr<MatrixOnDevice> on_device_a_, on_device_b_;
};

TYPED_TEST(PoloraTest, TheProductMovesByAtMostEta) {
  const int64_t pairs = model::Scaled(20, 400);
  double largest = 0;
  for (int64_t i = 0; i < pairs; ++i) {
    const int64_t rank = 1 + i % 16, d_in = 1 + (i * 37) % 90, d_out = 1 + (i * 53) % 70;
    const double product_scale = i % 3 == 0 ? 1 : i % 3 == 1 ? 2.5 : 0.25;
    PairOnDevice pair(this->backend_.get(), product_scale, Rounded(RandomNormal(rank, d_in, 1 + i)),
                      Rounded(RandomNormal(d_out, rank, 2 + i)));
    for (int64_t step = 1; step <= 4; ++step) {
      const uint64_t seed = static_cast<uint64_t>(100 * i + step);
      pair.Step(RandomNormal(rank, d_in, seed), RandomNormal(d_out, rank, seed + 50), step);
      if (this->HasFatalFailure()) return;
      const std::string where = "rank " + std::to_string(rank) + ", " + std::to_string(d_out) +
                                "x" + std::to_string(d_in) + " step " + std::to_string(step);
      EXPECT_LE(product_scale * pair.product_step, kEta * (1 + 1e-5)) << where;
      EXPECT_GT(pair.product_step, 0) << where;
      largest = std::max(largest, product_scale * pair.product_step / kEta);
    }
  }
  std::cout << pairs << " pairs, 4 steps each; largest product step " << largest << " eta\n";
}

// The standard start. A has nothing to hold on to until B has moved: it waits, and its q with it.
TYPED_TEST(PoloraTest, FromAZeroFactorNothingIsEverNotANumber) {
  for (const auto& [rank, d_in, d_out] :
       {std::tuple<int64_t, int64_t, int64_t>{1, 1, 1}, {4, 30, 20}, {8, 5, 64}}) {
    PairOnDevice pair(this->backend_.get(), 1, Rounded(RandomNormal(rank, d_in, 3)),
                      Dense(d_out, rank));
    for (int64_t step = 1; step <= 4; ++step) {
      const uint64_t seed = static_cast<uint64_t>(step);
      // A's gradient is B^T times that of the product: zero in the first step too.
      pair.Step(step == 1 ? Dense(rank, d_in) : RandomNormal(rank, d_in, seed),
                RandomNormal(d_out, rank, seed + 50), step);
      if (this->HasFatalFailure()) return;
      EXPECT_EQ(MaxAbs(pair.delta_a) > 0, step > 1) << step;
      EXPECT_GT(MaxAbs(pair.delta_b), 0) << step;
      EXPECT_LE(pair.product_step, kEta * (1 + 1e-5)) << step;
      if (step == 1) {
        // Unchanged, however the start of 1e-12 is kept.
        EXPECT_LE(MaxAbs(pair.state_a()[1]), 1.000001e-12);
      }
    }
  }
}

// Both zero, and zero gradients: no direction, no step.
TYPED_TEST(PoloraTest, WithoutADirectionThereIsNoStep) {
  PairOnDevice zeros(this->backend_.get(), 1, Dense(3, 7), Dense(6, 3));
  zeros.Step(RandomNormal(3, 7, 1), RandomNormal(6, 3, 2), 1);
  EXPECT_EQ(MaxAbs(zeros.delta_a), 0);
  EXPECT_EQ(MaxAbs(zeros.delta_b), 0);
  PairOnDevice still(this->backend_.get(), 1, RandomNormal(3, 7, 3), RandomNormal(6, 3, 4));
  still.Step(Dense(3, 7), Dense(6, 3), 1);
  EXPECT_EQ(MaxAbs(still.delta_a), 0);
  EXPECT_EQ(MaxAbs(still.delta_b), 0);
}

}  // namespace
}  // namespace stiefel
