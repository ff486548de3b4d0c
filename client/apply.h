// Taking an update into the caller's weights, in one pass.
#ifndef STIEFEL_CLIENT_APPLY_H_
#define STIEFEL_CLIENT_APPLY_H_

#include <cstdint>

#include "absl/status/status.h"
#include "client/tensor.h"
#include "common/dtype.h"

namespace stiefel {

// The generator of stochastic rounding: a pure function of the counter, so that the result does not
// depend on threads or order (splitmix64).
inline uint64_t MixBits(uint64_t counter) {
  counter += 0x9E3779B97F4A7C15u;
  counter = (counter ^ (counter >> 30)) * 0xBF58476D1CE4E5B9u;
  counter = (counter ^ (counter >> 27)) * 0x94D049BB133111EBu;
  return counter ^ (counter >> 31);
}

// Rounds to one of the two bf16 neighbours, up with the probability of the distance, by 16 random
// bits. Infinities, NaN and exact values stay.
uint16_t StochasticBf16(float value, uint32_t random_bits);

// w = decay w + delta, elementwise in fp32, for fp32 weights. `delta` is row-major of `dtype`.
// REQUIRES: `weights` was checked as a view of fp32.
void ApplyDelta(const void* delta, DType dtype, float decay, const Walk& weights);

// The same for bf16 weights, rounded stochastically; element [i, j] takes the random bits of number
// n = first + i row_stride + j, from MixBits(seed + n / 4).
void ApplyDeltaBf16(const void* delta, DType dtype, float decay, uint64_t seed, int64_t first,
                    int64_t row_stride, const Walk& weights);

// w = source, converted. `source` is row-major of `dtype`.
void CopyWeights(const void* source, DType dtype, const Walk& weights);

}  // namespace stiefel

#endif  // STIEFEL_CLIENT_APPLY_H_
