// The update rule of one parameter: every option explicit, every preset a row of a table.
//
// A Rule is plain data. It is made by PresetRule(), changed by SetOption() and checked, together
// with the shape it is meant for, by ValidateRule(). Option names are the same in the protocol
// (proto field names), on command lines (--set key=value) and in Python (keyword arguments). What
// each option means is stated in proto/stiefel/v1/rule.proto; the mathematics is that of
// docs/mathematics.md (section numbers below).
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

// Which pipeline the rule runs through. Spectral: momentum, select, orthogonalise, shape,
// normalise, scale. Polora: a coupled pair of low-rank factors. Others: element-wise.
enum class RuleFamily { kSpectral, kAdamw, kLion, kSgd, kPolora };

// M <- b M + (1-b) G | b M + G | M + G | EMA whose look-ahead divides by 1 - b^t (optax).
enum class MomentumKind { kEma, kHeavyBall, kAccumulate, kEmaBiasCorrected };
enum class PhaseMode { kStaggered, kSynchronised, kNumber };
enum class RowScale { kMatchPolarFro, kUnit, kRms };
// Which vectors a row-wise step normalises: the rows, the columns, or those of which there are more
// (kLong) or fewer (kShort); the rows where there are as many.
enum class RowAxis { kRows, kCols, kLong, kShort };
// What a periodic rule does between refreshes: normalise rows, or orthogonalise tile by tile
// (MuonBP).
enum class OffRefresh { kRowWise, kTiled };
// The preconditioner of the iteration: one factor, or one per row of the short side (AOL,
// Turbo-Muon).
enum class Normalise { kFrobenius, kAol };
enum class SelectAxis { kRows, kShort };
// How a leading direction is taken out before it is put back with its own length (SAMuon): by what
// O really has there, or by 1 as the paper does.
enum class Deflation { kConsistent, kPaper };
// Whose shape the scale is computed from.
enum class ScaleOf { kFull, kSplit, kTile };
// Which factor of the product B A a matrix is: a is r x d_in, b is d_out x r.
enum class PoloraFactor { kA, kB };
enum class EpsMode { kNone, kAdd, kClamp };
enum class PolarForm { kAuto, kStandard, kGram };
enum class ComputeType { kAuto, kFp32, kBf16, kFp16, kTf32 };
enum class ScaleKind { kNone, kOriginal, kMatchRmsAdamw, kSpectral, kSpectralMax, kNumber };

// Tile size from a step on.
struct TileFrom {
  int64_t step = 1;
  int64_t tile = 0;  // 0: whole matrices
};

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
  OffRefresh off_refresh = OffRefresh::kRowWise;
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
  Normalise normalise = Normalise::kFrobenius;
  EpsMode eps_mode = EpsMode::kNone;
  double eps = 0;  // also adamw's
  PolarForm form = PolarForm::kAuto;
  std::optional<std::vector<int64_t>> restarts;
  ComputeType compute = ComputeType::kAuto;

  ScaleKind scale = ScaleKind::kNone;
  double scale_number = 1;  // of ScaleKind::kNumber
  ScaleOf scale_of = ScaleOf::kSplit;

  // What is orthogonalised on its own: row ranges (their sizes, in order, adding up to the rows;
  // empty: one), or num_heads equal ones; within them tiles, by step ascending (empty: whole).
  std::vector<int64_t> splits;
  int64_t num_heads = 1;
  std::vector<TileFrom> tiles;

  // Row selection: the ceil(select_fraction rows) rows of largest l1 norm; the momentum of these is
  // multiplied by damping after extraction.
  double select_fraction = 1;
  double damping = 1;
  SelectAxis select_axis = SelectAxis::kRows;

  // Spectral shaping; gain 1 is off.
  double gain = 1;
  std::optional<int64_t> shaped_directions;  // k; unset: floor(32 sqrt(d / 512)), d the short side
  int64_t warmup = 0;                        // steps
  Deflation deflation = Deflation::kConsistent;

  // Row variance; unset is off.
  std::optional<double> row_variance_beta2;
  double row_variance_eps = 1e-8;

  // adamw, lion, polora.
  double beta1 = 0;
  double beta2 = 0;

  // polora.
  std::string pair;                    // name of the parameter that is the other factor
  std::optional<PoloraFactor> factor;  // unset: a where rows < cols, b where rows > cols
  double product_scale = 1;
  double delta = 0;
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
// `dimensions` dimensions (of each matrix, for a stack: see plan/shape.h). INVALID_ARGUMENT, with
// the reason and the numbers: sizes that are not positive or whose product overflows; an option out
// of range; options that contradict each other or have no effect, unless they are the preset's own
// (samuon with gain=1 is Muon, not an error); deflation=paper where gain (1 - f) >= 1, f the least
// value of the polar map on [0.01, 1]; a spectral rule on a 1-D parameter (with a hint which
// presets fit). The partner of a polora factor is not looked at: that is ValidatePair's.
absl::Status ValidateRule(const Rule& rule, int64_t rows, int64_t cols, int dimensions = 2);

// REQUIRES: a valid rule, 0 <= phase < rule.period, step >= 1.
StepKind KindAtStep(const Rule& rule, int64_t phase, int64_t step);

// A buffer of the rule's state: fp32, all zero before the first step. Element-wise ones have the
// shape of the matrix and are functions of the gradients alone, so that they can be taken in after
// the decision; the others are small, and their new value is always staged.
struct StateBuffer {
  std::string name;
  int64_t rows = 0, cols = 0;
  bool elementwise = false;
};

// The buffers of a rows x cols matrix, in order, element-wise ones first:
//
//   momentum            rows x cols: all but sgd with beta = 0
//   variance            rows x cols: adamw
//   selected            rows x 1, or 1 x cols where columns are selected: 1 where the last step
//                       selected, else 0 (select_fraction < 1 or damping != 1)
//   row_variance        rows x 1
//   leading_directions  1 x the sum over splits of k min(rows, cols) of the split: unit vectors
//                       along the short side, one after the other (gain != 1)
//   factor_variance     polora: q, 1 x cols, of factor a; p, rows x 1, of factor b. An entry of 0
//                       stands for 1e-12.
//
// REQUIRES: a rule that is valid for the shape.
std::vector<StateBuffer> RuleState(const Rule& rule, int64_t rows, int64_t cols);

// The factor s of section 5 for an update of this shape; 1 for other families than kSpectral.
double ScaleFactor(const Rule& rule, int64_t rows, int64_t cols);

// Rows of each split, in order; {rows} without splits. REQUIRES: a rule that is valid for these
// rows.
std::vector<int64_t> SplitRows(const Rule& rule, int64_t rows);

// The rule that acts on each split alone: without splits, and with the scale of the whole rows x
// cols matrix as a number where scale_of says full. A fused matrix is exactly its splits under this
// rule, one below the other.
Rule RuleOfSplit(const Rule& rule, int64_t rows, int64_t cols);

// Tile size in force for the orthogonaliser of a split of rows x cols at this step and kind; 0:
// whole (no tiles, rows * cols <= tile * tile, a refresh of off_refresh=tiled, or a row-wise step).
int64_t TileAtStep(const Rule& rule, int64_t rows, int64_t cols, int64_t step, StepKind kind);

// s of a step on a split of rows x cols: from the tile's shape with scale_of=tile where tiles are
// in force, else from rows x cols; times off_refresh_lr_ratio where the kind is kOffRefresh.
double StepScale(const Rule& rule, int64_t rows, int64_t cols, int64_t step, StepKind kind);

// How many of `vectors` rows (or columns) are selected: max(1, ceil(select_fraction vectors)).
int64_t SelectedVectors(const Rule& rule, int64_t vectors);

// Whether columns are what is selected: select_axis=short and cols < rows.
bool SelectsColumns(const Rule& rule, int64_t rows, int64_t cols);

// k of section 4 for a split whose short side is d: at least 1, at most d.
int64_t ShapedDirections(const Rule& rule, int64_t d);

// w_t of section 4.
double ShapingWeight(const Rule& rule, int64_t step);

// Which factor a polora matrix is. INVALID_ARGUMENT where neither the rule nor the shape says it.
absl::StatusOr<PoloraFactor> FactorOf(const Rule& rule, int64_t rows, int64_t cols);

// r of a polora factor: the rows of a, the columns of b. REQUIRES: a rule that is valid for the
// shape.
int64_t RankOf(const Rule& rule, int64_t rows, int64_t cols);

// Whether two polora parameters are the factors of one product: each names the other, one is a (r x
// d_in) and one b (d_out x r), and their options are equal. INVALID_ARGUMENT with the names and
// numbers.
absl::Status ValidatePair(const std::string& name, const Rule& rule, int64_t rows, int64_t cols,
                          const std::string& other_name, const Rule& other, int64_t other_rows,
                          int64_t other_cols);

// Whether the rule reads weights, so that servers must hold them (update mode WEIGHTS).
bool NeedsWeights(const Rule& rule);

// The Newton-Schulz iterations that a spectral rule runs, divided by its safety factor. REQUIRES: a
// valid rule.
std::vector<Coefficients> PolarCoefficients(const Rule& rule);

// Iterations before which the Gram form rebuilds its Gram matrix of short_side rows: the rule's
// own, or {2} in fp32 and {2, 4} in bf16, without those that are not below the number of
// iterations. The first iterations of polar_express are so steep that it takes {3} in fp32, and {1,
// 2, 3} below a short side of 64, where that costs nothing to speak of: with {2} it errs up to 5e-5
// of the largest entry on well-conditioned input, with these 1.5e-5.
std::vector<int64_t> GramRestarts(const Rule& rule, int64_t short_side, bool low_precision);

// "muon", or "muon lr=0.01 period=3": the preset and what differs from it.
std::string DescribeRule(const Rule& rule);

}  // namespace stiefel

#endif  // STIEFEL_PLAN_RULE_H_
