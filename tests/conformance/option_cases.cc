#include "tests/conformance/option_cases.h"

#include <algorithm>
#include <map>
#include <random>
#include <set>

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

// Sides from 1 to 300, mostly small: tall, wide and square.
class Shapes {
 public:
  explicit Shapes(uint64_t seed) : random_(seed) {}

  std::pair<int64_t, int64_t> Next() {
    // A third are square, which neither side of is special.
    const int64_t rows = Side(), cols = Pick(3) == 0 ? rows : Side();
    // One dimension, and few large ones.
    if (rows * cols > 100 * 100 && Pick(8) > 0) return {rows, 1 + Pick(20)};
    return {rows, cols};
  }
  int64_t Pick(int64_t n) { return static_cast<int64_t>(random_() % static_cast<uint64_t>(n)); }

 private:
  int64_t Side() {
    const int64_t kind = Pick(10);
    return kind == 0 ? 1 : kind == 1 ? 1 + Pick(300) : 2 + Pick(40);
  }

  std::mt19937_64 random_;
};

std::vector<OptionCase> MakeAllCases() {
  Shapes shapes(7);
  std::vector<OptionCase> cases;
  std::vector<std::string> keys;
  for (std::string_view key : OptionKeys()) keys.emplace_back(key);
  for (const PresetInfo& info : Presets()) {
    for (size_t a = 0; a < keys.size(); ++a) {
      for (size_t b = a; b < keys.size(); ++b) {
        auto [rows, cols] = shapes.Next();
        if (info.name == "polora") {  // of which either side may be the rank
          rows = 1 + rows % 40;
          cols = 1 + cols % 40;
        }
        for (const OptionChange& first : ChangesOf(keys[a], rows)) {
          for (const OptionChange& second : ChangesOf(keys[b], rows)) {
            if (a == b && first != second) continue;
            const std::vector<OptionChange> changes = {first, second};
            for (const Rule& rule : Combined(std::string(info.name), changes, rows, cols))
              cases.push_back({rule, rows, cols, changes});
          }
        }
      }
    }
  }
  return cases;
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

const std::vector<OptionCase>& AllOptionCases() {
  static const auto& cases = *new std::vector<OptionCase>(MakeAllCases());
  return cases;
}

std::vector<OptionCase> Sampled(std::vector<OptionCase> cases, size_t count, uint64_t seed) {
  std::shuffle(cases.begin(), cases.end(), std::mt19937_64(seed));
  std::set<std::string> seen;
  std::vector<OptionCase> chosen, others;
  for (OptionCase& c : cases) {
    bool fresh = false;
    for (const auto& [key, value] : c.changes)
      fresh |= seen.insert(key == "splits" ? key : key + "=" + value).second;
    (fresh ? chosen : others).push_back(std::move(c));
  }
  for (size_t i = 0; i < others.size() && chosen.size() < count; ++i)
    chosen.push_back(std::move(others[i]));
  return chosen;
}

int64_t PhaseOf(const OptionCase& option_case, size_t index) {
  const Rule& rule = option_case.rule;
  return rule.phase_mode == PhaseMode::kNumber
             ? rule.phase
             : static_cast<int64_t>(index) % std::min<int64_t>(rule.period, 3);
}

}  // namespace stiefel
