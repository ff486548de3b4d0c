// What the CPU passes share: cutting into blocks, adding up their figures, and the two things done
// to a segment.
#ifndef STIEFEL_KERNELS_CPU_BLOCKS_H_
#define STIEFEL_KERNELS_CPU_BLOCKS_H_

#include <algorithm>
#include <cstdint>

#include "kernels/backend.h"
#include "kernels/cpu/gather.h"
#include "kernels/cpu/scratch.h"
#include "kernels/cpu/segment_kernels.h"
#include "kernels/cpu/thread_pool.h"

namespace stiefel {

// Elements of a block of contiguous elements.
constexpr int64_t kBlockElements = 32 * kSegment;

inline int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Calls body(begin, n) for the segments of [begin, end).
template <typename Body>
void ForSegments(int64_t begin, int64_t end, const Body& body) {
  for (int64_t i = begin; i < end; i += kSegment) body(i, std::min(kSegment, end - i));
}

// Work on so few elements is done before another thread is awake.
constexpr int64_t kInlineElements = 1 << 16;

// Calls body(i) for every i in [0, count), in parallel where there is enough to do: `elements` are
// gone through in all.
template <typename Body>
void ForIndices(ThreadPool* pool, int64_t count, int64_t elements, const Body& body) {
  if (elements <= kInlineElements) {
    for (int64_t i = 0; i < count; ++i) body(i);
  } else {
    pool->ParallelFor(count, [&body](int64_t i) { body(i); });
  }
}

// Outputs of passes over so many elements do not stay in the caches anyway: they are written past
// them, which spares reading what is overwritten.
constexpr int64_t kStreamedElements = 1 << 18;

void AddStats(const StepStats& part, StepStats* total);

// Calls body(block, stats) for every block, as ForIndices, each with figures of its own, and adds
// these in block order to *stats.
template <typename Body>
void ForBlocks(ThreadPool* pool, int64_t blocks, int64_t elements, StepStats* stats,
               const Body& body) {
  auto* parts = static_cast<StepStats*>(
      ThreadScratch(ScratchUse::kFigures, blocks * static_cast<int64_t>(sizeof(StepStats))));
  std::fill_n(parts, blocks, StepStats());
  ForIndices(pool, blocks, elements, [&](int64_t block) { body(block, &parts[block]); });
  for (int64_t i = 0; i < blocks; ++i) AddStats(parts[i], stats);
}

// Reduces the gradient and applies the element rule to one segment after another.
class ElementWorker {
 public:
  explicit ElementWorker(const ElementPass& pass);
  ~ElementWorker() { kernels_.fence(); }

  // Elements [begin, begin + n) of the range of rows; n <= kSegment. u receives the direction, new
  // state goes where the pass says. Returns the sum of squares of u.
  double Run(int64_t begin, int64_t n, float* u, StepStats* stats);
  // Whether Run and Deliver with factor 1 can be done at once, and doing it.
  bool fuses() const { return fuses_; }
  void RunAndDeliver(int64_t begin, int64_t n, StepStats* stats);
  // Delivers o = fp32(factor u).
  void Deliver(int64_t begin, int64_t n, const float* u, double factor, StepStats* stats) const;

 private:
  const ElementPass& pass_;
  const int64_t first_element_;  // of the range, in the gradient
  const bool streaming_, state_streaming_, fuses_;
  const SegmentKernels& kernels_;
  Gatherer gatherer_;
  SegmentCoefficients coefficients_;
  alignas(64) float gradient_[kSegment];
  alignas(64) float zeros_[kSegment];
  alignas(64) float unused_[kMaxStates][kSegment];
};

// Delivers n <= kSegment elements o = fp32(factor u), which lie at `offset` of the matrix.
void DeliverSegment(const Delivery& delivery, int64_t offset, int64_t n, const float* u,
                    double factor, bool streaming, StepStats* stats);

}  // namespace stiefel

#endif  // STIEFEL_KERNELS_CPU_BLOCKS_H_
