#include "kernels/rules/element_coefficients.h"

#include <cmath>

namespace stiefel {
namespace {

ElementCoefficients Momentum(const Rule& rule, double beta, double commits) {
  const bool ema =
      rule.momentum == MomentumKind::kEma || rule.momentum == MomentumKind::kEmaBiasCorrected;
  const double gain = ema ? 1 - beta : 1;
  double u_momentum = rule.nesterov ? beta : 1;
  double u_gradient = rule.nesterov ? gain : 0;
  if (rule.momentum == MomentumKind::kEmaBiasCorrected) {
    // optax scale_by_muon: the look-ahead takes the correction of the next step for M and of this
    // one for G.
    const double t = commits + 1;
    u_momentum /= 1 - std::pow(beta, rule.nesterov ? t + 1 : t);
    u_gradient /= 1 - std::pow(beta, t);
  }
  ElementCoefficients k;
  k.rule = ElementRule::kMomentum;
  k.m_keep = rule.momentum == MomentumKind::kAccumulate ? 1 : static_cast<float>(beta);
  k.m_gain = static_cast<float>(gain);
  k.u_momentum = static_cast<float>(u_momentum);
  k.u_gradient = static_cast<float>(u_gradient);
  return k;
}

}  // namespace

ElementCoefficients CoefficientsOf(const Rule& rule, const StepArgs& args) {
  const double commits = static_cast<double>(args.commits);
  ElementCoefficients k;
  switch (rule.family) {
    case RuleFamily::kSpectral:
    case RuleFamily::kSgd:
      return Momentum(rule, args.beta.value_or(rule.beta), commits);
    case RuleFamily::kPolora: {
      const double beta1 = args.beta.value_or(rule.beta1);
      k.m_keep = k.u_momentum = static_cast<float>(beta1);
      k.m_gain = k.u_gradient = static_cast<float>(1 - beta1);
      return k;
    }
    case RuleFamily::kLion: {
      const double beta1 = args.beta.value_or(rule.beta1);
      k.rule = ElementRule::kLion;
      k.u_momentum = static_cast<float>(beta1);
      k.u_gradient = static_cast<float>(1 - beta1);
      k.m_keep = static_cast<float>(rule.beta2);
      k.m_gain = static_cast<float>(1 - rule.beta2);
      return k;
    }
    case RuleFamily::kAdamw: {
      const double beta1 = args.beta.value_or(rule.beta1), t = commits + 1;
      k.rule = ElementRule::kAdam;
      k.m_keep = static_cast<float>(beta1);
      k.m_gain = static_cast<float>(1 - beta1);
      k.v_keep = static_cast<float>(rule.beta2);
      k.v_gain = static_cast<float>(1 - rule.beta2);
      k.m_correction = static_cast<float>(1 / (1 - std::pow(beta1, t)));
      k.v_correction = static_cast<float>(1 / (1 - std::pow(rule.beta2, t)));
      k.eps = static_cast<float>(rule.eps);
      return k;
    }
  }
  return k;
}

}  // namespace stiefel
