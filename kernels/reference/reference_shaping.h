// Stages 5 and 6 of the pipeline in fp64, docs/mathematics.md section 4: spectral shaping (SAMuon)
// and row variance (NorMuon).
#ifndef STIEFEL_KERNELS_REFERENCE_REFERENCE_SHAPING_H_
#define STIEFEL_KERNELS_REFERENCE_REFERENCE_SHAPING_H_

#include <cstdint>
#include <vector>

#include "kernels/reference/dense.h"
#include "plan/rule.h"

namespace stiefel {

// Whether a refresh at this step shapes the spectrum: gain other than 1, and a warm-up that has
// begun.
bool ShapesSpectrum(const Rule& rule, int64_t step);

// g_t O - sum_{i <= k} (g_t - s_i(t)) d_i u_i v_i^T with the exact leading pairs of `u`, of which o
// is the orthogonalised. Pairs whose singular value is nothing but rounding (1e-12 of the largest)
// have no direction and are left out. `leading` is a row of k min(rows, cols) numbers and gets the
// vectors along the short side, one after the other, each with an arbitrary sign.
// REQUIRES: ShapesSpectrum(rule, step).
Dense ReferenceShaped(const Rule& rule, const Dense& u, const Dense& o, int64_t step,
                      Dense* leading);

// v_i <- b2 v_i + (1 - b2) mean_j O_ij^2; O_i / (sqrt(v_i) + eps), all rows together brought back
// to |O|_F. Row i of `o` is row rows[i] of the matrix and of `variance`. Zero rows stay zero.
// REQUIRES: rule.row_variance_beta2.
Dense ReferenceRowVariance(const Rule& rule, const Dense& o, const std::vector<int64_t>& rows,
                           Dense* variance);

}  // namespace stiefel

#endif  // STIEFEL_KERNELS_REFERENCE_REFERENCE_SHAPING_H_
