// The update rule of one parameter: every option explicit, every preset a row of a table.
//
// A Rule is plain data. It is made by PresetRule(), changed by SetOption() and checked, together
// with the shape it is meant for, by ValidateRule(). Option names are the same in the protocol
// (proto field names), on command lines (--set key=value) and in Python (keyword arguments). What
// each option means is stated in proto/stiefel/v1/rule.proto; the mathematics is that of
// docs/RULES.md (section numbers below).
//
// Everything here is pure and thread-safe: functions of their arguments and of constant tables.
#ifndef STIEFEL_PLAN_RULE_H_
#define STIEFEL_PLAN_RULE_H_

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "plan/coefficients.h"

namespace stiefel {

// What a step does to a matrix of a periodic rule: the spectral map, or the cheap step in between.
// Rules without a period (K = 1, and all element-wise rules) only ever refresh.
enum class StepKind { kRefresh, kOffRefresh };

// Which pipeline the rule runs through. Spectral: momentum, orthogonalise, scale. Others:
// element-wise.
enum class RuleFamily { kSpectral, kAdamw, kLion, kSgd };

// M <- b M + (1-b) G | b M + G | EMA whose look-ahead divides by 1 - b^t (optax).
enum class MomentumKind { kEma, kHeavyBall, kEmaBiasCorrected };
enum class PhaseMode { kStaggered, kSynchronised, kNumber };
enum class RowScale { kMatchPolarFro, kUnit, kRms };
// Which vectors a row-wise step normalises: the rows, the columns, or those of which there are more
// (kLong) or fewer (kShort); the rows where there are as many.
enum class RowAxis { kRows, kCols, kLong, kShort };
enum class EpsMode { kNone, kAdd, kClamp };
enum class PolarForm { kAuto, kStandard, kGram };
enum class ComputeType { kAuto, kFp32, kBf16 };
enum class ScaleKind { kNone, kOriginal, kMatchRmsAdamw, kSpectral, kSpectralMax, kNumber };

// Options that a family does not use keep the values below and are ignored by it; SetOption refuses
// them.
struct Rule {
  std::string preset;
  RuleFamily family = RuleFamily::kSpectral;

  double lr = 0;
  double weight_decay = 0;

  // Spectral, and beta also for sgd.
  MomentumKind momentum = MomentumKind::kEma;
  double beta = 0;
  bool nesterov = false;

  // Periodic rules: refresh at steps t with (t-1) mod period == phase.
  int64_t period = 1;
  PhaseMode phase_mode = PhaseMode::kStaggered;
  int64_t phase = 0;  // of kNumber
  RowScale row_scale = RowScale::kMatchPolarFro;
  double row_rms = 0;  // of kRms: RMS of each entry
  RowAxis row_axis = RowAxis::kRows;
  double off_refresh_lr_ratio = 1;
  double row_spectral_max = 0;  // 0: no cap

  // Orthogonaliser. Unset steps and safety are those of the coefficient table, unset restarts those
  // of the precision.
  CoefficientTable coefficients = CoefficientTable::kKellerJordan;
  std::vector<Coefficients> coefficient_list;  // of kList
  std::optional<int64_t> steps;
  std::optional<double> safety;
  EpsMode eps_mode = EpsMode::kNone;
  double eps = 0;  // also adamw's
  PolarForm form = PolarForm::kAuto;
  std::optional<std::vector<int64_t>> restarts;
  ComputeType compute = ComputeType::kAuto;

  ScaleKind scale = ScaleKind::kNone;
  double scale_number = 1;  // of ScaleKind::kNumber

  // adamw, lion.
  double beta1 = 0;
  double beta2 = 0;
};

// One row of the preset table, for listings and documentation.
struct PresetInfo {
  std::string_view name;
  std::string_view summary;
  std::string_view source;  // paper or repository that it follows
};
const std::vector<PresetInfo>& Presets();

// The rule that a preset names. INVALID_ARGUMENT with the nearest known name otherwise.
absl::StatusOr<Rule> PresetRule(std::string_view name);

// Sets one option from text. INVALID_ARGUMENT, and `rule` unchanged: an unknown key (names the
// nearest known one), a key that the rule's family cannot use (says why), a value that does not
// parse or is out of range (shows the value and what is accepted). Options that depend on each
// other are checked by ValidateRule, so that order never matters.
absl::Status SetOption(Rule& rule, std::string_view key, std::string_view value);

// All options that the rule's family uses, as (key, canonical value) in documented order. Applying
// them to PresetRule(rule.preset) gives a rule with the same list: two rules act alike exactly if
// their lists are equal.
std::vector<std::pair<std::string, std::string>> Options(const Rule& rule);

// Those of Options(rule) that the preset, with the ones before them set, does not have already:
// what has to be sent or shown. Setting them in order on PresetRule(rule.preset) gives the rule.
std::vector<std::pair<std::string, std::string>> ChangedOptions(const Rule& rule);

// Every option name of every family, in documented order.
std::vector<std::string_view> OptionKeys();

// Whether the rule can be applied to a rows x cols matrix that was registered as a parameter of
// `dimensions` dimensions. INVALID_ARGUMENT: sizes that are not positive or whose product
// overflows, an option out of range, options that contradict each other, a spectral rule on a 1-D
// parameter (with a hint which presets fit).
absl::Status ValidateRule(const Rule& rule, int64_t rows, int64_t cols, int dimensions = 2);

// REQUIRES: a valid rule, 0 <= phase < rule.period, step >= 1.
StepKind KindAtStep(const Rule& rule, int64_t phase, int64_t step);

// Names of the fp32 buffers (rows x cols each) that the rule keeps per matrix, in order.
std::vector<std::string> RuleState(const Rule& rule);

// The factor s that multiplies the orthogonalised update of a rows x cols matrix (section 5); 1 for
// element-wise families.
double ScaleFactor(const Rule& rule, int64_t rows, int64_t cols);

// The Newton-Schulz iterations that a spectral rule runs, divided by its safety factor. REQUIRES: a
// valid rule.
std::vector<Coefficients> PolarCoefficients(const Rule& rule);

// Iterations before which the Gram form rebuilds its Gram matrix: the rule's own, or {2} in fp32
// and {2, 4} in bf16, without those that are not below the number of iterations.
std::vector<int64_t> GramRestarts(const Rule& rule, bool low_precision);

// "muon", or "muon lr=0.01 period=3": the preset and what differs from it.
std::string DescribeRule(const Rule& rule);

}  // namespace stiefel

#endif  // STIEFEL_PLAN_RULE_H_
