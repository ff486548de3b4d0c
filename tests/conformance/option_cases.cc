#include "tests/conformance/option_cases.h"

#include <map>

namespace stiefel {
namespace {

// Not among them, since their accuracy has criteria of their own: compute=bf16
// (low_precision_test), which here would be auto's choice on no matrix of these sizes, fp16 and
// tf32, which belong to other devices, and a Gram form that never restarts.
const std::map<std::string, std::vector<std::string>>& Values() {
  static const auto& values = *new std::map<std::string, std::vector<std::string>>{
      {"lr", {"0.7"}},
      {"weight_decay", {"0.2"}},
      {"momentum", {"ema", "heavy_ball", "accumulate", "ema_bias_corrected"}},
      {"beta", {"0", "0.6"}},
      {"nesterov", {"true", "false"}},
      {"period", {"1", "2", "3"}},
      {"phase", {"staggered", "synchronised", "1"}},
      {"off_refresh", {"row_wise", "tiled"}},
      {"row_scale", {"unit", "rms"}},
      {"row_rms", {"0.3"}},
      {"row_axis", {"cols", "long", "short"}},
      {"off_refresh_lr_ratio", {"0.4"}},
      {"row_spectral_max", {"1.2"}},
      {"coefficients",
       {"keller_jordan", "you", "turbo", "polar_express", "convergent",
        "3.4445,-4.775,2.0315;2.8769,-3.1427,1.2046"}},
      {"steps", {"2", "4", "7"}},
      {"safety", {"1", "1.02"}},
      {"normalise", {"frobenius", "aol"}},
      {"eps_mode", {"none", "add", "clamp"}},
      {"eps", {"0", "0.3"}},
      {"form", {"auto", "standard", "gram"}},
      {"restarts", {"1", "1,3", "2"}},
      {"compute", {"fp32"}},
      {"num_heads", {"2", "3"}},
      {"tile", {"none", "7", "16", "2:9"}},
      {"select_fraction", {"0.1", "0.6", "1"}},
      {"damping", {"0.7", "1"}},
      {"select_axis", {"short"}},
      {"gain", {"1", "3.5"}},
      {"shaped_directions", {"1", "4"}},
      {"warmup", {"4"}},
      {"deflation", {"paper"}},
      {"row_variance_beta2", {"none", "0.8"}},
      {"row_variance_eps", {"0.001"}},
      {"scale", {"none", "original", "match_rms_adamw", "spectral", "spectral_max", "0.3"}},
      {"scale_of", {"full", "split", "tile"}},
      {"beta1", {"0.5"}},
      {"beta2", {"0.7"}},
      {"pair", {"other"}},
      {"factor", {"a", "b"}},
      {"product_scale", {"2"}},
      {"delta", {"0.01"}}};
  return values;
}

}  // namespace

std::vector<OptionChange> ChangesOf(const std::string& key, int64_t rows) {
  std::vector<OptionChange> changes;
  if (key == "splits") {
    const int64_t first = rows / 3, second = rows / 2 - first;
    if (first > 0 && second > 0) {
      changes.push_back({key, std::to_string(first) + "," + std::to_string(second) + "," +
                                  std::to_string(rows - first - second)});
    }
    changes.push_back({key, std::to_string(rows)});
    return changes;
  }
  const auto found = Values().find(key);
  if (found == Values().end()) return changes;
  for (const std::string& value : found->second) changes.push_back({key, value});
  return changes;
}

std::vector<Rule> Combined(const std::string& preset, const std::vector<OptionChange>& changes,
                           int64_t rows, int64_t cols) {
  Rule rule = PresetRule(preset).value();
  for (const auto& [key, value] : changes) {
    if (!SetOption(rule, key, value).ok()) return {};
  }
  if (ChangedOptions(rule).empty() || !ValidateRule(rule, rows, cols).ok()) return {};
  return {rule};
}

}  // namespace stiefel
