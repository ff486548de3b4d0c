// The option table: one row per option name of the update rules (section 8).
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "plan/nearest.h"
#include "plan/option_access.h"
#include "plan/rule.h"

namespace stiefel {
namespace {

constexpr int64_t kMaxPeriod = 1000000;
constexpr int64_t kMaxHeads = 1 << 16;           // each is a unit of work of its own
constexpr int64_t kMaxCount = int64_t{1} << 40;  // directions, steps of warm-up

// Families as a bit set.
constexpr unsigned Bit(RuleFamily family) { return 1u << static_cast<unsigned>(family); }
constexpr unsigned kSpectral = Bit(RuleFamily::kSpectral);
constexpr unsigned kAdamw = Bit(RuleFamily::kAdamw);
constexpr unsigned kLion = Bit(RuleFamily::kLion);
constexpr unsigned kSgd = Bit(RuleFamily::kSgd);
constexpr unsigned kPolora = Bit(RuleFamily::kPolora);
constexpr unsigned kAll = kSpectral | kAdamw | kLion | kSgd | kPolora;

struct Option {
  std::string_view key;
  unsigned families;           // that use it
  std::string_view otherwise;  // why the others cannot; polora has a reason of its own
  OptionSetter set;
  OptionGetter get;
};

Option Row(std::string_view key, unsigned families, std::string_view otherwise,
           OptionAccess access) {
  return {key, families, otherwise, std::move(access.first), std::move(access.second)};
}

template <typename E>
Option ChoiceRow(std::string_view key, std::string_view otherwise, E Rule::*field,
                 std::vector<Choice<E>> choices) {
  return Row(key, kSpectral, otherwise, OneOf(field, std::move(choices)));
}

constexpr std::string_view kNoPolar = "it works element by element and orthogonalises nothing";
constexpr std::string_view kNoPeriod = "it works element by element, alike in every step";
constexpr std::string_view kNoPair = "it steps each parameter on its own, and polora a pair";

void AddMomentumOptions(std::vector<Option>* table) {
  table->insert(table->end(),
                {Row("lr", kAll, "", Number(&Rule::lr, kNotNegative)),
                 Row("weight_decay", kAll, "", Number(&Rule::weight_decay, kNotNegative)),
                 ChoiceRow("momentum", "its kind of momentum is fixed", &Rule::momentum,
                           {{"ema", MomentumKind::kEma},
                            {"heavy_ball", MomentumKind::kHeavyBall},
                            {"accumulate", MomentumKind::kAccumulate},
                            {"ema_bias_corrected", MomentumKind::kEmaBiasCorrected}}),
                 Row("beta", kSpectral | kSgd, "its coefficients are beta1 and beta2",
                     Number(&Rule::beta, kBelowOne)),
                 Row("nesterov", kSpectral, "it has no look-ahead", Boolean(&Rule::nesterov))});
}

void AddPeriodOptions(std::vector<Option>* table) {
  table->insert(table->end(),
                {Row("period", kSpectral, kNoPeriod,
                     Integer(&Rule::period, 1, kMaxPeriod, "a number of steps")),
                 Row("phase", kSpectral, kNoPeriod, PhaseOption()),
                 ChoiceRow("off_refresh", kNoPeriod, &Rule::off_refresh,
                           {{"row_wise", OffRefresh::kRowWise}, {"tiled", OffRefresh::kTiled}}),
                 ChoiceRow("row_scale", kNoPeriod, &Rule::row_scale,
                           {{"match_polar_fro", RowScale::kMatchPolarFro},
                            {"unit", RowScale::kUnit},
                            {"rms", RowScale::kRms}}),
                 Row("row_rms", kSpectral, kNoPeriod, Number(&Rule::row_rms, kNotNegative)),
                 ChoiceRow("row_axis", kNoPeriod, &Rule::row_axis,
                           {{"rows", RowAxis::kRows},
                            {"cols", RowAxis::kCols},
                            {"long", RowAxis::kLong},
                            {"short", RowAxis::kShort}}),
                 Row("off_refresh_lr_ratio", kSpectral, kNoPeriod,
                     Number(&Rule::off_refresh_lr_ratio, kNotNegative)),
                 Row("row_spectral_max", kSpectral, kNoPeriod,
                     Number(&Rule::row_spectral_max, kNotNegative))});
}

void AddPolarOptions(std::vector<Option>* table) {
  table->insert(
      table->end(),
      {Row("coefficients", kSpectral | kPolora, kNoPolar, CoefficientsOption()),
       Row("steps", kSpectral | kPolora, kNoPolar, StepsOption()),
       Row("safety", kSpectral | kPolora, kNoPolar, SafetyOption()),
       ChoiceRow("normalise", kNoPolar, &Rule::normalise,
                 {{"frobenius", Normalise::kFrobenius}, {"aol", Normalise::kAol}}),
       ChoiceRow("eps_mode", kNoPolar, &Rule::eps_mode,
                 {{"none", EpsMode::kNone}, {"add", EpsMode::kAdd}, {"clamp", EpsMode::kClamp}}),
       Row("eps", kSpectral | kAdamw, "its update divides by nothing",
           Number(&Rule::eps, kNotNegative)),
       ChoiceRow("form", kNoPolar, &Rule::form,
                 {{"auto", PolarForm::kAuto},
                  {"standard", PolarForm::kStandard},
                  {"gram", PolarForm::kGram}}),
       Row("restarts", kSpectral, kNoPolar, RestartsOption()),
       ChoiceRow("compute", "it is always computed in fp32", &Rule::compute,
                 {{"auto", ComputeType::kAuto},
                  {"fp32", ComputeType::kFp32},
                  {"bf16", ComputeType::kBf16},
                  {"fp16", ComputeType::kFp16},
                  {"tf32", ComputeType::kTf32}})});
}

void AddPartOptions(std::vector<Option>* table) {
  table->insert(
      table->end(),
      {Row("splits", kSpectral, kNoPolar, SplitsOption()),
       Row("num_heads", kSpectral, kNoPolar,
           Integer(&Rule::num_heads, 1, kMaxHeads, "a number of heads")),
       Row("tile", kSpectral, kNoPolar, TileOption()),
       Row("select_fraction", kSpectral, kNoPolar, Number(&Rule::select_fraction, kFraction)),
       Row("damping", kSpectral, kNoPolar, Number(&Rule::damping, kFraction)),
       ChoiceRow("select_axis", kNoPolar, &Rule::select_axis,
                 {{"rows", SelectAxis::kRows}, {"short", SelectAxis::kShort}})});
}

void AddShapingOptions(std::vector<Option>* table) {
  table->insert(
      table->end(),
      {Row("gain", kSpectral, kNoPolar, Number(&Rule::gain, kPositive)),
       Row("shaped_directions", kSpectral, kNoPolar,
           OptionalInteger(&Rule::shaped_directions, 1, kMaxCount, "a number of directions")),
       Row("warmup", kSpectral, kNoPolar,
           Integer(&Rule::warmup, 0, kMaxCount, "a number of steps")),
       ChoiceRow("deflation", kNoPolar, &Rule::deflation,
                 {{"consistent", Deflation::kConsistent}, {"paper", Deflation::kPaper}}),
       Row("row_variance_beta2", kSpectral, kNoPolar,
           OptionalNumber(&Rule::row_variance_beta2, kBelowOne)),
       Row("row_variance_eps", kSpectral, kNoPolar, Number(&Rule::row_variance_eps, kPositive)),
       Row("scale", kSpectral, "its step length is lr alone", ScaleOption()),
       ChoiceRow(
           "scale_of", "its step length is lr alone", &Rule::scale_of,
           {{"full", ScaleOf::kFull}, {"split", ScaleOf::kSplit}, {"tile", ScaleOf::kTile}})});
}

void AddOtherOptions(std::vector<Option>* table) {
  table->insert(table->end(),
                {Row("beta1", kAdamw | kLion | kPolora, "its coefficient is beta",
                     Number(&Rule::beta1, kBelowOne)),
                 Row("beta2", kAdamw | kLion | kPolora, "it keeps no second average",
                     Number(&Rule::beta2, kBelowOne)),
                 Row("pair", kPolora, kNoPair, Text(&Rule::pair)),
                 Row("factor", kPolora, kNoPair, FactorOption()),
                 Row("product_scale", kPolora, kNoPair, Number(&Rule::product_scale, kPositive)),
                 Row("delta", kPolora, kNoPair, Number(&Rule::delta, kFraction))});
}

const std::vector<Option>& OptionTable() {
  static const auto& table = *[] {
    auto* rows = new std::vector<Option>();
    AddMomentumOptions(rows);
    AddPeriodOptions(rows);
    AddPolarOptions(rows);
    AddPartOptions(rows);
    AddShapingOptions(rows);
    AddOtherOptions(rows);
    return rows;
  }();
  return table;
}

std::string WhyNot(const Option& option, RuleFamily family) {
  if (family != RuleFamily::kPolora) return std::string(option.otherwise);
  std::vector<std::string> used;
  for (const Option& other : OptionTable()) {
    if (other.families & kPolora) used.emplace_back(other.key);
  }
  return absl::StrCat("a coupled pair has its own pipeline, whose options are ",
                      absl::StrJoin(used, ", "));
}

// What other packages call some options, and what these are here.
constexpr std::pair<std::string_view, const char*> kElsewhere[] = {
    {"learning_rate", "; here it is lr"},
    {"wd", "; here it is weight_decay"},
    {"decay", "; here it is weight_decay"},
    {"mu", "; here it is beta"},
    {"momentum_beta", "; here it is beta"},
    {"betas", "; here they are beta1 and beta2"},
    {"nesterov_momentum", "; here it is nesterov"},
    {"ns_steps", "; here it is steps"},
    {"epsilon", "; here it is eps"},
    {"stack_dims",
     "; it belongs to the parameter, not to its rule: --stack-dims of stiefelctl "
     "apply, \"stack_dims\" beside \"shape\" in model files"}};

// How the message that `key` is unknown goes on.
std::string HintFor(const Rule& rule, std::string_view key) {
  for (const auto& [name, hint] : kElsewhere) {
    if (name == key) return hint;
  }
  const std::string_view nearest = NearestName(key, OptionKeys());
  if (!nearest.empty()) return absl::StrCat("; did you mean \"", std::string(nearest), "\"?");
  std::vector<std::string> keys;
  for (const Option& option : OptionTable()) {
    if (option.families & Bit(rule.family)) keys.emplace_back(option.key);
  }
  return absl::StrCat("; preset ", rule.preset, " has ", absl::StrJoin(keys, ", "));
}

}  // namespace

absl::Status SetOption(Rule& rule, std::string_view key, std::string_view value) {
  for (const Option& option : OptionTable()) {
    if (option.key != key) continue;
    if ((option.families & Bit(rule.family)) == 0) {
      return absl::InvalidArgumentError(absl::StrCat("preset ", rule.preset, " cannot use option ",
                                                     std::string(key), ": ",
                                                     WhyNot(option, rule.family)));
    }
    absl::Status status = option.set(rule, value);
    if (status.ok()) return status;
    return absl::InvalidArgumentError(absl::StrCat("option ", std::string(key), " of preset ",
                                                   rule.preset, ": ",
                                                   std::string(status.message())));
  }
  return absl::InvalidArgumentError(
      absl::StrCat("unknown option \"", PrintableName(key), "\"", HintFor(rule, key)));
}

std::vector<std::pair<std::string, std::string>> Options(const Rule& rule) {
  std::vector<std::pair<std::string, std::string>> options;
  for (const Option& option : OptionTable()) {
    if (option.families & Bit(rule.family))
      options.emplace_back(std::string(option.key), option.get(rule));
  }
  return options;
}

std::vector<std::pair<std::string, std::string>> ChangedOptions(const Rule& rule) {
  std::vector<std::pair<std::string, std::string>> changed;
  absl::StatusOr<Rule> base = PresetRule(rule.preset);
  if (!base.ok()) return changed;
  for (const Option& option : OptionTable()) {
    if ((option.families & Bit(rule.family)) == 0) continue;
    // Compared with the base as it is by now: another coefficient table has other default steps.
    std::string value = option.get(rule);
    if (option.get(*base) == value || !option.set(*base, value).ok()) continue;
    changed.emplace_back(std::string(option.key), std::move(value));
  }
  return changed;
}

std::vector<std::string_view> OptionKeys() {
  std::vector<std::string_view> keys;
  for (const Option& option : OptionTable()) keys.push_back(option.key);
  return keys;
}

}  // namespace stiefel
