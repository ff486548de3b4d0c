#include "kernels/cpu/blocks.h"

#include <algorithm>
#include <cstring>

namespace stiefel {
namespace {

// values as `dtype` to `out`; returns how many are not finite there, where `nonfinite` are as fp32.
int64_t WriteAs(DType dtype, const float* values, int64_t n, int64_t nonfinite, void* out) {
  const SegmentKernels& kernels = BestSegmentKernels();
  switch (dtype) {
    case DType::kFp32:
      std::memcpy(out, values, n * sizeof(float));
      return nonfinite;
    case DType::kBf16:
      kernels.round_bf16(1, values, 0, nullptr, static_cast<uint16_t*>(out), n);
      return kernels.count_exponent16(static_cast<const uint16_t*>(out), 0x7F80, n);
    case DType::kFp16:
      Convert(values, DType::kFp32, out, DType::kFp16, n);
      return kernels.count_exponent16(static_cast<const uint16_t*>(out), 0x7C00, n);
  }
  return nonfinite;
}

void* Offset(void* base, DType dtype, int64_t elements) {
  return static_cast<char*>(base) + elements * DTypeSize(dtype);
}

}  // namespace

void AddStats(const StepStats& part, StepStats* total) {
  total->gradient_sum_squares += part.gradient_sum_squares;
  total->direction.sum_squares += part.direction.sum_squares;
  total->direction.max_abs = std::max(total->direction.max_abs, part.direction.max_abs);
  total->direction.nonfinite += part.direction.nonfinite;
  total->applied_sum_squares += part.applied_sum_squares;
  total->nonfinite_gradient += part.nonfinite_gradient;
  total->nonfinite_output += part.nonfinite_output;
  total->residual = std::max(total->residual, part.residual);
  total->spectral_norm = std::max(total->spectral_norm, part.spectral_norm);
}

ElementWorker::ElementWorker(const ElementPass& pass)
    : pass_(pass),
      first_element_(pass.first_row * pass.gradient->cols()),
      streaming_(pass.rows * pass.gradient->cols() >= kStreamedElements),
      state_streaming_(streaming_ && pass.new_state[0] != nullptr &&
                       pass.new_state[0] != pass.state[0]),
      fuses_(pass.deliver && pass.coefficients.rule == ElementRule::kAdam &&
             pass.new_state[0] != nullptr && pass.delivery.delta == nullptr &&
             pass.delivery.weights != nullptr && pass.delivery.new_weights != nullptr),
      kernels_(BestSegmentKernels()),
      gatherer_(*pass.gradient, kernels_) {
  const ElementCoefficients& k = pass.coefficients;
  coefficients_ = {pass.clip_scale, k.m_keep, k.m_gain,       k.u_momentum,   k.u_gradient,
                   k.v_keep,        k.v_gain, k.m_correction, k.v_correction, k.eps};
  std::fill_n(zeros_, kSegment, 0.0f);
}

double ElementWorker::Run(int64_t begin, int64_t n, float* u, StepStats* stats) {
  const float* g = gatherer_.Gather(first_element_ + begin, n, gradient_);
  SegmentSums gradient = {}, direction = {};

  const float* state[kMaxStates];
  float* new_state[kMaxStates];
  for (int i = 0; i < kMaxStates; ++i) {
    state[i] = pass_.state[i] == nullptr ? zeros_ : pass_.state[i] + begin;
    new_state[i] = pass_.new_state[i] == nullptr ? unused_[i] : pass_.new_state[i] + begin;
  }
  switch (pass_.coefficients.rule) {
    case ElementRule::kMomentum:
      kernels_.momentum(coefficients_, g, state[0], new_state[0], u, n, &gradient, &direction,
                        state_streaming_);
      break;
    case ElementRule::kLion:
      kernels_.lion(coefficients_, g, state[0], new_state[0], u, n, &gradient, &direction,
                    state_streaming_);
      break;
    case ElementRule::kAdam:
      kernels_.adam(coefficients_, g, state[0], state[1], new_state[0], new_state[1], u, n,
                    &gradient, &direction, state_streaming_);
      break;
  }
  stats->gradient_sum_squares += gradient.sum_squares;
  stats->nonfinite_gradient += gradient.nonfinite;
  stats->direction.sum_squares += direction.sum_squares;
  stats->direction.max_abs =
      std::max(stats->direction.max_abs, static_cast<double>(direction.max_abs));
  stats->direction.nonfinite += direction.nonfinite;
  return direction.sum_squares;
}

void ElementWorker::RunAndDeliver(int64_t begin, int64_t n, StepStats* stats) {
  const Delivery& delivery = pass_.delivery;
  const float* g = gatherer_.Gather(first_element_ + begin, n, gradient_);
  const SegmentWeights weights = {delivery.step, delivery.decay, delivery.weights + begin,
                                  delivery.new_weights + begin, delivery.payload == nullptr};
  SegmentSums gradient = {}, direction = {}, applied = {};
  kernels_.adam_weights(coefficients_, weights, g, pass_.state[0] + begin, pass_.state[1] + begin,
                        pass_.new_state[0] + begin, pass_.new_state[1] + begin, n, &gradient,
                        &direction, &applied, state_streaming_);
  stats->gradient_sum_squares += gradient.sum_squares;
  stats->nonfinite_gradient += gradient.nonfinite;
  stats->direction.nonfinite += direction.nonfinite;
  stats->applied_sum_squares += delivery.scale * delivery.scale * applied.sum_squares;
  stats->nonfinite_output +=
      delivery.payload == nullptr
          ? applied.nonfinite
          : WriteAs(delivery.payload_dtype, weights.new_w, n, applied.nonfinite,
                    Offset(delivery.payload, delivery.payload_dtype, begin));
}

void ElementWorker::Deliver(int64_t begin, int64_t n, const float* u, double factor,
                            StepStats* stats) const {
  DeliverSegment(pass_.delivery, begin, n, u, factor, streaming_, stats);
}

void DeliverSegment(const Delivery& delivery, int64_t offset, int64_t n, const float* u,
                    double factor, bool streaming, StepStats* stats) {
  const SegmentKernels& kernels = BestSegmentKernels();
  alignas(64) float local_delta[kSegment];
  const bool in_place = delivery.delta != nullptr && delivery.delta_dtype == DType::kFp32;
  float* delta = in_place ? static_cast<float*>(delivery.delta) + offset : local_delta;
  SegmentSums applied = {};
  const bool stream_delta = streaming && in_place && delivery.weights == nullptr;
  if (factor == 1) {
    kernels.deliver(delivery.step, u, delta, n, &applied, stream_delta);
  } else {
    kernels.deliver_scaled(factor, delivery.step, u, delta, n, &applied, stream_delta);
  }
  stats->applied_sum_squares += delivery.scale * delivery.scale * applied.sum_squares;
  if (in_place) {
    stats->nonfinite_output += applied.nonfinite;
  } else if (delivery.delta != nullptr) {
    stats->nonfinite_output += WriteAs(delivery.delta_dtype, delta, n, applied.nonfinite,
                                       Offset(delivery.delta, delivery.delta_dtype, offset));
  }
  if (delivery.weights == nullptr) return;
  alignas(64) float local[kSegment];
  float* weights = delivery.new_weights == nullptr ? local : delivery.new_weights + offset;
  SegmentSums decayed = {};
  kernels.decay(delivery.decay, delivery.weights + offset, delta, weights, n, &decayed,
                streaming && delivery.new_weights != nullptr && delivery.payload == nullptr);
  int64_t nonfinite = decayed.nonfinite;
  if (delivery.payload != nullptr) {
    nonfinite = WriteAs(delivery.payload_dtype, weights, n, nonfinite,
                        Offset(delivery.payload, delivery.payload_dtype, offset));
  }
  stats->nonfinite_output += nonfinite;
}

}  // namespace stiefel
