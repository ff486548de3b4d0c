// The preset table: the named rules of section 6. A preset is data: another one is another row.
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "plan/nearest.h"
#include "plan/rule.h"

namespace stiefel {
namespace {

struct Preset {
  PresetInfo info;
  Rule (*make)();
};

Rule Spectral(MomentumKind momentum, double lr, double weight_decay, ScaleKind scale) {
  Rule rule;
  rule.family = RuleFamily::kSpectral;
  rule.momentum = momentum;
  rule.beta = 0.95;
  rule.nesterov = true;
  rule.lr = lr;
  rule.weight_decay = weight_decay;
  rule.scale = scale;
  return rule;
}

Rule Muon() { return Spectral(MomentumKind::kEma, 0.02, 0, ScaleKind::kOriginal); }

Rule Samuon() {
  Rule rule = Spectral(MomentumKind::kEma, 0.02, 0, ScaleKind::kSpectral);
  rule.nesterov = false;
  rule.coefficients = CoefficientTable::kPolarExpress;
  rule.gain = 5;
  return rule;
}

// beta is for users who choose another momentum; accumulation has damping in its place.
Rule Dion2() {
  Rule rule = Spectral(MomentumKind::kAccumulate, 0.01, 0, ScaleKind::kSpectral);
  rule.nesterov = false;
  rule.coefficients = CoefficientTable::kPolarExpress;
  rule.form = PolarForm::kGram;
  rule.select_fraction = 0.25;
  rule.damping = 0.95;
  return rule;
}

Rule Elementwise(RuleFamily family, double lr, double beta1, double beta2, double eps) {
  Rule rule;
  rule.family = family;
  rule.momentum = MomentumKind::kHeavyBall;
  rule.lr = lr;
  rule.beta1 = beta1;
  rule.beta2 = beta2;
  rule.eps = eps;
  return rule;
}

const std::vector<Preset>& SpectralPresets() {
  static const auto& table = *new std::vector<Preset>{
      {{"muon", "momentum, then an orthogonalised update every step",
        "github.com/KellerJordan/Muon"},
       Muon},
      {{"muon_torch", "as torch.optim.Muon", "PyTorch 2.9 torch/optim/_muon.py"},
       [] {
         Rule rule = Spectral(MomentumKind::kEma, 1e-3, 0.1, ScaleKind::kOriginal);
         rule.eps_mode = EpsMode::kClamp;
         rule.eps = 1e-7;
         return rule;
       }},
      {{"muon_moonlight", "Muon scaled to AdamW's update RMS",
        "arXiv 2502.16982; github.com/MoonshotAI/Moonlight"},
       [] {
         Rule rule = Spectral(MomentumKind::kHeavyBall, 1e-3, 0.1, ScaleKind::kMatchRmsAdamw);
         rule.eps_mode = EpsMode::kAdd;
         rule.eps = 1e-7;
         return rule;
       }},
      {{"periodic_rowwise_muon", "muon every third step, row-normalised momentum in between",
        "arXiv 2608.20818"},
       [] {
         Rule rule = Muon();
         rule.period = 3;
         return rule;
       }},
      {{"muonbp", "muon every fifth step, orthogonalised tile by tile in between",
        "arXiv 2510.16981"},
       [] {
         Rule rule = Muon();
         rule.period = 5;
         rule.off_refresh = OffRefresh::kTiled;
         rule.tiles = {{1, 512}};
         return rule;
       }},
      {{"samuon", "muon whose leading singular directions get steps of graded length",
        "arXiv 2608.25990"},
       Samuon},
      {{"samuon_lite", "samuon that shapes the one leading direction", "arXiv 2608.25990"},
       [] {
         Rule rule = Samuon();
         rule.shaped_directions = 1;
         return rule;
       }},
      {{"cmuon", "muon on each split of a fused matrix (set splits or num_heads)",
        "arXiv 2608.02502"},
       Muon},
      {{"dion2", "the quarter of the rows with most momentum is orthogonalised, the rest waits",
        "arXiv 2608.11612; github.com/microsoft/dion"},
       Dion2},
      {{"dion3", "dion2 with row variance", "arXiv 2608.11612; github.com/microsoft/dion"},
       [] {
         Rule rule = Dion2();
         rule.row_variance_beta2 = 0.95;
         return rule;
       }},
      {{"normuon", "muon whose rows are levelled by a running variance", "arXiv 2510.05491"},
       [] {
         Rule rule = Muon();
         rule.row_variance_beta2 = 0.95;
         return rule;
       }},
      {{"turbo_muon", "muon preconditioned row by row, with one iteration less",
        "arXiv 2512.04632"},
       [] {
         Rule rule = Muon();
         rule.normalise = Normalise::kAol;
         rule.coefficients = CoefficientTable::kTurbo;
         return rule;
       }},
      {{"himuon", "muon tile by tile", "arXiv 2606.27216"},
       [] {
         Rule rule = Spectral(MomentumKind::kHeavyBall, 0.02, 0.1, ScaleKind::kMatchRmsAdamw);
         rule.tiles = {{1, 512}};
         rule.scale_of = ScaleOf::kTile;
         return rule;
       }},
  };
  return table;
}

const std::vector<Preset>& OtherPresets() {
  static const auto& table = *new std::vector<Preset>{
      {{"polora", "a LoRA pair, stepped so that the product moves by at most lr in spectral norm",
        "arXiv 2607.17620; its lr is our choice"},
       [] {
         Rule rule;
         rule.family = RuleFamily::kPolora;
         rule.lr = 0.02;
         rule.coefficients = CoefficientTable::kPolarExpress;
         rule.beta1 = 0.9;
         rule.beta2 = 0.99;
         rule.delta = 1e-4;
         return rule;
       }},
      {{"adamw", "bias-corrected Adam with decoupled weight decay", "arXiv 1711.05101"},
       [] { return Elementwise(RuleFamily::kAdamw, 1e-3, 0.9, 0.95, 1e-8); }},
      {{"lion", "sign of an interpolated momentum", "arXiv 2302.06675"},
       [] { return Elementwise(RuleFamily::kLion, 1e-4, 0.9, 0.99, 0); }},
      {{"sgd", "gradient descent with heavy-ball momentum", "Polyak 1964; torch.optim.SGD"},
       [] { return Elementwise(RuleFamily::kSgd, 0.1, 0, 0, 0); }},
  };
  return table;
}

const std::vector<Preset>& PresetTable() {
  static const auto& table = *[] {
    auto* all = new std::vector<Preset>(SpectralPresets());
    all->insert(all->end(), OtherPresets().begin(), OtherPresets().end());
    return all;
  }();
  return table;
}

}  // namespace

const std::vector<PresetInfo>& Presets() {
  static const auto& infos = *[] {
    auto* infos = new std::vector<PresetInfo>();
    for (const Preset& preset : PresetTable()) infos->push_back(preset.info);
    return infos;
  }();
  return infos;
}

absl::StatusOr<Rule> PresetRule(std::string_view name) {
  std::vector<std::string_view> names;
  for (const Preset& preset : PresetTable()) {
    if (preset.info.name == name) {
      Rule rule = preset.make();
      rule.preset = std::string(name);
      return rule;
    }
    names.push_back(preset.info.name);
  }
  const std::string_view nearest = NearestName(name, names);
  const std::string hint =
      nearest.empty() ? "" : absl::StrCat("did you mean \"", std::string(nearest), "\"? ");
  const std::string known =
      absl::StrJoin(names, ", ", [](std::string* out, std::string_view n) { out->append(n); });
  return absl::InvalidArgumentError(
      absl::StrCat("unknown preset \"", PrintableName(name), "\"; ", hint, "Known: ", known));
}

}  // namespace stiefel
