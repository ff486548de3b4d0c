#include <cmath>

#include "tests/bench/quality_study/problem.h"
#include "tests/bench/quality_study/small_matrix.h"

namespace stiefel::quality {
namespace {

constexpr int64_t kWidth = 64, kLayers = 4, kBatch = 8;
constexpr double kSmallestDeviation =
    0.1;  // of the inputs' principal directions, the largest being 1
constexpr double kSmallestSingularValue = 0.05;  // of the map to be learnt

class LinearNetwork final : public Problem {
 public:
  explicit LinearNetwork(uint64_t seed) : seed_(seed) {
    std::mt19937_64 random(seed);
    spread_ = ScaleColumns(RandomOrthonormal(kWidth, kWidth, &random),
                           Geometric(kWidth, kSmallestDeviation));
    target_ = MultiplyTransposed(ScaleColumns(RandomOrthonormal(kWidth, kWidth, &random),
                                              Geometric(kWidth, kSmallestSingularValue)),
                                 RandomOrthonormal(kWidth, kWidth, &random));
    for (int64_t layer = 0; layer < kLayers; ++layer) {
      weights_.push_back(RandomNormal(kWidth, kWidth, std::sqrt(1.0 / kWidth), &random));
      gradients_.emplace_back(kWidth, kWidth);
    }
    for (int64_t layer = 0; layer < kLayers; ++layer) {
      arrays_.push_back({"layer" + std::to_string(layer), kWidth, kWidth, true,
                         &weights_[layer].values, &gradients_[layer].values});
    }
  }

  const std::vector<Array>& arrays() const override { return arrays_; }

  void Gradients(int64_t step) override {
    std::mt19937_64 random(seed_ * 1000003 + static_cast<uint64_t>(step));
    // One example a column.
    std::vector<SmallMatrix> activations = {
        Multiply(spread_, RandomNormal(kWidth, kBatch, 1, &random))};
    for (const SmallMatrix& w : weights_) activations.push_back(Multiply(w, activations.back()));
    SmallMatrix error = Difference(activations.back(), Multiply(target_, activations.front()));
    for (float& value : error.values) value /= kBatch;
    for (int64_t layer = kLayers; layer-- > 0;) {
      gradients_[layer].values = MultiplyTransposed(error, activations[layer]).values;
      error = TransposedMultiply(weights_[layer], error);
    }
  }

  // E |(W - A) x|^2 = |(W - A) S|_F^2 for x = S z.
  double Evaluate() override {
    SmallMatrix map = weights_[0];
    for (int64_t layer = 1; layer < kLayers; ++layer) map = Multiply(weights_[layer], map);
    return SumSquares(Multiply(Difference(map, target_), spread_)) /
           SumSquares(Multiply(target_, spread_));
  }

 private:
  const uint64_t seed_;
  SmallMatrix spread_, target_;
  std::vector<SmallMatrix> weights_, gradients_;
  std::vector<Array> arrays_;
};

}  // namespace

ProblemInfo LinearNetworkInfo() {
  return {
      "linear_network",
      "four linear layers of 64 x 64, inputs of condition number 100 (covariance), batches of 8",
      "expected squared error relative to the zero map", 400, 0};
}

std::unique_ptr<Problem> MakeLinearNetwork(uint64_t seed) {
  return std::make_unique<LinearNetwork>(seed);
}

}  // namespace stiefel::quality
