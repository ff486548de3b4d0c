#include <cmath>
#include <utility>

#include "client/examples/byte_lm/model.h"
#include "client/examples/byte_lm/text.h"
#include "common/status.h"
#include "tests/bench/quality_study/problem.h"

namespace stiefel::quality {
namespace {

constexpr byte_lm::ModelShape kShape = {8, 16, 128};
constexpr int64_t kBatch = 64;
constexpr int64_t kHeldOut = 8192;  // examples, at most

class ByteLm final : public Problem {
 public:
  ByteLm(byte_lm::Text text, uint64_t seed)
      : text_(std::move(text)), model_(kShape, seed), seed_(seed) {
    for (byte_lm::ModelParameter& p : model_.parameters()) {
      arrays_.push_back({p.name, p.rows, p.cols, p.is_hidden, &p.weights, &p.gradients});
    }
  }

  const std::vector<Array>& arrays() const override { return arrays_; }

  void Gradients(int64_t step) override {
    const byte_lm::Examples batch = text_.TrainingBatch(seed_, step, kBatch, 0, 1);
    model_.LossAndGradients(batch.contexts.data(), batch.targets.data(), batch.count, [](int) {});
  }

  double Evaluate() override {
    const byte_lm::Examples held_out = text_.HeldOut(0, std::min(kHeldOut, text_.held_out_count()));
    return model_.Loss(held_out.contexts.data(), held_out.targets.data(), held_out.count) /
           std::log(2.0);
  }

 private:
  const byte_lm::Text text_;
  byte_lm::ByteModel model_;
  const uint64_t seed_;
  std::vector<Array> arrays_;
};

}  // namespace

ProblemInfo ByteLmInfo() {
  return {"byte_lm",
          "byte-level language model, two hidden layers of 128, King James text, batches of 64",
          "bits per byte on held-out text", 400, 3e-3};
}

absl::StatusOr<std::unique_ptr<Problem>> MakeByteLm(const std::string& text, uint64_t seed) {
  STIEFEL_ASSIGN_OR_RETURN(byte_lm::Text loaded, byte_lm::Text::Load(text, kShape.context));
  return std::make_unique<ByteLm>(std::move(loaded), seed);
}

}  // namespace stiefel::quality
