// The gradient of a view in fp64, element by element.
#ifndef STIEFEL_KERNELS_REFERENCE_REFERENCE_GRADIENT_H_
#define STIEFEL_KERNELS_REFERENCE_REFERENCE_GRADIENT_H_

#include <cstdint>

#include "kernels/gradient.h"
#include "kernels/reference/dense.h"

namespace stiefel {

// REQUIRES: a valid view of a rows x cols gradient; data readable by the host.
Dense ReferenceGradient(const GradientView& view, int64_t rows, int64_t cols);

}  // namespace stiefel

#endif  // STIEFEL_KERNELS_REFERENCE_REFERENCE_GRADIENT_H_
