#include "kernels/reference/reference_rule.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <utility>

#include "kernels/reference/reference_polora.h"
#include "kernels/reference/reference_shaping.h"

namespace stiefel {
namespace {

// The given rows of `a`.
Dense Rows(const Dense& a, const std::vector<int64_t>& rows) {
  Dense picked(static_cast<int64_t>(rows.size()), a.cols);
  for (int64_t i = 0; i < picked.rows; ++i)
    SetBlock(Block(a, rows[i], 0, 1, a.cols), i, 0, &picked);
  return picked;
}

// `part` back in its rows of a matrix of `count` rows; 0 elsewhere.
Dense InRows(const Dense& part, const std::vector<int64_t>& rows, int64_t count) {
  Dense whole(count, part.cols);
  for (int64_t i = 0; i < part.rows; ++i)
    SetBlock(Block(part, i, 0, 1, part.cols), rows[i], 0, &whole);
  return whole;
}

std::vector<int64_t> AllRows(int64_t count) {
  std::vector<int64_t> rows(count);
  std::iota(rows.begin(), rows.end(), 0);
  return rows;
}

// Section 3: every row of u (or column, as row_axis says) with the same length.
Dense RowWise(const Rule& rule, const Dense& u) {
  const bool columns = rule.row_axis == RowAxis::kCols ||
                       (rule.row_axis == RowAxis::kLong && u.cols > u.rows) ||
                       (rule.row_axis == RowAxis::kShort && u.cols < u.rows);
  if (columns) {
    Rule by_rows = rule;
    by_rows.row_axis = RowAxis::kRows;
    return Transpose(RowWise(by_rows, Transpose(u)));
  }
  double length = 1;
  if (rule.row_scale == RowScale::kMatchPolarFro) {
    length = std::sqrt(static_cast<double>(std::min(u.rows, u.cols)) / static_cast<double>(u.rows));
  } else if (rule.row_scale == RowScale::kRms) {
    length = rule.row_rms * std::sqrt(static_cast<double>(u.cols));
  }
  Dense o = u;
  for (int64_t i = 0; i < u.rows; ++i) {
    const Dense row = Block(u, i, 0, 1, u.cols);
    if (MaxAbs(row) > 0) SetBlock(Scaled(length / FrobeniusNorm(row), row), i, 0, &o);
  }
  if (rule.row_spectral_max > 0) {
    const double norm = SpectralNorm(o);
    if (norm > rule.row_spectral_max) return Scaled(rule.row_spectral_max / norm, o);
  }
  return o;
}

}  // namespace

ReferenceRule::ReferenceRule(const Rule& rule, int64_t rows, int64_t cols)
    : rule_(rule), rows_(rows), cols_(cols), specs_(RuleState(rule, rows, cols)) {
  const std::vector<int64_t> split_rows = SplitRows(rule, rows);
  if (split_rows.size() > 1) {
    for (int64_t size : split_rows) splits_.emplace_back(RuleOfSplit(rule, rows, cols), size, cols);
    return;
  }
  for (const StateBuffer& spec : specs_) state_.emplace_back(spec.rows, spec.cols);
}

Dense* ReferenceRule::State(std::string_view name) {
  for (size_t i = 0; i < specs_.size(); ++i) {
    if (specs_[i].name == name) return &state_[i];
  }
  return nullptr;
}

std::vector<Dense> ReferenceRule::state() const {
  if (splits_.empty()) return state_;
  // Every buffer of the whole is those of the splits, one after the other.
  std::vector<Dense> whole;
  for (const StateBuffer& spec : specs_) whole.push_back({spec.rows, spec.cols, {}});
  for (const ReferenceRule& split : splits_) {
    for (size_t i = 0; i < whole.size(); ++i) {
      const std::vector<double>& values = split.state_[i].values;
      whole[i].values.insert(whole[i].values.end(), values.begin(), values.end());
    }
  }
  return whole;
}

ReferenceStep ReferenceRule::StepOfSplits(const Dense& gradient, const StepArgs& args) {
  ReferenceStep step{Dense(rows_, cols_), Dense(rows_, cols_), Dense(rows_, cols_), {}};
  int64_t row = 0;
  for (ReferenceRule& split : splits_) {
    ReferenceStep part = split.Step(Block(gradient, row, 0, split.rows_, cols_), args);
    SetBlock(part.direction, row, 0, &step.direction);
    SetBlock(part.update, row, 0, &step.update);
    SetBlock(part.delta, row, 0, &step.delta);
    for (ReferenceUnit& unit : part.units) {
      unit.rect.row_begin += row;
      unit.rect.row_end += row;
      step.units.push_back(std::move(unit));
    }
    row += split.rows_;
  }
  return step;
}

// Stages 1 and 2.
Dense ReferenceRule::Momentum(const Dense& g, const StepArgs& args) {
  Dense* const m = State("momentum");
  if (m == nullptr) return g;
  const bool accumulate = rule_.momentum == MomentumKind::kAccumulate;
  const double beta = accumulate ? 1 : args.beta.value_or(rule_.beta);
  const bool ema =
      rule_.momentum == MomentumKind::kEma || rule_.momentum == MomentumKind::kEmaBiasCorrected;
  const double gain = ema ? 1 - beta : 1;
  *m = Combine(beta, *m, gain, g);
  double m_correction = 1, g_correction = 1;
  if (rule_.momentum == MomentumKind::kEmaBiasCorrected) {
    const double t = static_cast<double>(args.commits + 1);
    m_correction = 1 / (1 - std::pow(beta, rule_.nesterov ? t + 1 : t));
    g_correction = 1 / (1 - std::pow(beta, t));
  }
  if (!rule_.nesterov) return Scaled(m_correction, *m);
  return Combine(beta * m_correction, *m, gain * g_correction, g);
}

// Stage 3: the selected rows (columns where SelectsColumns), whose momentum is damped.
std::vector<int64_t> ReferenceRule::Select(const Dense& u) {
  const bool columns = SelectsColumns(rule_, rows_, cols_);
  const Dense by_rows = columns ? Transpose(u) : u;
  std::vector<double> l1(by_rows.rows, 0.0);
  for (int64_t i = 0; i < by_rows.rows; ++i) {
    for (int64_t j = 0; j < by_rows.cols; ++j) l1[i] += std::fabs(by_rows(i, j));
  }
  std::vector<int64_t> selected = AllRows(by_rows.rows);
  std::stable_sort(selected.begin(), selected.end(),
                   [&](int64_t a, int64_t b) { return l1[a] > l1[b]; });
  selected.resize(SelectedVectors(rule_, by_rows.rows));
  std::sort(selected.begin(), selected.end());

  if (Dense* mask = State("selected"); mask != nullptr) {
    std::fill(mask->values.begin(), mask->values.end(), 0.0);
    for (int64_t s : selected) mask->values[s] = 1;
    Dense& m = *State("momentum");
    for (int64_t i = 0; i < rows_; ++i) {
      for (int64_t j = 0; j < cols_; ++j) {
        if (mask->values[columns ? j : i] == 1) m(i, j) *= rule_.damping;
      }
    }
  }
  return selected;
}

// Stages 4 to 6 on `u`, whose row i is row rows[i] of the matrix.
Dense ReferenceRule::Orthogonalised(const Dense& u, const std::vector<int64_t>& rows,
                                    const StepArgs& args, std::vector<ReferenceUnit>* units) {
  const bool refresh = args.kind == StepKind::kRefresh;
  if (!refresh && rule_.off_refresh == OffRefresh::kRowWise) return RowWise(rule_, u);
  *units = ReferenceUnits(rule_, u, TileAtStep(rule_, rows_, cols_, args.step, args.kind));
  Dense o(u.rows, u.cols);
  for (const ReferenceUnit& unit : *units)
    SetBlock(unit.o, unit.rect.row_begin, unit.rect.col_begin, &o);
  if (refresh && ShapesSpectrum(rule_, args.step))
    o = ReferenceShaped(rule_, u, o, args.step, State("leading_directions"));
  if (rule_.row_variance_beta2.has_value())
    o = ReferenceRowVariance(rule_, o, rows, State("row_variance"));
  return o;
}

ReferenceStep ReferenceRule::SpectralStep(const Dense& g, const StepArgs& args) {
  ReferenceStep step;
  step.direction = Momentum(g, args);
  const std::vector<int64_t> selected = Select(step.direction);
  if (SelectsColumns(rule_, rows_, cols_)) {
    const Dense u = Transpose(Rows(Transpose(step.direction), selected));
    const Dense o = Orthogonalised(u, AllRows(rows_), args, &step.units);
    step.update = Transpose(InRows(Transpose(o), selected, cols_));
  } else {
    const Dense o = Orthogonalised(Rows(step.direction, selected), selected, args, &step.units);
    step.update = InRows(o, selected, rows_);
  }
  return step;
}

ReferenceStep ReferenceRule::PoloraFactorStep(const Dense& g, const StepArgs& args,
                                              const ReferencePair& pair) {
  // RuleState: momentum, factor_variance.
  Dense &m = state_[0], &variance = state_[1];
  PoloraStep step;
  step.beta1 = args.beta.value_or(rule_.beta1);
  m = Combine(step.beta1, m, 1 - step.beta1, g);
  step.a = pair.weights;
  step.b = pair.partner_weights;
  step.gradient = g;
  step.momentum = m;
  step.variance = variance;
  step.partner_variance = pair.partner_state[1];
  ReferenceStep result;
  result.direction = Combine(step.beta1, m, 1 - step.beta1, g);
  const bool is_a = FactorOf(rule_, rows_, cols_).value() == PoloraFactor::kA;
  if (!is_a) {
    for (Dense* matrix : {&step.a, &step.b, &step.gradient, &step.momentum})
      *matrix = Transpose(*matrix);
  }
  const Dense update = ReferencePolora(rule_, &step);
  variance.values = step.variance.values;
  result.update = is_a ? update : Transpose(update);
  return result;
}

ReferenceStep ReferenceRule::Step(const Dense& gradient, const StepArgs& args,
                                  const ReferencePair* pair) {
  if (!splits_.empty()) return StepOfSplits(gradient, args);
  const Dense g = Scaled(args.clip_scale, gradient);
  ReferenceStep step;
  switch (rule_.family) {
    case RuleFamily::kSpectral:
      step = SpectralStep(g, args);
      break;
    case RuleFamily::kPolora:
      step = PoloraFactorStep(g, args, *pair);
      break;
    case RuleFamily::kSgd:
      step.update = step.direction = Momentum(g, args);
      break;
    case RuleFamily::kAdamw:
      step.update = step.direction = Adamw(g, args);
      break;
    case RuleFamily::kLion:
      step.update = step.direction = Lion(g, args);
      break;
  }
  step.delta = Scaled(-args.lr * StepScale(rule_, rows_, cols_, args.step, args.kind), step.update);
  return step;
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

Dense ReferenceRule::Apply(const Dense& weights, const ReferenceStep& step, const StepArgs& args) {
  return Combine(1 - args.lr * args.weight_decay, weights, 1, step.delta);
}

}  // namespace stiefel
