#include "kernels/rules/stages.h"

#include <algorithm>
#include <cmath>

namespace stiefel {

Rule WithFullLr(Rule rule) {
  rule.off_refresh_lr_ratio = 1;
  return rule;
}

NormalisePass NormaliseBy(const Rule& rule) {
  NormalisePass pass;
  pass.power_of_two = rule.normalise == Normalise::kAol;
  pass.eps_add = rule.eps_mode == EpsMode::kAdd ? rule.eps : 0;
  pass.eps_floor = rule.eps_mode == EpsMode::kClamp ? rule.eps : 0;
  return pass;
}

bool NormalisesColumns(const Rule& rule, int64_t rows, int64_t cols) {
  switch (rule.row_axis) {
    case RowAxis::kRows:
      return false;
    case RowAxis::kCols:
      return true;
    case RowAxis::kLong:
      return cols > rows;
    case RowAxis::kShort:
      return cols < rows;
  }
  return false;
}

double VectorLength(const Rule& rule, int64_t rows, int64_t cols, bool by_columns) {
  const auto vectors = static_cast<double>(by_columns ? cols : rows);
  const auto entries = static_cast<double>(by_columns ? rows : cols);
  switch (rule.row_scale) {
    case RowScale::kMatchPolarFro:
      return std::sqrt(std::min(vectors, entries) / vectors);
    case RowScale::kUnit:
      return 1;
    case RowScale::kRms:
      return rule.row_rms * std::sqrt(entries);
  }
  return 1;
}

}  // namespace stiefel
