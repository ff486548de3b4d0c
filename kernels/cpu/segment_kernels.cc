#include "kernels/cpu/segment_kernels.h"

namespace stiefel {

namespace segment_avx512 {
extern const SegmentKernels kKernels;
}
namespace segment_avx2 {
extern const SegmentKernels kKernels;
}
namespace segment_baseline {
extern const SegmentKernels kKernels;
}

SegmentKernelList RunnableSegmentKernels() {
  SegmentKernelList list = {};
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")) {
    list.sets[list.count++] = &segment_avx512::kKernels;
  }
  if (__builtin_cpu_supports("avx2")) list.sets[list.count++] = &segment_avx2::kKernels;
  list.sets[list.count++] = &segment_baseline::kKernels;
  return list;
}

const SegmentKernels& BestSegmentKernels() {
  static const SegmentKernels* const best = RunnableSegmentKernels().sets[0];
  return *best;
}

}  // namespace stiefel
