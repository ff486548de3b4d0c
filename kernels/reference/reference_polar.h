// Stage 4 of the pipeline in fp64: preconditioning and the Newton-Schulz iteration of
// docs/mathematics.md section 2, whole or tile by tile.
#ifndef STIEFEL_KERNELS_REFERENCE_REFERENCE_POLAR_H_
#define STIEFEL_KERNELS_REFERENCE_REFERENCE_POLAR_H_

#include <cstdint>
#include <vector>

#include "common/rect.h"
#include "kernels/reference/dense.h"
#include "plan/rule.h"

namespace stiefel {

// X0 of the iteration for a `u` with rows <= cols, with the rule's normalise and eps: u / |u|_F, or
// diag(s) u with AOL's s. A matrix (with AOL also a row) of zeros stays zero.
Dense ReferencePreconditioned(const Rule& rule, const Dense& u);

// X0 through the rule's iterations in the standard form, which is what every step of the reference
// runs. A tall `u` is transposed before and after.
Dense ReferencePolar(const Rule& rule, const Dense& u);

// The same in the Gram form with the rule's restarts for fp32: equal but for rounding.
Dense ReferenceGramPolar(const Rule& rule, const Dense& u);

// What is orthogonalised on its own: a split, or a tile of it.
struct ReferenceUnit {
  Rect rect;   // of the matrix; of U[S] where rows or columns are selected
  Dense u, o;  // in and out of the polar map
};

// `u` in tiles of tile x tile from the top left, or as one unit with tile = 0. A tile is padded
// with zeros to the full square (a tall one transposed before, so that AOL scales the vectors of
// its short side), and its result cropped.
std::vector<ReferenceUnit> ReferenceUnits(const Rule& rule, const Dense& u, int64_t tile);

}  // namespace stiefel

#endif  // STIEFEL_KERNELS_REFERENCE_REFERENCE_POLAR_H_
