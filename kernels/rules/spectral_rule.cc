#include "kernels/rules/spectral_rule.h"

#include <algorithm>
#include <cassert>
#include <cmath>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/status.h"
#include "kernels/rules/shaping.h"
#include "kernels/rules/stages.h"

namespace stiefel {
namespace {

// One row-wise cycle in this many has its spectral norm measured: a dozen passes over the matrix.
constexpr int64_t kSpectralEvery = 32;

// Tile sizes of the rule's schedule, each once.
std::vector<int64_t> TileSizes(const Rule& rule) {
  std::vector<int64_t> sizes;
  for (const TileFrom& from : rule.tiles) {
    if (from.tile > 0 && std::find(sizes.begin(), sizes.end(), from.tile) == sizes.end())
      sizes.push_back(from.tile);
  }
  return sizes;
}

// Whether tiles are in force at every refresh, and whatever a step off refresh orthogonalises.
bool RefreshesAreTiled(const Rule& rule, int64_t rows, int64_t cols) {
  if (rule.tiles.empty() || rule.tiles[0].step > 1) return false;
  return std::all_of(rule.tiles.begin(), rule.tiles.end(), [&](const TileFrom& from) {
    return TileAtStep(rule, rows, cols, from.step, StepKind::kRefresh) > 0;
  });
}

template <typename T>
T* Take(char** memory, int64_t count) {
  auto* taken = reinterpret_cast<T*>(*memory);
  *memory += Aligned(count * static_cast<int64_t>(sizeof(T)));
  return taken;
}

}  // namespace

SpectralRule::SpectralRule(const Rule& rule, int64_t rows, int64_t cols, std::string method)
    : RuleBase(rule, rows, cols, std::move(method)),
      full_lr_rule_(WithFullLr(rule)),
      select_columns_(SelectsColumns(rule, rows, cols)),
      selected_(StateIndex("selected")),
      row_variance_(StateIndex("row_variance")),
      leading_directions_(StateIndex("leading_directions")) {}

absl::StatusOr<std::unique_ptr<SpectralRule>> SpectralRule::Make(const Rule& rule, int64_t rows,
                                                                 int64_t cols,
                                                                 const DeviceInfo& device) {
  const bool columns = SelectsColumns(rule, rows, cols);
  STIEFEL_ASSIGN_OR_RETURN(PolarUnit unit,
                           PolarUnit::Make(rule, columns ? rows : SelectedVectors(rule, rows),
                                           columns ? SelectedVectors(rule, cols) : cols, device));
  std::vector<TiledPolar> tiles;
  for (const int64_t size : TileSizes(rule)) {
    if (rows * cols <= size * size) continue;
    STIEFEL_ASSIGN_OR_RETURN(TiledPolar tiled, TiledPolar::Make(rule, rows, cols, size, device));
    tiles.push_back(std::move(tiled));
  }
  const bool tiled = !tiles.empty() && rule.off_refresh != OffRefresh::kTiled;
  std::unique_ptr<SpectralRule> made(new SpectralRule(
      rule, rows, cols, tiled ? tiles.back().Method() : DescribePolar(unit.plan())));
  made->unit_ = std::move(unit);
  made->tiles_ = std::move(tiles);
  return made;
}

std::string SpectralRule::Explain() const {
  std::string text;
  if (scatters()) {
    absl::StrAppend(&text, unit_->rows(), " x ", unit_->cols(), " selected of ", rows_, " x ",
                    cols_, "\n");
  }
  if (!RefreshesAreTiled(rule_, rows_, cols_)) {
    if (unit_->rows() > unit_->cols()) absl::StrAppend(&text, "tall: computed as its transpose\n");
    absl::StrAppend(&text, ExplainPolar(unit_->plan()), "\n");
  }
  if (rule_.gain != 1) {
    absl::StrAppend(&text, "shapes ", ShapedDirections(rule_, std::min(rows_, cols_)),
                    " leading directions\n");
  }
  for (const TiledPolar& tiles : tiles_) absl::StrAppend(&text, tiles.Explain());
  if (rule_.period > 1) {
    absl::StrAppend(&text, "one step in ", rule_.period, " refreshes; the others ",
                    rule_.off_refresh == OffRefresh::kTiled ? "orthogonalise tiles"
                    : ByColumns()                           ? "normalise columns"
                                                            : "normalise rows, in one pass",
                    "\n");
  }
  return text;
}

int64_t SpectralRule::Vectors() const {
  return selected_ < 0 ? 0 : select_columns_ ? cols_ : rows_;
}

int64_t SpectralRule::Factors() const { return row_variance_ < 0 ? 0 : rows_; }

int64_t SpectralRule::SmallBytes() const {
  return Aligned(sizeof(DirectionStats)) +
         Aligned(Vectors() * static_cast<int64_t>(sizeof(double))) +
         2 * Aligned(Vectors() * static_cast<int64_t>(sizeof(int32_t))) +
         Aligned(Factors() * static_cast<int64_t>(sizeof(double)));
}

int64_t SpectralRule::DirectionBytes() const {
  return Aligned(rows_ * cols_ * static_cast<int64_t>(sizeof(float)));
}

int64_t SpectralRule::OperandBytes() const {
  // A gathered U[S], and an O whose spectrum is shaped, are fp32.
  const bool fp32 = scatters() || leading_directions_ >= 0;
  return Aligned(fp32 ? unit_->rows() * unit_->cols() * static_cast<int64_t>(sizeof(float))
                      : unit_->OperandBytes());
}

int64_t SpectralRule::StepWorkspaceBytes() const {
  int64_t rest = 0;
  if (!RefreshesAreTiled(rule_, rows_, cols_)) {
    rest = OperandBytes() + Aligned(unit_->WorkspaceBytes());
    if (leading_directions_ >= 0) rest += Aligned(ShapingWorkspaceBytes(rule_, rows_, cols_));
  }
  if (rule_.off_refresh == OffRefresh::kRowWise) {  // any rule can be told to
    const int64_t scratch = RowWiseScratch(unit_->rows(), unit_->cols());
    rest = std::max(rest, (scatters() ? OperandBytes() : 0) +
                              Aligned(scratch * static_cast<int64_t>(sizeof(double))));
  }
  for (const TiledPolar& tiles : tiles_) rest = std::max(rest, tiles.WorkspaceBytes());
  return SmallBytes() + DirectionBytes() + rest;
}

SpectralRule::Workspace SpectralRule::Carve(char* memory) const {
  char* const begin = memory;
  Workspace w;
  w.figures = Take<DirectionStats>(&memory, 1);
  w.scratch = Take<double>(&memory, Vectors());
  w.index = Take<int32_t>(&memory, Vectors());
  w.place = Take<int32_t>(&memory, Vectors());
  w.factors = Take<double>(&memory, Factors());
  assert(memory - begin == SmallBytes());
  (void)begin;
  w.a = memory;
  w.b = w.a + DirectionBytes();
  w.rest = w.b + OperandBytes();
  return w;
}

const TiledPolar* SpectralRule::TilesOf(const RuleStep& step) const {
  const int64_t size = TileAtStep(rule_, rows_, cols_, step.args.step, step.args.kind);
  for (const TiledPolar& tiles : tiles_) {
    if (tiles.size() == size) return &tiles;
  }
  return nullptr;
}

Measured SpectralRule::Enqueue(Stream* stream, RuleStep* step) {
  const Workspace w = Carve(step->workspace);
  step->pass.direction = reinterpret_cast<float*>(w.a);
  const bool refresh = step->args.kind == StepKind::kRefresh;
  SetScale(step, StepScale(full_lr_rule_, rows_, cols_, step->args.step, step->args.kind),
           refresh ? 1 : rule_.off_refresh_lr_ratio);
  Measured measured;
  if (const TiledPolar* tiles = TilesOf(*step)) {
    Tiled(stream, step, w, *tiles);
    measured.polar = true;
  } else if (refresh || rule_.off_refresh == OffRefresh::kTiled) {
    Refresh(stream, step, w);
    measured.polar = true;
  } else {
    measured.spectral = RowWise(stream, step, w);
  }
  return measured;
}

void SpectralRule::EnqueueAbsorb(Stream* stream, RuleStep* step) {
  stream->Run(step->pass);
  if (selected_ >= 0) Damp(stream, step->pass.new_state[0], step->state[selected_]);
}

void SpectralRule::Damp(Stream* stream, float* momentum, const float* selected) const {
  DampPass damp;
  damp.m = momentum;
  damp.rows = rows_;
  damp.cols = cols_;
  damp.by_columns = select_columns_;
  damp.selected = selected;
  damp.factor = static_cast<float>(rule_.damping);
  stream->Run(damp);
}

// Stages 1 to 3.
SpectralRule::Direction SpectralRule::Select(Stream* stream, RuleStep* step,
                                             const Workspace& w) const {
  stream->Run(step->pass);
  float* u = step->pass.direction;
  if (selected_ < 0) return {u, &step->pass.stats->direction, w.b};
  SelectPass select;
  select.u = u;
  select.rows = rows_;
  select.cols = cols_;
  select.by_columns = select_columns_;
  select.count = select_columns_ ? unit_->cols() : unit_->rows();
  select.scratch = w.scratch;
  select.index = w.index;
  select.place = w.place;
  select.selected = step->staged[selected_];
  stream->Run(select);
  if (step->pass.new_state[0] != nullptr) Damp(stream, step->pass.new_state[0], select.selected);
  if (!scatters()) return {u, &step->pass.stats->direction, w.b};
  GatherPass gather;
  gather.u = u;
  gather.rows = rows_;
  gather.cols = cols_;
  gather.by_columns = select_columns_;
  gather.count = select.count;
  gather.index = w.index;
  gather.out = reinterpret_cast<float*>(w.b);
  stream->Run(gather);
  MeasurePass measure;
  measure.u = gather.out;
  measure.rows = unit_->rows();
  measure.cols = measure.stride = unit_->cols();
  measure.figures = w.figures;
  stream->Run(measure);
  return {gather.out, w.figures, w.a};
}

void SpectralRule::Refresh(Stream* stream, RuleStep* step, const Workspace& w) const {
  const Direction direction = Select(stream, step, w);
  const double weight =
      step->args.kind == StepKind::kRefresh ? ShapingWeight(rule_, step->args.step) : 0;
  const bool shapes = leading_directions_ >= 0 && weight > 0;
  char* shaping = w.rest + Aligned(unit_->WorkspaceBytes());
  if (shapes) {
    EnqueueLeadingDirections(stream, rule_, direction.u, rows_, cols_,
                             step->state[leading_directions_], step->staged[leading_directions_],
                             shaping);
  } else if (leading_directions_ >= 0) {
    CarryOver(stream, step, leading_directions_);
  }
  UnitUpdate update = unit_->Enqueue(stream, direction.u, unit_->cols(), direction.figures,
                                     direction.other, direction.u, w.rest, step->pass.stats);
  if (shapes) update = Shape(stream, update, weight, w);
  Finish(stream, step, w, update);
}

// O in fp32, in A or B, with the lengths of its leading directions changed.
UnitUpdate SpectralRule::Shape(Stream* stream, const UnitUpdate& update, double weight,
                               const Workspace& w) const {
  UnitUpdate shaped = update;
  if (update.o.dtype != DType::kFp32) {
    shaped.o.dtype = DType::kFp32;
    shaped.o.data = update.o.data == w.a ? w.b : w.a;
    stream->Convert(update.o, shaped.o);
  }
  EnqueueShaping(stream, rule_, weight, shaped.o, shaped.transposed, rows_, cols_,
                 w.rest + Aligned(unit_->WorkspaceBytes()));
  return shaped;
}

void SpectralRule::Tiled(Stream* stream, RuleStep* step, const Workspace& w,
                         const TiledPolar& tiles) const {
  stream->Run(step->pass);
  if (leading_directions_ >= 0) CarryOver(stream, step, leading_directions_);
  if (row_variance_ < 0) {
    tiles.Enqueue(stream, step->pass.direction, step->pass.delivery, step->pass.stats, w.b);
    return;
  }
  // The row variance needs whole rows of O: they take the place of U.
  Delivery collect;
  collect.step = 1;
  collect.scale = 0;
  collect.delta = step->pass.direction;
  tiles.Enqueue(stream, step->pass.direction, collect, step->pass.stats, w.b);
  Finish(stream, step, w, {{step->pass.direction, DType::kFp32, rows_, cols_, 1}, false});
}

// Stages 6 to 8.
void SpectralRule::Finish(Stream* stream, RuleStep* step, const Workspace& w,
                          const UnitUpdate& update) const {
  if (row_variance_ < 0) return Deliver(stream, step, w, update, nullptr);
  RowVariancePass variance;
  variance.x = update.o;
  variance.rows = unit_->rows();
  variance.cols = unit_->cols();
  variance.transposed = update.transposed;
  variance.index = scatters() && !select_columns_ ? w.index : nullptr;
  variance.state_rows = rows_;
  variance.v = step->state[row_variance_];
  variance.new_v = step->staged[row_variance_];
  variance.keep = *rule_.row_variance_beta2;
  variance.gain = 1 - variance.keep;
  variance.eps = rule_.row_variance_eps;
  variance.factors = w.factors;
  stream->Run(variance);
  Deliver(stream, step, w, update, w.factors);
}

void SpectralRule::Deliver(Stream* stream, RuleStep* step, const Workspace& w,
                           const UnitUpdate& update, const double* row_factors) const {
  DeliverPass deliver;
  deliver.x = update.o;
  deliver.transposed = update.transposed;
  deliver.rows = unit_->rows();
  deliver.cols = unit_->cols();
  deliver.row_factors = row_factors;
  deliver.stride = cols_;
  deliver.delivery = step->pass.delivery;
  deliver.stats = step->pass.stats;
  if (!scatters()) return stream->Run(deliver);
  ScatterPass scatter;
  scatter.deliver = deliver;
  scatter.vectors = Vectors();
  scatter.by_columns = select_columns_;
  scatter.index = w.index;
  scatter.place = w.place;
  stream->Run(scatter);
}

bool SpectralRule::RowWise(Stream* stream, RuleStep* step, const Workspace& w) const {
  for (const int state : {row_variance_, leading_directions_}) {
    if (state >= 0) CarryOver(stream, step, state);
  }
  VectorPass vectors;
  vectors.rows = unit_->rows();
  vectors.cols = unit_->cols();
  vectors.by_columns = ByColumns();
  vectors.length = VectorLength(rule_, vectors.rows, vectors.cols, vectors.by_columns);
  vectors.measure_spectral = (step->args.step - 1) / rule_.period % kSpectralEvery == 0;
  vectors.spectral_max = rule_.row_spectral_max;
  vectors.stats = step->pass.stats;
  const bool measured = vectors.measure_spectral || vectors.spectral_max > 0;
  if (selected_ < 0) {
    vectors.u = step->pass.direction;
    vectors.scratch = reinterpret_cast<double*>(w.b);
    step->pass.direction = nullptr;
    stream->Run(RowWisePass{step->pass, vectors});
    return measured;
  }
  const Direction direction = Select(stream, step, w);
  vectors.u = direction.u;
  vectors.scratch = reinterpret_cast<double*>(scatters() ? w.rest : w.b);
  stream->Run(vectors);
  Deliver(stream, step, w,
          {{direction.u, DType::kFp32, vectors.rows, vectors.cols, 1}, /*transposed=*/false},
          nullptr);
  return measured;
}

// The step leaves this state as it is.
void SpectralRule::CarryOver(Stream* stream, RuleStep* step, int state) const {
  const StateBuffer& buffer = State()[state];
  const auto view = [&](const float* data) {
    return MatrixView{const_cast<float*>(data), DType::kFp32, buffer.rows, buffer.cols, 1};
  };
  stream->Convert(view(step->state[state]), view(step->staged[state]));
}

bool SpectralRule::ByColumns() const {
  return NormalisesColumns(rule_, unit_->rows(), unit_->cols());
}

}  // namespace stiefel
