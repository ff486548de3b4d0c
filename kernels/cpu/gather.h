#ifndef STIEFEL_KERNELS_CPU_GATHER_H_
#define STIEFEL_KERNELS_CPU_GATHER_H_

#include <cstdint>

#include "kernels/cpu/segment_kernels.h"
#include "kernels/gradient.h"

namespace stiefel {

// Adds up the gradient of runs of elements, in row-major order of the matrix.
class Gatherer {
 public:
  Gatherer(const GradientPlan& plan, const SegmentKernels& kernels)
      : plan_(plan), kernels_(kernels) {}

  // The n <= kSegment elements from `begin` on, divided by grad_scale: in `buffer`, or where they
  // lie already.
  const float* Gather(int64_t begin, int64_t n, float* buffer);

 private:
  // `n` elements of `span` from (row, col) on; they may run over several rows where every piece is
  // as wide as the matrix.
  void GatherRun(const GradientPlan::Span& span, int64_t row, int64_t col, int64_t n, float* out);
  // Where the run lies in memory as it has to be, or null.
  const float* InPlace(const GradientPlan::Span& span, int64_t row, int64_t col) const;
  void Read(const GradientPlan::Term& term, int64_t row, int64_t col, int64_t n, float* out);

  const GradientPlan& plan_;
  const SegmentKernels& kernels_;
  size_t band_ = 0;  // that was used last
  alignas(64) float group_[kSegment];
  alignas(64) float piece_[kSegment];
};

}  // namespace stiefel

#endif  // STIEFEL_KERNELS_CPU_GATHER_H_
