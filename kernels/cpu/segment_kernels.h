// The innermost loops: short runs of contiguous elements that are in the first-level cache.
//
// One source (segment_kernels.inc) is compiled for several instruction sets, and the best one
// chosen when the program runs. Elements get the same bits on all, since nothing is contracted into
// fused operations; sums have a fixed number of fp64 lanes per set.
#ifndef STIEFEL_KERNELS_CPU_SEGMENT_KERNELS_H_
#define STIEFEL_KERNELS_CPU_SEGMENT_KERNELS_H_

#include <stdint.h>

namespace stiefel {

// Elements of a segment, at most.
constexpr int64_t kSegment = 1024;

// As ElementCoefficients of kernels/backend.h, in plain C for files compiled with special flags.
struct SegmentCoefficients {
  float clip;
  float m_keep, m_gain, u_momentum, u_gradient;
  float v_keep, v_gain, m_correction, v_correction, eps;
};

struct SegmentSums {
  double sum_squares;
  int64_t nonfinite;
  float max_abs;  // of what is summed; of no meaning for lion and adam
};

// w' = decay w + step u, as deliver and decay round it.
struct SegmentWeights {
  float step, decay;
  const float* w;
  float* new_w;
  bool streaming;  // new_w
};

// In all: n >= 0 elements (at most kSegment where they are counted), no alignment needed, sums are
// added to. An output may be the very input of the same type. `streaming`: new state, delta and
// weights bypass the caches where they are aligned; what another thread is to read needs fence().
struct SegmentKernels {
  const char* name;
  // out = c x
  void (*scale)(float c, const float* x, float* out, int64_t n);
  // out = fp32(c x), the product in fp64
  void (*scale_wide)(double c, const float* x, float* out, int64_t n);
  // out = fp32(c[i] x[i])
  void (*scale_each)(const double* c, const float* x, float* out, int64_t n);
  // sum += x;  sum += c x
  void (*add)(const float* x, float* sum, int64_t n);
  void (*add_scaled)(float c, const float* x, float* sum, int64_t n);
  // out = bf16(alpha x + beta y), y in bf16, or bf16(alpha x) where y is null
  void (*round_bf16)(float alpha, const float* x, float beta, const uint16_t* y, uint16_t* out,
                     int64_t n);
  // Sum of squares, number of non-finite elements, largest absolute value.
  void (*sums)(const float* x, int64_t n, SegmentSums* sums);
  // Number of values whose exponent bits (the mask) are all set.
  int64_t (*count_exponent16)(const uint16_t* x, uint16_t mask, int64_t n);
  // sums += squares of x, element by element;  sums += |x|;  the sum of |x|
  void (*add_squares)(const float* x, double* sums, int64_t n);
  void (*add_abs)(const float* x, double* sums, int64_t n);
  double (*sum_abs)(const float* x, int64_t n);
  // <x, v>;  sum += c x
  double (*dot_wide)(const float* x, const double* v, int64_t n);
  void (*add_scaled_wide)(double c, const float* x, double* sum, int64_t n);
  // delta = step o. sums: squares of o, non-finite elements of delta.
  void (*deliver)(float step, const float* o, float* delta, int64_t n, SegmentSums* sums,
                  bool streaming);
  // The same with o = fp32(factor u), the product in fp64.
  void (*deliver_scaled)(double factor, float step, const float* u, float* delta, int64_t n,
                         SegmentSums* sums, bool streaming);
  // new_w = decay w + delta. sums: non-finite elements of new_w.
  void (*decay)(float decay, const float* w, const float* delta, float* new_w, int64_t n,
                SegmentSums* sums, bool streaming);
  void (*fence)();
  // The element rules of kernels/backend.h. gradient: of g as it is. direction: squares of u (but
  // not of adam, which nobody asks for), and elements where u or new state is not finite.
  void (*momentum)(const SegmentCoefficients& c, const float* g, const float* m, float* new_m,
                   float* u, int64_t n, SegmentSums* gradient, SegmentSums* direction,
                   bool streaming);
  void (*lion)(const SegmentCoefficients& c, const float* g, const float* m, float* new_m, float* u,
               int64_t n, SegmentSums* gradient, SegmentSums* direction, bool streaming);
  void (*adam)(const SegmentCoefficients& c, const float* g, const float* m, const float* v,
               float* new_m, float* new_v, float* u, int64_t n, SegmentSums* gradient,
               SegmentSums* direction, bool streaming);
  // adam, deliver and decay in one loop, with their bits: where memory is the limit, reads, writes
  // and arithmetic overlap best so. direction: elements where new state is not finite. applied:
  // squares of u, and elements where new weights are not finite.
  void (*adam_weights)(const SegmentCoefficients& c, const SegmentWeights& weights, const float* g,
                       const float* m, const float* v, float* new_m, float* new_v, int64_t n,
                       SegmentSums* gradient, SegmentSums* direction, SegmentSums* applied,
                       bool streaming);
};

// The best set for this processor.
const SegmentKernels& BestSegmentKernels();

// Each set that this processor can run, the best first.
struct SegmentKernelList {
  const SegmentKernels* sets[3];
  int count;
};
SegmentKernelList RunnableSegmentKernels();

}  // namespace stiefel

#endif  // STIEFEL_KERNELS_CPU_SEGMENT_KERNELS_H_
