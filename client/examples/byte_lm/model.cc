#include "client/examples/byte_lm/model.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <random>
#include <utility>

#include "common/checksum.h"

namespace stiefel::byte_lm {
namespace {

// Positions in parameters(): the weight of a layer is followed by its bias.
constexpr int kEmbedding = 0;
constexpr int kHidden1 = 1;
constexpr int kHidden2 = 3;
constexpr int kOutput = 5;

// N(0, stddev^2) from the generator's raw bits, so that the weights are the same with every
// standard library.
void FillNormal(float stddev, std::mt19937_64* rng, std::vector<float>* out) {
  for (float& value : *out) {
    const double u = (static_cast<double>((*rng)() >> 11) + 0.5) * 0x1p-53;
    const double v = static_cast<double>((*rng)() >> 11) * 0x1p-53;
    value = static_cast<float>(stddev * std::sqrt(-2 * std::log(u)) * std::cos(2 * M_PI * v));
  }
}

ModelParameter Matrix(std::string name, int64_t rows, int64_t cols, bool is_hidden, float stddev,
                      std::mt19937_64* rng) {
  ModelParameter parameter{std::move(name), rows, cols, false, is_hidden, {}, {}};
  parameter.weights.resize(rows * cols);
  parameter.gradients.resize(rows * cols);
  FillNormal(stddev, rng, &parameter.weights);
  return parameter;
}

ModelParameter Bias(std::string name, int64_t size) {
  return {std::move(name),         1, size, true, false, std::vector<float>(size),
          std::vector<float>(size)};
}

// h = relu(z)^2.
void SquaredRelu(const std::vector<float>& z, std::vector<float>* h) {
  for (size_t i = 0; i < z.size(); ++i) {
    const float positive = std::max(z[i], 0.0f);
    (*h)[i] = positive * positive;
  }
}

// dz = dh * 2 relu(z). dz may be dh.
void SquaredReluBackward(const std::vector<float>& z, const std::vector<float>& dh,
                         std::vector<float>* dz) {
  for (size_t i = 0; i < z.size(); ++i) (*dz)[i] = 2 * std::max(z[i], 0.0f) * dh[i];
}

// Turns a row of logits into probabilities; returns -log p[target].
double SoftmaxLoss(float* row, int target) {
  const float largest = *std::max_element(row, row + ByteModel::kVocabulary);
  double sum = 0;
  const double of_target = static_cast<double>(row[target]) - largest;
  for (int64_t j = 0; j < ByteModel::kVocabulary; ++j) {
    row[j] = std::exp(row[j] - largest);
    sum += row[j];
  }
  const float inverse = static_cast<float>(1 / sum);
  for (int64_t j = 0; j < ByteModel::kVocabulary; ++j) row[j] *= inverse;
  return std::log(sum) - of_target;
}

}  // namespace

ByteModel::ByteModel(const ModelShape& shape, uint64_t seed) : shape_(shape) {
  std::mt19937_64 rng(seed);
  const int64_t in = shape.context * shape.embedding, hidden = shape.hidden;
  const auto scaled = [](double gain, int64_t fan_in) {
    return static_cast<float>(gain / std::sqrt(static_cast<double>(fan_in)));
  };
  parameters_.push_back(Matrix("embedding", kVocabulary, shape.embedding, false, 1.0f, &rng));
  parameters_.push_back(Matrix("hidden1.weight", hidden, in, true, scaled(1, in), &rng));
  parameters_.push_back(Bias("hidden1.bias", hidden));
  parameters_.push_back(Matrix("hidden2.weight", hidden, hidden, true, scaled(1, hidden), &rng));
  parameters_.push_back(Bias("hidden2.bias", hidden));
  parameters_.push_back(
      Matrix("output.weight", kVocabulary, hidden, false, scaled(0.1, hidden), &rng));
  parameters_.push_back(Bias("output.bias", kVocabulary));
}

double ByteModel::Loss(const uint8_t* contexts, const uint8_t* targets, int64_t count) {
  return Forward(contexts, targets, count) / count;
}

double ByteModel::Forward(const uint8_t* contexts, const uint8_t* targets, int64_t count) {
  const int64_t width = shape_.embedding, hidden = shape_.hidden;
  x_.resize(count * shape_.context * width);
  for (std::vector<float>* activation : {&z1_, &h1_, &z2_, &h2_}) {
    activation->resize(count * hidden);
  }
  probabilities_.resize(count * kVocabulary);
  const float* table = parameters_[kEmbedding].weights.data();
  for (int64_t i = 0; i < count * shape_.context; ++i) {
    std::memcpy(&x_[i * width], table + contexts[i] * width, width * sizeof(float));
  }
  LinearForward(kHidden1, count, x_, z1_.data());
  SquaredRelu(z1_, &h1_);
  LinearForward(kHidden2, count, h1_, z2_.data());
  SquaredRelu(z2_, &h2_);
  for (size_t i = 0; i < h2_.size(); ++i) h2_[i] += h1_[i];
  LinearForward(kOutput, count, h2_, probabilities_.data());
  double sum = 0;
  for (int64_t i = 0; i < count; ++i) {
    sum += SoftmaxLoss(&probabilities_[i * kVocabulary], targets[i]);
  }
  return sum;
}

void ByteModel::LinearForward(int layer, int64_t count, const std::vector<float>& in, float* out) {
  const ModelParameter& weight = parameters_[layer];
  const std::vector<float>& bias = parameters_[layer + 1].weights;
  for (int64_t i = 0; i < count; ++i) {
    std::copy(bias.begin(), bias.end(), out + i * weight.rows);
  }
  gemm_.Multiply(count, weight.rows, weight.cols, RowMajor(in.data(), weight.cols),
                 RowMajor(weight.weights.data(), weight.cols).Transposed(), true, out);
}

void ByteModel::LinearBackward(int layer, int64_t count, const std::vector<float>& in,
                               const std::vector<float>& d_out, bool accumulate,
                               std::vector<float>* d_in) {
  ModelParameter& weight = parameters_[layer];
  ModelParameter& bias = parameters_[layer + 1];
  const MatrixView out_view = RowMajor(d_out.data(), weight.rows);
  gemm_.Multiply(weight.rows, weight.cols, count, out_view.Transposed(),
                 RowMajor(in.data(), weight.cols), false, weight.gradients.data());
  std::fill(bias.gradients.begin(), bias.gradients.end(), 0.0f);
  for (int64_t i = 0; i < count; ++i) {
    for (int64_t j = 0; j < weight.rows; ++j) bias.gradients[j] += d_out[i * weight.rows + j];
  }
  gemm_.Multiply(count, weight.cols, weight.rows, out_view,
                 RowMajor(weight.weights.data(), weight.cols), accumulate, d_in->data());
}

double ByteModel::LossAndGradients(const uint8_t* contexts, const uint8_t* targets, int64_t count,
                                   const std::function<void(int)>& on_gradient) {
  const double loss = Forward(contexts, targets, count) / count;
  d_x_.resize(x_.size());
  d_h1_.resize(h1_.size());
  d_z2_.resize(z2_.size());
  d_h2_.resize(h2_.size());
  const auto report = [&on_gradient](int layer) {
    on_gradient(layer);
    on_gradient(layer + 1);
  };

  // d logits = (p - onehot) / count, in place.
  for (int64_t i = 0; i < count; ++i) probabilities_[i * kVocabulary + targets[i]] -= 1;
  const float scale = 1.0f / static_cast<float>(count);
  for (float& value : probabilities_) value *= scale;
  LinearBackward(kOutput, count, h2_, probabilities_, false, &d_h2_);
  report(kOutput);

  // h2 = h1 + relu(z2)^2: h1 gets the gradient of h2 directly and through z2.
  SquaredReluBackward(z2_, d_h2_, &d_z2_);
  d_h1_ = d_h2_;
  LinearBackward(kHidden2, count, h1_, d_z2_, true, &d_h1_);
  report(kHidden2);

  SquaredReluBackward(z1_, d_h1_, &d_h1_);
  LinearBackward(kHidden1, count, x_, d_h1_, false, &d_x_);
  report(kHidden1);

  ModelParameter& embedding = parameters_[kEmbedding];
  std::fill(embedding.gradients.begin(), embedding.gradients.end(), 0.0f);
  for (int64_t i = 0; i < count * shape_.context; ++i) {
    float* row = &embedding.gradients[contexts[i] * shape_.embedding];
    for (int64_t j = 0; j < shape_.embedding; ++j) row[j] += d_x_[i * shape_.embedding + j];
  }
  on_gradient(kEmbedding);
  return loss;
}

uint64_t ByteModel::WeightsHash() const {
  Hash64 hash;
  for (const ModelParameter& parameter : parameters_) {
    hash.Update(parameter.weights.data(), parameter.weights.size() * sizeof(float));
  }
  return hash.Digest();
}

}  // namespace stiefel::byte_lm
