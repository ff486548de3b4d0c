#include "kernels/cpu/blocks.h"

#include <vector>

namespace stiefel {
namespace {

int64_t CountNonfiniteDelivered(const SegmentKernels& kernels, const void* values, DType dtype,
                                int64_t n) {
  switch (dtype) {
    case DType::kFp32: {
      SegmentSums sums = {};
      kernels.sums(static_cast<const float*>(values), n, &sums);
      return sums.nonfinite;
    }
    case DType::kBf16:
      return kernels.count_exponent16(static_cast<const uint16_t*>(values), 0x7F80, n);
    case DType::kFp16:
      return kernels.count_exponent16(static_cast<const uint16_t*>(values), 0x7C00, n);
  }
  return 0;
}

void* Offset(void* base, DType dtype, int64_t elements) {
  return static_cast<char*>(base) + elements * DTypeSize(dtype);
}

void AddStats(const StepStats& part, StepStats* total) {
  total->gradient_sum_squares += part.gradient_sum_squares;
  total->direction_sum_squares += part.direction_sum_squares;
  total->applied_sum_squares += part.applied_sum_squares;
  total->nonfinite_gradient += part.nonfinite_gradient;
  total->nonfinite_direction += part.nonfinite_direction;
  total->nonfinite_output += part.nonfinite_output;
}

}  // namespace

void ForBlocks(ThreadPool* pool, int64_t blocks, StepStats* stats,
               const std::function<void(int64_t block, StepStats* block_stats)>& body) {
  std::vector<StepStats> parts(blocks);
  pool->ParallelFor(blocks, [&](int64_t block) { body(block, &parts[block]); });
  if (stats == nullptr) return;
  for (const StepStats& part : parts) AddStats(part, stats);
}

ElementWorker::ElementWorker(const ElementPass& pass)
    : pass_(pass), kernels_(BestSegmentKernels()), gatherer_(*pass.gradient, kernels_) {
  const ElementCoefficients& k = pass.coefficients;
  coefficients_ = {pass.clip_scale, k.m_keep, k.m_gain,       k.u_momentum,   k.u_gradient,
                   k.v_keep,        k.v_gain, k.m_correction, k.v_correction, k.eps};
  std::fill_n(zeros_, kSegment, 0.0f);
}

void ElementWorker::Run(int64_t begin, int64_t n, float* u, StepStats* stats) {
  gatherer_.Gather(begin, n, gradient_);
  SegmentSums gradient = {}, direction = {};
  kernels_.sums(gradient_, n, &gradient);

  const float* state[kMaxStates];
  float* new_state[kMaxStates];
  for (int i = 0; i < kMaxStates; ++i) {
    state[i] = pass_.state[i] == nullptr ? zeros_ : pass_.state[i] + begin;
    new_state[i] = pass_.new_state[i] == nullptr ? unused_[i] : pass_.new_state[i] + begin;
  }
  switch (pass_.coefficients.rule) {
    case ElementRule::kMomentum:
      kernels_.momentum(coefficients_, gradient_, state[0], new_state[0], u, n, &direction);
      break;
    case ElementRule::kLion:
      kernels_.lion(coefficients_, gradient_, state[0], new_state[0], u, n, &direction);
      break;
    case ElementRule::kAdam:
      kernels_.adam(coefficients_, gradient_, state[0], state[1], new_state[0], new_state[1], u, n,
                    &direction);
      break;
  }
  stats->gradient_sum_squares += gradient.sum_squares;
  stats->nonfinite_gradient += gradient.nonfinite;
  stats->direction_sum_squares += direction.sum_squares;
  stats->nonfinite_direction += direction.nonfinite;
}

void DeliverSegment(const Delivery& delivery, int64_t offset, int64_t n, const float* o,
                    StepStats* stats) {
  const SegmentKernels& kernels = BestSegmentKernels();
  SegmentSums applied = {};
  kernels.sums(o, n, &applied);
  stats->applied_sum_squares += applied.sum_squares;

  alignas(64) float delta[kSegment];
  kernels.scale(delivery.step, o, delta, n);
  if (delivery.delta != nullptr) {
    void* out = Offset(delivery.delta, delivery.delta_dtype, offset);
    Convert(delta, DType::kFp32, out, delivery.delta_dtype, n);
    stats->nonfinite_output += CountNonfiniteDelivered(kernels, out, delivery.delta_dtype, n);
  }
  if (delivery.weights != nullptr) {
    alignas(64) float local[kSegment];
    float* weights = delivery.new_weights == nullptr ? local : delivery.new_weights + offset;
    kernels.scale_add(delivery.decay, delivery.weights + offset, delta, weights, n);
    int64_t nonfinite = CountNonfiniteDelivered(kernels, weights, DType::kFp32, n);
    if (delivery.payload != nullptr) {
      void* out = Offset(delivery.payload, delivery.payload_dtype, offset);
      Convert(weights, DType::kFp32, out, delivery.payload_dtype, n);
      nonfinite =
          std::max(nonfinite, CountNonfiniteDelivered(kernels, out, delivery.payload_dtype, n));
    }
    stats->nonfinite_output += nonfinite;
  }
}

}  // namespace stiefel
