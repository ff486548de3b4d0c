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
      kernels_(BestSegmentKernels()),
      gatherer_(*pass.gradient, kernels_) {
  const ElementCoefficients& k = pass.coefficients;
  coefficients_ = {pass.clip_scale, k.m_keep, k.m_gain,       k.u_momentum,   k.u_gradient,
                   k.v_keep,        k.v_gain, k.m_correction, k.v_correction, k.eps};
  std::fill_n(zeros_, kSegment, 0.0f);
}

double ElementWorker::Run(int64_t begin, int64_t n, float* u, StepStats* stats) {
  gatherer_.Gather(first_element_ + begin, n, gradient_);
  SegmentSums gradient = {}, direction = {};

  const float* state[kMaxStates];
  float* new_state[kMaxStates];
  for (int i = 0; i < kMaxStates; ++i) {
    state[i] = pass_.state[i] == nullptr ? zeros_ : pass_.state[i] + begin;
    new_state[i] = pass_.new_state[i] == nullptr ? unused_[i] : pass_.new_state[i] + begin;
  }
  switch (pass_.coefficients.rule) {
    case ElementRule::kMomentum:
      kernels_.momentum(coefficients_, gradient_, state[0], new_state[0], u, n, &gradient,
                        &direction);
      break;
    case ElementRule::kLion:
      kernels_.lion(coefficients_, gradient_, state[0], new_state[0], u, n, &gradient, &direction);
      break;
    case ElementRule::kAdam:
      kernels_.adam(coefficients_, gradient_, state[0], state[1], new_state[0], new_state[1], u, n,
                    &gradient, &direction);
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

void DeliverSegment(const Delivery& delivery, int64_t offset, int64_t n, const float* o,
                    StepStats* stats) {
  const SegmentKernels& kernels = BestSegmentKernels();
  alignas(64) float delta[kSegment];
  SegmentSums applied = {};
  kernels.deliver(delivery.step, o, delta, n, &applied);
  stats->applied_sum_squares += delivery.scale * delivery.scale * applied.sum_squares;
  if (delivery.delta != nullptr) {
    stats->nonfinite_output += WriteAs(delivery.delta_dtype, delta, n, applied.nonfinite,
                                       Offset(delivery.delta, delivery.delta_dtype, offset));
  }
  if (delivery.weights == nullptr) return;
  alignas(64) float local[kSegment];
  float* weights = delivery.new_weights == nullptr ? local : delivery.new_weights + offset;
  SegmentSums decayed = {};
  kernels.decay(delivery.decay, delivery.weights + offset, delta, weights, n, &decayed);
  int64_t nonfinite = decayed.nonfinite;
  if (delivery.payload != nullptr) {
    nonfinite = WriteAs(delivery.payload_dtype, weights, n, nonfinite,
                        Offset(delivery.payload, delivery.payload_dtype, offset));
  }
  stats->nonfinite_output += nonfinite;
}

}  // namespace stiefel
