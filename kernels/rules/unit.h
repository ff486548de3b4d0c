// One unit of the orthogonaliser: a matrix, a split, the selected rows of one, or a tile.
#ifndef STIEFEL_KERNELS_RULES_UNIT_H_
#define STIEFEL_KERNELS_RULES_UNIT_H_

#include <cstdint>

#include "absl/status/statusor.h"
#include "kernels/polar/newton_schulz.h"

namespace stiefel {

// An orthogonalised unit; transposed where it has more rows than columns.
struct UnitUpdate {
  MatrixView o;
  bool transposed = false;
};

class PolarUnit {
 public:
  // Errors: those of MakePolarPlan.
  static absl::StatusOr<PolarUnit> Make(const Rule& rule, int64_t rows, int64_t cols,
                                        const DeviceInfo& device);

  int64_t rows() const { return rows_; }
  int64_t cols() const { return cols_; }
  const PolarPlan& plan() const { return plan_; }
  int64_t OperandBytes() const;
  int64_t WorkspaceBytes() const { return PolarWorkspaceBytes(plan_); }

  // Enqueues O = polar(normalise(U)) and its residual, into stats->residual. u: rows `stride`
  // elements apart. `x` and `spare` have OperandBytes; `spare` may be u itself, which is then
  // overwritten. O is in one of the two.
  UnitUpdate Enqueue(Stream* stream, const float* u, int64_t stride, const DirectionStats* figures,
                     void* x, void* spare, void* workspace, StepStats* stats) const;

 private:
  PolarUnit() = default;

  int64_t rows_ = 0, cols_ = 0;
  NormalisePass normalise_;  // NormaliseBy
  PolarPlan plan_;
};

// What delivers to (row, col) of a matrix of `cols` columns.
Delivery DeliveryAt(Delivery delivery, int64_t row, int64_t col, int64_t cols);

}  // namespace stiefel

#endif  // STIEFEL_KERNELS_RULES_UNIT_H_
