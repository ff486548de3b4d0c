// The gradient of one matrix in one step: what the trainers sent, before anything is added up.
//
// It is never materialised: backends reduce the pieces tile by tile inside the pass that consumes
// them (GradientPlan).
#ifndef STIEFEL_KERNELS_GRADIENT_H_
#define STIEFEL_KERNELS_GRADIENT_H_

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "common/dtype.h"
#include "common/rect.h"

namespace stiefel {

// One contribution. Pieces are listed in rank order, then part order: sums run in the order of the
// list.
struct GradientPiece {
  Rect rect;  // where it lies in the matrix
  const void* data =
      nullptr;  // device memory, row-major over rect, contiguous, aligned to its element
  DType dtype = DType::kFp32;
  double weight = 1;  // of its group: finite, >= 0, equal within the group; 0 leaves the piece out
                      // in both modes
  int32_t group = 0;  // pieces of equal group are summed first; the mean runs over groups
  int32_t rank = 0;   // for explanations
};

// g = (mean: sum_g w_g s_g / sum_g w_g | sum: sum_g s_g) / grad_scale, where s_g is the sum over
// the pieces of group g with weight > 0 that cover the element, in fp32. An element that none
// covers is 0. Where one group alone covers an element, its mean is s_g exactly.
struct GradientView {
  std::vector<GradientPiece> pieces;
  bool mean = true;
  double grad_scale = 1;  // finite, > 0
};

// INVALID_ARGUMENT, with the numbers, unless `view` is a gradient of a rows x cols matrix as
// described above.
absl::Status ValidateGradient(const GradientView& view, int64_t rows, int64_t cols);

// Inf and NaN elements of one contribution, for the explanation of a skip. REQUIRES: data readable
// by the host.
int64_t CountNonfinite(const GradientPiece& piece);

// The view cut into bands of rows and, within a band, into spans of columns that the same pieces
// cover. Bands cover all rows and the spans of a band all columns, in ascending order.
class GradientPlan {
 public:
  struct Term {
    const GradientPiece* piece;
    float coefficient;  // w_g / sum w; 1 in sum mode and for a single group
    bool opens_group;   // the first piece of its group in this span
  };
  struct Span {
    int64_t col_begin, col_end;
    std::vector<Term>
        terms;  // ascending by group of first appearance, then in list order; may be empty
  };
  struct Band {
    int64_t row_begin, row_end;
    std::vector<Span> spans;
  };

  // Holds pointers into `view`, which must stay as it is. Errors: those of ValidateGradient.
  static absl::StatusOr<GradientPlan> Make(const GradientView& view, int64_t rows, int64_t cols);

  const std::vector<Band>& bands() const { return bands_; }
  int64_t rows() const { return rows_; }
  int64_t cols() const { return cols_; }
  // The factor 1 / grad_scale.
  float inverse_scale() const { return inverse_scale_; }

 private:
  std::vector<Band> bands_;
  int64_t rows_ = 0, cols_ = 0;
  float inverse_scale_ = 1;
};

}  // namespace stiefel

#endif  // STIEFEL_KERNELS_GRADIENT_H_
