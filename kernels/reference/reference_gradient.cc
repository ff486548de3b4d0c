#include "kernels/reference/reference_gradient.h"

#include <map>
#include <utility>

#include "common/dtype.h"

namespace stiefel {
namespace {

double ElementOf(const GradientPiece& piece, int64_t i, int64_t j) {
  const int64_t index = (i - piece.rect.row_begin) * piece.rect.cols() + (j - piece.rect.col_begin);
  float value = 0;
  Convert(static_cast<const char*>(piece.data) + index * DTypeSize(piece.dtype), piece.dtype,
          &value, DType::kFp32, 1);
  return value;
}

bool Covers(const GradientPiece& piece, int64_t i, int64_t j) {
  return piece.weight > 0 && piece.rect.row_begin <= i && i < piece.rect.row_end &&
         piece.rect.col_begin <= j && j < piece.rect.col_end;
}

double GradientElement(const GradientView& view, int64_t i, int64_t j) {
  std::map<int32_t, std::pair<double, double>> groups;  // group -> (sum, weight)
  for (const GradientPiece& piece : view.pieces) {
    if (!Covers(piece, i, j)) continue;
    groups[piece.group].first += ElementOf(piece, i, j);
    groups[piece.group].second = piece.weight;
  }
  double sum = 0, weight = 0;
  for (const auto& [group, entry] : groups) {
    sum += view.mean ? entry.second * entry.first : entry.first;
    weight += entry.second;
  }
  if (groups.empty()) return 0;
  return (view.mean ? sum / weight : sum) / view.grad_scale;
}

}  // namespace

Dense ReferenceGradient(const GradientView& view, int64_t rows, int64_t cols) {
  Dense g(rows, cols);
  for (int64_t i = 0; i < rows; ++i) {
    for (int64_t j = 0; j < cols; ++j) g(i, j) = GradientElement(view, i, j);
  }
  return g;
}

}  // namespace stiefel
