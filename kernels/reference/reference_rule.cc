#include "kernels/reference/reference_rule.h"

#include <algorithm>
#include <cmath>
#include <map>

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

// X0, on the side where the rows are the short one.
Dense Normalised(const Rule& rule, const Dense& u) {
  double norm = FrobeniusNorm(u);
  if (norm == 0) return u;
  if (rule.eps_mode == EpsMode::kAdd) norm += rule.eps;
  if (rule.eps_mode == EpsMode::kClamp) norm = std::max(norm, rule.eps);
  return Combine(1 / norm, u, 0, u);
}

Dense Identity(int64_t n) {
  Dense identity(n, n);
  for (int64_t i = 0; i < n; ++i) identity(i, i) = 1;
  return identity;
}

}  // namespace

Dense ReferenceGradient(const GradientView& view, int64_t rows, int64_t cols) {
  Dense g(rows, cols);
  for (int64_t i = 0; i < rows; ++i) {
    for (int64_t j = 0; j < cols; ++j) g(i, j) = GradientElement(view, i, j);
  }
  return g;
}

Dense ReferencePolar(const Rule& rule, const Dense& u) {
  if (u.rows > u.cols) return Transpose(ReferencePolar(rule, Transpose(u)));
  Dense x = Normalised(rule, u);
  for (const Coefficients& k : PolarCoefficients(rule)) {
    const Dense a = Multiply(x, Transpose(x));
    const Dense b = Combine(k.b, a, k.c, Multiply(a, a));
    x = Combine(k.a, x, 1, Multiply(b, x));
  }
  return x;
}

Dense ReferenceGramPolar(const Rule& rule, const Dense& u) {
  if (u.rows > u.cols) return Transpose(ReferenceGramPolar(rule, Transpose(u)));
  const std::vector<Coefficients> coefficients = PolarCoefficients(rule);
  const std::vector<int64_t> restarts = GramRestarts(rule, /*low_precision=*/false);
  Dense x = Normalised(rule, u);
  Dense r = Multiply(x, Transpose(x)), q = Identity(x.rows);
  for (int64_t t = 0; t < static_cast<int64_t>(coefficients.size()); ++t) {
    if (std::count(restarts.begin(), restarts.end(), t) > 0) {
      x = Multiply(q, x);
      r = Multiply(x, Transpose(x));
      q = Identity(x.rows);
    }
    const Coefficients& k = coefficients[t];
    const Dense z = Combine(k.b, r, k.c, Multiply(r, r));
    q = Combine(1, Multiply(q, z), k.a, q);
    const Dense rz = Combine(1, Multiply(r, z), k.a, r);
    r = Combine(1, Multiply(z, rz), k.a, rz);
  }
  return Multiply(q, x);
}

ReferenceRule::ReferenceRule(const Rule& rule, int64_t rows, int64_t cols)
    : rule_(rule), rows_(rows), cols_(cols) {
  state_.assign(RuleState(rule).size(), Dense(rows, cols));
}

// Stages 1 and 2.
Dense ReferenceRule::Momentum(const Dense& g, const StepArgs& args) {
  const double beta = args.beta.value_or(rule_.beta);
  const bool ema = rule_.momentum != MomentumKind::kHeavyBall;
  const double gain = ema ? 1 - beta : 1;
  if (state_.empty()) return g;
  Dense& m = state_[0];
  m = Combine(beta, m, gain, g);
  double m_correction = 1, g_correction = 1;
  if (rule_.momentum == MomentumKind::kEmaBiasCorrected) {
    const double t = static_cast<double>(args.commits + 1);
    m_correction = 1 / (1 - std::pow(beta, rule_.nesterov ? t + 1 : t));
    g_correction = 1 / (1 - std::pow(beta, t));
  }
  if (!rule_.nesterov) return Combine(m_correction, m, 0, m);
  return Combine(beta * m_correction, m, gain * g_correction, g);
}

Dense ReferenceRule::Adamw(const Dense& g, const StepArgs& args) {
  const double beta1 = args.beta.value_or(rule_.beta1), beta2 = rule_.beta2;
  const double t = static_cast<double>(args.commits + 1);
  Dense u(rows_, cols_);
  for (size_t i = 0; i < u.values.size(); ++i) {
    double &m = state_[0].values[i], &v = state_[1].values[i];
    m = beta1 * m + (1 - beta1) * g.values[i];
    v = beta2 * v + (1 - beta2) * g.values[i] * g.values[i];
    const double denominator = std::sqrt(v / (1 - std::pow(beta2, t))) + rule_.eps;
    u.values[i] = denominator == 0 ? 0 : m / (1 - std::pow(beta1, t)) / denominator;
  }
  return u;
}

Dense ReferenceRule::Lion(const Dense& g, const StepArgs& args) {
  const double beta1 = args.beta.value_or(rule_.beta1), beta2 = rule_.beta2;
  Dense u(rows_, cols_);
  for (size_t i = 0; i < u.values.size(); ++i) {
    double& m = state_[0].values[i];
    const double mixed = beta1 * m + (1 - beta1) * g.values[i];
    u.values[i] = mixed > 0 ? 1 : mixed < 0 ? -1 : 0;
    m = beta2 * m + (1 - beta2) * g.values[i];
  }
  return u;
}

// Section 3.
Dense ReferenceRule::RowWise(const Dense& u) const {
  const bool columns = rule_.row_axis == RowAxis::kCols ||
                       (rule_.row_axis == RowAxis::kLong && cols_ > rows_) ||
                       (rule_.row_axis == RowAxis::kShort && cols_ < rows_);
  if (columns) {
    Rule by_rows = rule_;
    by_rows.row_axis = RowAxis::kRows;
    return Transpose(ReferenceRule(by_rows, cols_, rows_).RowWise(Transpose(u)));
  }
  double length = 1;
  if (rule_.row_scale == RowScale::kMatchPolarFro) {
    length = std::sqrt(static_cast<double>(std::min(rows_, cols_)) / static_cast<double>(rows_));
  } else if (rule_.row_scale == RowScale::kRms) {
    length = rule_.row_rms * std::sqrt(static_cast<double>(cols_));
  }
  Dense o = u;
  for (int64_t i = 0; i < rows_; ++i) {
    double sum = 0;
    for (int64_t j = 0; j < cols_; ++j) sum += u(i, j) * u(i, j);
    for (int64_t j = 0; j < cols_; ++j) o(i, j) = sum == 0 ? 0 : u(i, j) * length / std::sqrt(sum);
  }
  if (rule_.row_spectral_max > 0) {
    const double norm = SingularValues(o)[0];
    if (norm > rule_.row_spectral_max) o = Combine(rule_.row_spectral_max / norm, o, 0, o);
  }
  return o;
}

ReferenceStep ReferenceRule::Step(const Dense& gradient, const StepArgs& args) {
  const Dense g = Combine(args.clip_scale, gradient, 0, gradient);
  const bool refresh = args.kind == StepKind::kRefresh;
  ReferenceStep step;
  double scale = ScaleFactor(rule_, rows_, cols_);
  switch (rule_.family) {
    case RuleFamily::kSpectral:
      step.direction = Momentum(g, args);
      step.update = refresh ? ReferencePolar(rule_, step.direction) : RowWise(step.direction);
      if (!refresh) scale *= rule_.off_refresh_lr_ratio;
      break;
    case RuleFamily::kSgd:
      step.direction = Momentum(g, args);
      step.update = step.direction;
      break;
    case RuleFamily::kAdamw:
      step.direction = Adamw(g, args);
      step.update = step.direction;
      break;
    case RuleFamily::kLion:
      step.direction = Lion(g, args);
      step.update = step.direction;
      break;
  }
  step.delta = Combine(-args.lr * scale, step.update, 0, step.update);
  return step;
}

Dense ReferenceRule::Apply(const Dense& weights, const ReferenceStep& step, const StepArgs& args) {
  return Combine(1 - args.lr * args.weight_decay, weights, 1, step.delta);
}

}  // namespace stiefel
