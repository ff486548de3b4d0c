#define STIEFEL_SEGMENT_SET segment_baseline
#define STIEFEL_SEGMENT_NAME "baseline"
#include "kernels/cpu/segment_kernels.inc"
