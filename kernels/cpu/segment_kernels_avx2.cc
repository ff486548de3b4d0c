#define STIEFEL_SEGMENT_SET segment_avx2
#define STIEFEL_SEGMENT_NAME "avx2"
#define STIEFEL_VECTOR_BYTES 32
#include "kernels/cpu/segment_kernels.inc"
