#include "kernels/gradient.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <unordered_map>

#include "absl/strings/str_cat.h"
#include "common/status.h"

namespace stiefel {
namespace {

std::string Describe(const GradientPiece& piece) {
  return absl::StrCat("gradient piece ", piece.rect.DebugString(), " of rank ", piece.rank);
}

template <typename T>
int64_t CountExponent(const T* values, int64_t n, T mask) {
  int64_t count = 0;
  for (int64_t i = 0; i < n; ++i) count += (values[i] & mask) == mask;
  return count;
}

// Ends of the row or column ranges, ascending, without repeats.
void SortUnique(std::vector<int64_t>* ends) {
  std::sort(ends->begin(), ends->end());
  ends->erase(std::unique(ends->begin(), ends->end()), ends->end());
}

// The terms of one span: the pieces of `active` (in list order) that cover it, groups brought
// together.
std::vector<GradientPlan::Term> TermsOf(const std::vector<const GradientPiece*>& active,
                                        int64_t col_begin, int64_t col_end, bool mean) {
  std::vector<const GradientPiece*> covering;
  for (const GradientPiece* piece : active) {
    if (piece->rect.col_begin <= col_begin && col_end <= piece->rect.col_end)
      covering.push_back(piece);
  }
  std::vector<GradientPlan::Term> terms;
  std::unordered_map<int32_t, int64_t> order;  // group -> order of first appearance
  double total = 0;
  for (const GradientPiece* piece : covering) {
    if (order.emplace(piece->group, static_cast<int64_t>(order.size())).second)
      total += piece->weight;
  }
  std::stable_sort(covering.begin(), covering.end(),
                   [&](const GradientPiece* a, const GradientPiece* b) {
                     return order[a->group] < order[b->group];
                   });
  for (const GradientPiece* piece : covering) {
    const bool weighted = mean && order.size() > 1;
    terms.push_back({piece, weighted ? static_cast<float>(piece->weight / total) : 1.0f,
                     terms.empty() || terms.back().piece->group != piece->group});
  }
  return terms;
}

}  // namespace

absl::Status ValidateGradient(const GradientView& view, int64_t rows, int64_t cols) {
  const double inverse = 1 / view.grad_scale;
  if (!(view.grad_scale > 0) || !(inverse >= std::numeric_limits<float>::min()) ||
      !(inverse <= std::numeric_limits<float>::max())) {
    return absl::InvalidArgumentError(absl::StrCat(
        "grad_scale ", view.grad_scale, " is not a positive number whose inverse fp32 can hold"));
  }
  std::unordered_map<int32_t, double> group_weight;
  for (const GradientPiece& piece : view.pieces) {
    if (absl::Status status = ValidateRect(piece.rect, rows, cols); !status.ok()) {
      return absl::InvalidArgumentError(absl::StrCat(Describe(piece), ": ", status.message()));
    }
    if (!std::isfinite(piece.weight) || piece.weight < 0) {
      return absl::InvalidArgumentError(absl::StrCat(Describe(piece), " has weight ", piece.weight,
                                                     "; weights are finite and >= 0"));
    }
    if (piece.data == nullptr && piece.weight > 0) {
      return absl::InvalidArgumentError(absl::StrCat(Describe(piece), " has weight but no data"));
    }
    const auto [it, first] = group_weight.emplace(piece.group, piece.weight);
    if (!first && it->second != piece.weight) {
      return absl::InvalidArgumentError(absl::StrCat(Describe(piece), " has weight ", piece.weight,
                                                     ", but its group ", piece.group, " has ",
                                                     it->second));
    }
  }
  double total = 0;
  for (const auto& [group, weight] : group_weight) total += weight;
  if (!std::isfinite(total))
    return absl::InvalidArgumentError("the gradient weights overflow when added");
  return absl::OkStatus();
}

int64_t CountNonfinite(const GradientPiece& piece) {
  const int64_t n = piece.rect.Area();
  switch (piece.dtype) {
    case DType::kFp32:
      return CountExponent(static_cast<const uint32_t*>(piece.data), n, uint32_t{0x7F800000});
    case DType::kBf16:
      return CountExponent(static_cast<const uint16_t*>(piece.data), n, uint16_t{0x7F80});
    case DType::kFp16:
      return CountExponent(static_cast<const uint16_t*>(piece.data), n, uint16_t{0x7C00});
  }
  return 0;
}

absl::StatusOr<GradientPlan> GradientPlan::Make(const GradientView& view, int64_t rows,
                                                int64_t cols) {
  STIEFEL_RETURN_IF_ERROR(ValidateGradient(view, rows, cols));
  GradientPlan plan;
  plan.rows_ = rows;
  plan.cols_ = cols;
  plan.inverse_scale_ = static_cast<float>(1 / view.grad_scale);

  std::vector<const GradientPiece*> by_row;
  std::vector<int64_t> row_ends = {0, rows};
  for (const GradientPiece& piece : view.pieces) {
    if (piece.weight == 0) continue;
    by_row.push_back(&piece);
    row_ends.push_back(piece.rect.row_begin);
    row_ends.push_back(piece.rect.row_end);
  }
  SortUnique(&row_ends);
  std::stable_sort(by_row.begin(), by_row.end(),
                   [](const GradientPiece* a, const GradientPiece* b) {
                     return a->rect.row_begin < b->rect.row_begin;
                   });

  size_t next = 0;
  std::vector<const GradientPiece*> active;
  for (size_t i = 0; i + 1 < row_ends.size(); ++i) {
    Band band{row_ends[i], row_ends[i + 1], {}};
    active.erase(
        std::remove_if(active.begin(), active.end(),
                       [&](const GradientPiece* p) { return p->rect.row_end <= band.row_begin; }),
        active.end());
    while (next < by_row.size() && by_row[next]->rect.row_begin == band.row_begin)
      active.push_back(by_row[next++]);
    std::sort(active.begin(), active.end());  // list order: all point into one array

    std::vector<int64_t> col_ends = {0, cols};
    for (const GradientPiece* piece : active) {
      col_ends.push_back(piece->rect.col_begin);
      col_ends.push_back(piece->rect.col_end);
    }
    SortUnique(&col_ends);
    for (size_t j = 0; j + 1 < col_ends.size(); ++j) {
      band.spans.push_back(
          {col_ends[j], col_ends[j + 1], TermsOf(active, col_ends[j], col_ends[j + 1], view.mean)});
    }
    plan.bands_.push_back(std::move(band));
  }
  return plan;
}

}  // namespace stiefel
