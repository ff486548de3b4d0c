#include "client/examples/byte_lm/model.h"

#include <cmath>
#include <random>

#include "gtest/gtest.h"

namespace stiefel::byte_lm {
namespace {

struct Batch {
  std::vector<uint8_t> contexts;
  std::vector<uint8_t> targets;
  int64_t count;
};

Batch RandomBatch(int64_t context, int64_t count) {
  std::mt19937 rng(3);
  Batch batch{std::vector<uint8_t>(context * count), std::vector<uint8_t>(count), count};
  for (uint8_t& byte : batch.contexts) byte = rng() % 7;  // few bytes, so that they repeat
  for (uint8_t& byte : batch.targets) byte = rng() % 256;
  return batch;
}

// Along a random direction d of each parameter the central difference of the loss must be
// <gradient, d>.
TEST(ByteModelTest, GradientsAgreeWithDifferencesOfTheLoss) {
  ByteModel model({3, 5, 11}, 1);
  const Batch batch = RandomBatch(3, 9);
  std::mt19937 rng(5);
  std::normal_distribution<float> normal;
  // Biases away from zero, and a larger output layer, so that every term has a weight in the loss.
  for (ModelParameter& parameter : model.parameters()) {
    if (parameter.is_vector || parameter.name == "output.weight") {
      for (float& weight : parameter.weights) weight = 0.3f * normal(rng);
    }
  }
  model.LossAndGradients(batch.contexts.data(), batch.targets.data(), batch.count, [](int) {});
  for (ModelParameter& parameter : model.parameters()) {
    const std::vector<float> gradients = parameter.gradients, weights = parameter.weights;
    for (int trial = 0; trial < 4; ++trial) {
      std::vector<float> direction(weights.size());
      double norm = 0, expected = 0;
      for (float& value : direction) {
        value = normal(rng);
        norm += value * value;
      }
      const double step = 1e-2 / std::sqrt(norm);
      const auto loss_at = [&](double distance) {
        for (size_t i = 0; i < weights.size(); ++i) {
          parameter.weights[i] = static_cast<float>(weights[i] + distance * direction[i]);
        }
        return model.Loss(batch.contexts.data(), batch.targets.data(), batch.count);
      };
      const double difference = (loss_at(step) - loss_at(-step)) / (2 * step);
      parameter.weights = weights;
      double gradient_norm = 0;
      for (size_t i = 0; i < weights.size(); ++i) {
        expected += static_cast<double>(gradients[i]) * direction[i];
        gradient_norm += static_cast<double>(gradients[i]) * gradients[i];
      }
      ASSERT_GT(gradient_norm, 0) << parameter.name;
      // A relative error, and the rounding of the loss (about 1e-6) over the step.
      const double typical = std::sqrt(gradient_norm * norm / weights.size());
      EXPECT_NEAR(difference, expected, 2e-3 * typical + 2e-4 * std::sqrt(norm)) << parameter.name;
    }
  }
}

TEST(ByteModelTest, GradientsArriveLastLayerFirstAndAreFinal) {
  ByteModel model({2, 4, 8}, 1);
  const Batch batch = RandomBatch(2, 6);
  std::vector<int> order;
  std::vector<std::vector<float>> seen(model.parameters().size());
  model.LossAndGradients(batch.contexts.data(), batch.targets.data(), batch.count, [&](int i) {
    order.push_back(i);
    seen[i] = model.parameters()[i].gradients;
  });
  EXPECT_EQ(order, (std::vector<int>{5, 6, 3, 4, 1, 2, 0}));
  for (size_t i = 0; i < seen.size(); ++i) EXPECT_EQ(seen[i], model.parameters()[i].gradients);
}

TEST(ByteModelTest, FreshModelIsNearUniform) {
  ByteModel model({}, 1);
  const Batch batch = RandomBatch(16, 64);
  EXPECT_NEAR(model.Loss(batch.contexts.data(), batch.targets.data(), batch.count) / std::log(2), 8,
              0.2);
}

TEST(ByteModelTest, WeightsDependOnTheSeedAlone) {
  EXPECT_EQ(ByteModel({2, 4, 8}, 1).WeightsHash(), ByteModel({2, 4, 8}, 1).WeightsHash());
  EXPECT_NE(ByteModel({2, 4, 8}, 1).WeightsHash(), ByteModel({2, 4, 8}, 2).WeightsHash());
}

// A mean over a batch is the mean of the means of its halves: what splitting over trainers relies
// on.
TEST(ByteModelTest, GradientOfABatchIsTheMeanOfItsHalves) {
  ByteModel model({2, 4, 8}, 1);
  const Batch batch = RandomBatch(2, 10);
  const auto gradients = [&](int64_t first, int64_t count) {
    std::vector<float> all;
    model.LossAndGradients(&batch.contexts[first * 2], &batch.targets[first], count, [](int) {});
    for (const ModelParameter& p : model.parameters()) {
      all.insert(all.end(), p.gradients.begin(), p.gradients.end());
    }
    return all;
  };
  const std::vector<float> whole = gradients(0, 10), low = gradients(0, 5), high = gradients(5, 5);
  for (size_t i = 0; i < whole.size(); ++i) {
    ASSERT_NEAR(whole[i], (low[i] + high[i]) / 2, 1e-6) << i;
  }
}

}  // namespace
}  // namespace stiefel::byte_lm
