#include "plan/option_samples.h"

#include <map>

namespace stiefel {

const std::vector<std::string>& SampleValues(std::string_view key) {
  static const auto& samples = *new std::map<std::string, std::vector<std::string>, std::less<>>{
      {"lr", {"0", "0.3", "1e-300"}},
      {"weight_decay", {"0", "0.1"}},
      {"momentum", {"ema", "heavy_ball", "accumulate", "ema_bias_corrected"}},
      {"beta", {"0", "0.9"}},
      {"nesterov", {"true", "false"}},
      {"period", {"1", "3", "1000000"}},
      {"phase", {"staggered", "synchronised", "0", "2"}},
      {"off_refresh", {"row_wise", "tiled"}},
      {"row_scale", {"match_polar_fro", "unit", "rms"}},
      {"row_rms", {"0", "0.2"}},
      {"row_axis", {"rows", "cols", "long", "short"}},
      {"off_refresh_lr_ratio", {"0", "0.5"}},
      {"row_spectral_max", {"0", "1.5"}},
      {"coefficients",
       {"keller_jordan", "you", "turbo", "polar_express", "convergent",
        "1.5,-0.5,0;1.875,-1.25,0.375"}},
      {"steps", {"1", "3", "64"}},
      {"safety", {"1", "1.01", "2"}},
      {"normalise", {"frobenius", "aol"}},
      {"eps_mode", {"none", "add", "clamp"}},
      {"eps", {"0", "1e-07"}},
      {"form", {"auto", "standard", "gram"}},
      {"restarts", {"auto", "none", "1,3"}},
      {"compute", {"auto", "fp32", "bf16", "fp16", "tf32"}},
      {"splits", {"none", "24", "8,4,12"}},
      {"num_heads", {"1", "4"}},
      {"tile", {"none", "5", "5,3:8", "2:5,4:none"}},
      {"select_fraction", {"0.1", "0.25", "1"}},
      {"damping", {"0.5", "0.95", "1"}},
      {"select_axis", {"rows", "short"}},
      {"gain", {"0.5", "1", "3.54", "14"}},
      {"shaped_directions", {"auto", "1", "3"}},
      {"warmup", {"0", "3"}},
      {"deflation", {"consistent", "paper"}},
      {"row_variance_beta2", {"none", "0", "0.95"}},
      {"row_variance_eps", {"1e-10", "1e-08"}},
      {"scale", {"none", "original", "match_rms_adamw", "spectral", "spectral_max", "0.3"}},
      {"scale_of", {"full", "split", "tile"}},
      {"beta1", {"0", "0.8"}},
      {"beta2", {"0", "0.999"}},
      {"pair", {"", "h.0.attn.lora_b"}},
      {"factor", {"auto", "a", "b"}},
      {"product_scale", {"0.5", "2"}},
      {"delta", {"1e-06", "1"}},
  };
  static const std::vector<std::string> none;
  const auto found = samples.find(key);
  return found == samples.end() ? none : found->second;
}

std::vector<SampledRule> RulesWithOneOptionChanged() {
  std::vector<SampledRule> rules;
  for (const PresetInfo& preset : Presets()) {
    const Rule base = *PresetRule(preset.name);
    for (const auto& [key, unused] : Options(base)) {
      for (const std::string& value : SampleValues(key)) {
        SampledRule sampled{base, {{key, value}}};
        if (SetOption(sampled.rule, key, value).ok()) rules.push_back(std::move(sampled));
      }
    }
  }
  return rules;
}

}  // namespace stiefel
