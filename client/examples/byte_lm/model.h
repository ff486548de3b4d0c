#ifndef STIEFEL_CLIENT_EXAMPLES_BYTE_LM_MODEL_H_
#define STIEFEL_CLIENT_EXAMPLES_BYTE_LM_MODEL_H_

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "client/examples/byte_lm/gemm.h"

namespace stiefel::byte_lm {

struct ModelShape {
  int64_t context = 16;    // bytes that are seen
  int64_t embedding = 32;  // values per byte
  int64_t hidden = 512;    // width of both hidden layers
};

// One trainable array: rows x cols, row-major; vectors have one row.
struct ModelParameter {
  std::string name;
  int64_t rows = 0;
  int64_t cols = 0;
  bool is_vector = false;
  // A matrix inside the network, as opposed to embedding, output layer and biases.
  bool is_hidden = false;
  std::vector<float> weights;
  std::vector<float> gradients;
};

// A byte-level language model:
//   x = concatenated embeddings of the last `context` bytes
//   h1 = relu(W1 x + b1)^2,  h2 = h1 + relu(W2 h1 + b2)^2,  p = softmax(W3 h2 + b3) over 256 bytes
// with hand-written gradients in fp32, for one thread. Thread-compatible.
class ByteModel {
 public:
  static constexpr int64_t kVocabulary = 256;

  // Random weights that depend on `seed` alone. REQUIRES: sizes >= 1.
  ByteModel(const ModelShape& shape, uint64_t seed);

  // In the order embedding, hidden1.weight, hidden1.bias, hidden2.weight, hidden2.bias,
  // output.weight, output.bias.
  std::vector<ModelParameter>& parameters() { return parameters_; }
  const std::vector<ModelParameter>& parameters() const { return parameters_; }

  // Mean loss in nats of `count` examples. contexts holds count x context bytes, targets count.
  double Loss(const uint8_t* contexts, const uint8_t* targets, int64_t count);

  // The same, and writes the gradient of that mean into every parameter. on_gradient(i) is called
  // when the gradient of parameter i is final, in the order of the backward pass (last layer
  // first), so that it can travel while the rest is computed.
  double LossAndGradients(const uint8_t* contexts, const uint8_t* targets, int64_t count,
                          const std::function<void(int)>& on_gradient);

  // XXH3 of all weights, in the order of parameters().
  uint64_t WeightsHash() const;

 private:
  // Fills the activations; returns the sum of the losses. probabilities_ then holds the softmax.
  double Forward(const uint8_t* contexts, const uint8_t* targets, int64_t count);
  void LinearForward(int layer, int64_t count, const std::vector<float>& in, float* out);
  // Gradients of the weights and bias of `layer` from d_out; d_in = d_out W, added to what is there
  // with `accumulate`.
  void LinearBackward(int layer, int64_t count, const std::vector<float>& in,
                      const std::vector<float>& d_out, bool accumulate, std::vector<float>* d_in);

  const ModelShape shape_;
  std::vector<ModelParameter> parameters_;
  Gemm gemm_;
  // Activations and their gradients, count rows each.
  std::vector<float> x_, z1_, h1_, z2_, h2_, probabilities_;
  std::vector<float> d_x_, d_h1_, d_z2_, d_h2_;
};

}  // namespace stiefel::byte_lm

#endif  // STIEFEL_CLIENT_EXAMPLES_BYTE_LM_MODEL_H_
