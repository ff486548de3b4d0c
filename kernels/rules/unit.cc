#include "kernels/rules/unit.h"

#include <utility>

#include "common/status.h"
#include "kernels/rules/stages.h"

namespace stiefel {

absl::StatusOr<PolarUnit> PolarUnit::Make(const Rule& rule, int64_t rows, int64_t cols,
                                          const DeviceInfo& device) {
  PolarUnit unit;
  unit.rows_ = rows;
  unit.cols_ = cols;
  unit.normalise_ = NormaliseBy(rule);
  STIEFEL_ASSIGN_OR_RETURN(unit.plan_, MakePolarPlan(rule, rows, cols, device));
  return unit;
}

int64_t PolarUnit::OperandBytes() const { return rows_ * cols_ * DTypeSize(plan_.compute); }

UnitUpdate PolarUnit::Enqueue(Stream* stream, const float* u, int64_t stride,
                              const DirectionStats* figures, void* x, void* spare, void* workspace,
                              StepStats* stats) const {
  const MatrixView operand{x, plan_.compute, plan_.m, plan_.n, 1};
  const MatrixView other{spare, plan_.compute, plan_.m, plan_.n, 1};
  NormalisePass normalise = normalise_;
  normalise.u = u;
  normalise.rows = rows_;
  normalise.cols = cols_;
  normalise.stride = stride;
  normalise.transpose = rows_ > cols_;
  normalise.x = operand;
  normalise.figures = figures;
  UnitUpdate update;
  update.o = EnqueueNormalisedPolar(stream, plan_, normalise, other, workspace);
  update.transposed = normalise.transpose;
  stream->Residual(update.o, stats);
  return update;
}

Delivery DeliveryAt(Delivery delivery, int64_t row, int64_t col, int64_t cols) {
  const int64_t offset = row * cols + col;
  const auto move = [offset](void* data, DType dtype) -> void* {
    return data == nullptr ? nullptr : static_cast<char*>(data) + offset * DTypeSize(dtype);
  };
  delivery.delta = move(delivery.delta, delivery.delta_dtype);
  delivery.payload = move(delivery.payload, delivery.payload_dtype);
  if (delivery.weights != nullptr) delivery.weights += offset;
  if (delivery.new_weights != nullptr) delivery.new_weights += offset;
  return delivery;
}

}  // namespace stiefel
