// Primitives of backend.h for the rules that look at singular vectors themselves: spectral shaping,
// and the preconditioned low-rank factors of PoLoRA. Square matrices here are small, and handled in
// fp64; what is as large as a factor or a matrix is fp32.
#ifndef STIEFEL_KERNELS_SPECTRAL_PASSES_H_
#define STIEFEL_KERNELS_SPECTRAL_PASSES_H_

#include <cstdint>

#include "kernels/backend.h"

namespace stiefel {

// The `count` leading singular pairs of U, by block subspace iteration to a residual
// |U U^T a - sigma^2 a| of 1e-6 sigma_1^2 or, where rounding or close singular values do not let it
// get there, after a bounded number of products; small U exactly. A pair whose singular value is
// nothing beside the first (3e-7 of it) is two zero vectors; so are all where U is zero or not
// finite. U and 2^k U give the same bits.
struct LeadingPairsPass {
  const float* u = nullptr;  // rows x cols
  int64_t rows = 0, cols = 0;
  int64_t count = 0;  // 1 to min(rows, cols)
  // Guess and result along the short side of U, count vectors each, where the next matrix may
  // start. A vector of zeros starts from a fixed pseudo-random one. Without any pair found the
  // guess is handed on.
  const float* start = nullptr;
  float* found = nullptr;
  float* left = nullptr;    // count x rows: unit vectors by descending singular value
  float* right = nullptr;   // count x cols
  void* scratch = nullptr;  // LeadingPairsScratch bytes, aligned to 64
};

// Vectors that the subspace iteration works on: count and some more, or the whole short side where
// that is not much more. Up to kExactShortSide the decomposition is exact.
constexpr int64_t kExactShortSide = 64;
int64_t SubspaceSize(int64_t short_side, int64_t count);

int64_t LeadingPairsScratch(int64_t rows, int64_t cols, int64_t count);

// Gives the leading directions of an orthogonalised O lengths of their own (SAMuon), in place:
//   O <- g O - sum_i (g - s_i) d_i u_i v_i^T,   s_i = 1 + (g - 1) ln i / ln count  (s_1 = 1),
// with d_i = u_i^T O v_i, or 1 where not deflate_measured. Zero pairs change nothing. Measured
// pairs that are all of O, count = min(rows, cols), are put together anew: O <- sum_i s_i d_i u_i
// v_i^T.
struct ShapePass {
  MatrixView o;  // fp32
  int64_t count = 0;
  const float* left = nullptr;   // count x o.rows: u_i
  const float* right = nullptr;  // count x o.cols: v_i
  double gain = 1;               // g
  bool deflate_measured = true;
  void* scratch = nullptr;  // ShapeScratch bytes, aligned to 64
};

int64_t ShapeScratch(int64_t rows, int64_t cols, int64_t count);

// out = op(x) diag(w)^power, op transposing where asked, with w = v / |v|_inf + floor and every v
// of 0 standing for 1e-12. Without variance: out = op(x). out overlaps nothing.
struct MetricPass {
  const float* x = nullptr;  // rows x cols
  int64_t rows = 0, cols = 0;
  bool transpose = false;
  const float* variance = nullptr;  // one per column of op(x), >= 0; or null
  double power = 0, floor = 0;
  float* out = nullptr;
};

// From the largest eigenvalue l of C = X X^T (fp64) and its eigenvectors: where not null
// `inverse_root` = ((C + max(damping l, 1.2e-38) I) / l)^-1/2 in fp32, which is free of C's scale.
// Where C is zero, l and the root are zero; where it is not finite both are NaN.
struct GramPass {
  const float* x = nullptr;  // rows x cols
  int64_t rows = 0, cols = 0;
  double* largest = nullptr;
  float* inverse_root = nullptr;  // rows x rows
  double damping = 0;
  void* scratch = nullptr;  // GramScratch bytes, aligned to 64
};

int64_t GramScratch(int64_t rows);

// Squared spectral norms that the step of a low-rank factor follows from, in device memory.
struct PoloraNorms {
  double own, partner;    // of the factors
  double partner_metric;  // of C
  double step;            // of D
};

// The end of a PoLoRA step on a factor, rows x cols with the rank as rows:
//   d <- D / (product_scale (|A|_2 + |B|_2) |D|_2), rounded towards the safe side;
//   v_j <- keep v_j + (1 - keep) sum_i h_ij^2 / (l rows),   h = ((C + ..) / l)^-1/2 G, l = |C|_2.
// Where C or D is zero, d <- 0 and v stays. A v of 0 stands for 1e-12.
struct PoloraPass {
  float* d = nullptr;
  const float* h = nullptr;
  int64_t rows = 0, cols = 0;
  const PoloraNorms* norms = nullptr;
  double product_scale = 1;
  const float* variance = nullptr;  // cols
  float* new_variance = nullptr;
  double keep = 0;
};

}  // namespace stiefel

#endif  // STIEFEL_KERNELS_SPECTRAL_PASSES_H_
