#define STIEFEL_SEGMENT_SET segment_baseline
#define STIEFEL_SEGMENT_NAME "baseline"
#define STIEFEL_VECTOR_BYTES 16
#include "kernels/cpu/segment_kernels.inc"
