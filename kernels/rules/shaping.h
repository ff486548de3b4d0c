// Spectral shaping (SAMuon, docs/mathematics.md section 4): the leading directions of an
// orthogonalised update get lengths of their own.
//
//   EnqueueLeadingDirections(stream, rule, u, ...);   before the polar map, which overwrites U
//   EnqueueShaping(stream, rule, w, o, ...);          after it
//
// Both with the same workspace, which keeps the directions in between. A rule whose gain is 1, or a
// step whose w_t is 0, calls neither.
#ifndef STIEFEL_KERNELS_RULES_SHAPING_H_
#define STIEFEL_KERNELS_RULES_SHAPING_H_

#include <cstdint>

#include "kernels/backend.h"
#include "plan/rule.h"

namespace stiefel {

// Bytes of workspace for a matrix (split) of rows x cols; a multiple of 64.
int64_t ShapingWorkspaceBytes(const Rule& rule, int64_t rows, int64_t cols);

// Finds the rule's ShapedDirections leading singular pairs of u (rows x cols). `state`, the
// directions of the last refresh along the short side, is where the search starts; `new_state`,
// which may not overlap it, receives those found.
void EnqueueLeadingDirections(Stream* stream, const Rule& rule, const float* u, int64_t rows,
                              int64_t cols, const float* state, float* new_state, void* workspace);

// O <- g_t O - sum_i (g_t - s_i(t)) d_i u_i v_i^T in place, w_t being `weight`. `o` is fp32, rows x
// cols, or cols x rows where transposed.
void EnqueueShaping(Stream* stream, const Rule& rule, double weight, const MatrixView& o,
                    bool transposed, int64_t rows, int64_t cols, void* workspace);

}  // namespace stiefel

#endif  // STIEFEL_KERNELS_RULES_SHAPING_H_
