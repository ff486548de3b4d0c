#define STIEFEL_SEGMENT_SET segment_avx512
#define STIEFEL_SEGMENT_NAME "avx512"
#define STIEFEL_VECTOR_BYTES 64
#include "kernels/cpu/segment_kernels.inc"
