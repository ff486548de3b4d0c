#include "cli/singular_summary.h"

#include <algorithm>
#include <cmath>
#include <utility>
#include <vector>

namespace stiefel {
namespace {

constexpr int64_t kLanczosSteps = 48;

using Vector = std::vector<double>;

double Dot(const Vector& a, const Vector& b) {
  double sum = 0;
  for (size_t i = 0; i < a.size(); ++i) sum += a[i] * b[i];
  return sum;
}

// Takes out of x what lies in the span of an orthonormal basis (twice: rounding too), and brings it
// to length 1. The length that it had; 0, and x useless, where nothing was left of it.
double Orthonormalise(const std::vector<Vector>& basis, Vector* x) {
  const double before = std::sqrt(Dot(*x, *x));
  for (int pass = 0; pass < 2; ++pass) {
    for (const Vector& b : basis) {
      const double part = Dot(b, *x);
      for (size_t i = 0; i < x->size(); ++i) (*x)[i] -= part * b[i];
    }
  }
  const double norm = std::sqrt(Dot(*x, *x));
  if (norm <= 1e-13 * before || norm == 0) return 0;
  for (double& v : *x) v /= norm;
  return norm;
}

Vector TimesRows(const Dense& a, const Vector& x) {  // a x
  Vector y(a.rows, 0.0);
  for (int64_t i = 0; i < a.rows; ++i) {
    const double* row = &a.values[i * a.cols];
    for (int64_t j = 0; j < a.cols; ++j) y[i] += row[j] * x[j];
  }
  return y;
}

Vector TimesColumns(const Dense& a, const Vector& x) {  // a^T x
  Vector y(a.cols, 0.0);
  for (int64_t i = 0; i < a.rows; ++i) {
    const double* row = &a.values[i * a.cols];
    for (int64_t j = 0; j < a.cols; ++j) y[j] += row[j] * x[i];
  }
  return y;
}

bool IsExact(const Dense& a) {
  const double m = static_cast<double>(std::min(a.rows, a.cols));
  return m * static_cast<double>(a.rows * a.cols) <= kExactSingularWork;
}

// Without the rows and columns that are zero throughout.
Dense WithoutZeroVectors(const Dense& a) {
  std::vector<int64_t> rows, cols;
  std::vector<char> col_used(a.cols, 0);
  for (int64_t i = 0; i < a.rows; ++i) {
    bool used = false;
    for (int64_t j = 0; j < a.cols; ++j) {
      if (a(i, j) == 0) continue;
      used = true;
      col_used[j] = 1;
    }
    if (used) rows.push_back(i);
  }
  for (int64_t j = 0; j < a.cols; ++j) {
    if (col_used[j]) cols.push_back(j);
  }
  Dense kept(static_cast<int64_t>(rows.size()), static_cast<int64_t>(cols.size()));
  for (int64_t i = 0; i < kept.rows; ++i) {
    for (int64_t j = 0; j < kept.cols; ++j) kept(i, j) = a(rows[i], cols[j]);
  }
  return kept;
}

// Adds up the summary of several matrices.
class Collector {
 public:
  void Add(const Dense& o) {
    if (MaxAbs(o) == 0) {
      values_.resize(values_.size() + std::min(o.rows, o.cols), 0.0);
    } else if (IsExact(o)) {
      const std::vector<double> values = SingularValues(o);
      values_.insert(values_.end(), values.begin(), values.end());
    } else {
      const SingularSummary estimate = EstimateExtremes(o);
      values_.push_back(estimate.min);
      values_.push_back(estimate.max);
      exact_ = false;
    }
  }

  std::optional<SingularSummary> Summary() {
    if (values_.empty()) return std::nullopt;
    std::sort(values_.begin(), values_.end());
    SingularSummary summary;
    summary.min = values_.front();
    summary.max = values_.back();
    summary.exact = exact_;
    if (exact_) {
      const size_t n = values_.size();
      summary.median = (values_[(n - 1) / 2] + values_[n / 2]) / 2;
    }
    return summary;
  }

 private:
  std::vector<double> values_;
  bool exact_ = true;
};

// Adds the units of one matrix; false where lr s = 0.
bool AddUpdate(const Rule& rule, const StepArgs& args, const Dense& delta, Collector* collector) {
  const Rule alone = RuleOfSplit(rule, delta.rows, delta.cols);
  int64_t row = 0;
  for (int64_t rows : SplitRows(rule, delta.rows)) {
    const double length = args.lr * StepScale(alone, rows, delta.cols, args.step, args.kind);
    if (length == 0) return false;
    Dense o = Scaled(-1 / length, Block(delta, row, 0, rows, delta.cols));
    row += rows;
    if (rule.select_fraction < 1) o = WithoutZeroVectors(o);
    const int64_t tile = TileAtStep(alone, rows, delta.cols, args.step, args.kind);
    const int64_t height = tile == 0 ? o.rows : tile, width = tile == 0 ? o.cols : tile;
    for (int64_t i = 0; i < o.rows; i += height) {
      for (int64_t j = 0; j < o.cols; j += width) {
        collector->Add(Block(o, i, j, std::min(height, o.rows - i), std::min(width, o.cols - j)));
      }
    }
  }
  return true;
}

}  // namespace

SingularSummary EstimateExtremes(const Dense& a) {
  // Golub-Kahan: a v_k = alpha_k u_k + beta_k u_k+1, where u starts random; the singular values of
  // the bidiagonal of alpha and beta approach those of a from the ends.
  const int64_t steps = std::min(kLanczosSteps, std::min(a.rows, a.cols));
  Dense bidiagonal(steps + 1, steps);
  std::vector<Vector> left, right;
  Vector u = RandomNormal(1, a.rows, 1).values;
  Orthonormalise({}, &u);
  for (int64_t k = 0; k < steps; ++k) {
    Vector v = TimesColumns(a, u);
    const double alpha = Orthonormalise(right, &v);
    if (alpha == 0) break;
    left.push_back(u);
    right.push_back(v);
    bidiagonal(k, k) = alpha;
    u = TimesRows(a, v);
    const double beta = Orthonormalise(left, &u);
    bidiagonal(k + 1, k) = beta;
    if (beta == 0) break;
  }
  const int64_t size = static_cast<int64_t>(right.size());
  const std::vector<double> values = SingularValues(Block(bidiagonal, 0, 0, size + 1, size));
  SingularSummary summary;
  summary.max = values.front();
  summary.min = values.back();
  summary.exact = false;
  return summary;
}

std::optional<SingularSummary> SummariseUpdates(const Rule& rule, const StepArgs& args,
                                                const std::vector<Dense>& deltas) {
  if (rule.family != RuleFamily::kSpectral) return std::nullopt;
  Collector collector;
  for (const Dense& delta : deltas) {
    if (!AddUpdate(rule, args, delta, &collector)) return std::nullopt;
  }
  return collector.Summary();
}

}  // namespace stiefel
