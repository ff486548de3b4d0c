#ifndef STIEFEL_CLIENT_EXAMPLES_BYTE_LM_LEARNING_RATE_H_
#define STIEFEL_CLIENT_EXAMPLES_BYTE_LM_LEARNING_RATE_H_

#include <algorithm>
#include <cstdint>

namespace stiefel::byte_lm {

// Factor of the peak learning rate at `step` of 1..steps: linear warm-up over the first 20 steps
// (but at most a tenth of all), then constant, then linear to zero over the last four fifths.
inline double LearningRateFactor(int64_t step, int64_t steps) {
  const double warmup = std::clamp<double>(static_cast<double>(steps) / 10, 1, 20);
  const double left = static_cast<double>(steps - step + 1) / (0.8 * static_cast<double>(steps));
  return std::min({1.0, static_cast<double>(step) / warmup, left});
}

}  // namespace stiefel::byte_lm

#endif  // STIEFEL_CLIENT_EXAMPLES_BYTE_LM_LEARNING_RATE_H_
