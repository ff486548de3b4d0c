#include "tests/conformance/backend_fixture.h"

#include <algorithm>
#include <cmath>

#include "common/dtype.h"

namespace stiefel {
namespace {

std::unique_ptr<MatrixRule> RuleOnDevice(Backend* backend, const Rule& rule, int64_t rows,
                                         int64_t cols,
                                         std::optional<std::pair<int64_t, int64_t>> partner) {
  if (rule.family == RuleFamily::kPolora && !partner.has_value()) partner = {cols, rows};
  return std::move(MatrixRule::Create(rule, rows, cols, backend, partner)).value();
}

}  // namespace

std::vector<HostPiece> WholeGradient(const Dense& g) {
  return {{WholeRect(g.rows, g.cols), g.values}};
}

std::optional<PairOnHost> SomePair(const Rule& rule, int64_t rows, int64_t cols) {
  if (rule.family != RuleFamily::kPolora) return std::nullopt;
  PairOnHost pair;
  pair.weights = Rounded(RandomNormal(rows, cols, 70));
  pair.partner_weights = Rounded(RandomNormal(cols, rows, 71));
  for (const StateBuffer& buffer : RuleState(rule, rows, cols)) {
    // The partner's p is as long as this one's q, and the other way round.
    pair.partner_state.emplace_back(buffer.cols, buffer.rows);
  }
  return pair;
}

MatrixMemory::MatrixMemory(Backend* backend, std::vector<StateBuffer> state, int64_t rows,
                           int64_t cols, int64_t workspace_bytes)
    : backend_(backend), specs_(std::move(state)), rows_(rows), cols_(cols) {
  stream_ = std::move(backend->CreateStream()).value();
  for (const StateBuffer& spec : specs_) {
    DeviceBuffer buffer =
        std::move(backend->Allocate(spec.rows * spec.cols * sizeof(float))).value();
    stream_->Zero(buffer.data(), buffer.bytes());
    state_.push_back(std::move(buffer));
  }
  workspace_ = std::move(backend->Allocate(workspace_bytes)).value();
}

void* MatrixMemory::Output(int64_t bytes, Step* step, int64_t shift) {
  step->others.push_back(std::move(backend_->Allocate(bytes + shift)).value());
  return step->others.back().as<char>() + shift;
}

void* MatrixMemory::ToDevice(const void* data, int64_t bytes, Step* step, int64_t shift) {
  void* device = Output(bytes, step, shift);
  stream_->CopyToDevice(device, data, bytes);
  return device;
}

void* MatrixMemory::ToDevice(const Dense& a, Step* step) {
  const std::vector<float> fp32(a.values.begin(), a.values.end());
  return ToDevice(fp32.data(), static_cast<int64_t>(fp32.size() * sizeof(float)), step);
}

void MatrixMemory::GradientToDevice(const HostView& view, int64_t misalign, Step* step) {
  step->gradient.mean = view.mean;
  step->gradient.grad_scale = view.grad_scale;
  for (const HostPiece& piece : view.pieces) {
    std::vector<float> fp32(piece.values.begin(), piece.values.end());
    std::vector<char> raw(fp32.size() * DTypeSize(piece.dtype));
    Convert(fp32.data(), DType::kFp32, raw.data(), piece.dtype, static_cast<int64_t>(fp32.size()));
    const void* data = ToDevice(raw.data(), static_cast<int64_t>(raw.size()), step,
                                misalign * DTypeSize(piece.dtype));
    step->gradient.pieces.push_back(
        {piece.rect, data, piece.dtype, piece.weight, piece.group, piece.group});
  }
}

std::vector<float> MatrixMemory::ToHost(const void* device, DType dtype, int64_t elements) {
  std::vector<char> raw(elements * DTypeSize(dtype));
  stream_->CopyToHost(raw.data(), device, static_cast<int64_t>(raw.size()));
  EXPECT_TRUE(stream_->Synchronize().ok());
  std::vector<float> values(elements);
  Convert(raw.data(), dtype, values.data(), DType::kFp32, elements);
  return values;
}

std::unique_ptr<MatrixMemory::Step> MatrixMemory::Begin(const HostView& view,
                                                        const StepOptions& options,
                                                        const std::optional<PairOnHost>& pair) {
  const int64_t elements = rows_ * cols_;
  auto step = std::make_unique<Step>();
  GradientToDevice(view, options.misalign, step.get());
  StepBuffers& buffers = step->buffers;
  step->staged.resize(state_.size());
  for (size_t i = 0; i < state_.size(); ++i) {
    buffers.state.push_back(state_[i].as<float>());
    if (!options.lazy || !specs_[i].elementwise)
      step->staged[i] = std::move(backend_->Allocate(state_[i].bytes())).value();
    buffers.staged_state.push_back(step->staged[i].as<float>());
  }
  if (pair.has_value()) {
    buffers.weights = static_cast<float*>(ToDevice(pair->weights, step.get()));
    buffers.partner_weights = static_cast<float*>(ToDevice(pair->partner_weights, step.get()));
    for (const Dense& state : pair->partner_state)
      buffers.partner_state.push_back(static_cast<float*>(ToDevice(state, step.get())));
  }
  if (options.weights.has_value()) {
    buffers.weights =
        static_cast<float*>(ToDevice(options.weights->data(), elements * 4, step.get()));
    buffers.staged_weights = static_cast<float*>(Output(elements * 4, step.get()));
    buffers.weights_payload = Output(elements * 4, step.get());
    buffers.payload_dtype = options.payload_dtype;
  } else {
    buffers.delta =
        Output(elements * 4, step.get(), options.misalign * DTypeSize(options.delta_dtype));
    buffers.delta_dtype = options.delta_dtype;
  }
  return step;
}

void MatrixMemory::Take(Step* step, const StepOptions& options, const Absorb& absorb,
                        Outcome* outcome) {
  const int64_t elements = rows_ * cols_;
  if (options.weights.has_value()) {
    outcome->weights = ToHost(step->buffers.staged_weights, DType::kFp32, elements);
    outcome->payload = ToHost(step->buffers.weights_payload, options.payload_dtype, elements);
  } else {
    outcome->delta = ToHost(step->buffers.delta, options.delta_dtype, elements);
  }
  if (options.commit) {
    bool all_staged = true;
    std::vector<float*> state;
    for (size_t i = 0; i < state_.size(); ++i) {
      if (step->staged[i].data() == nullptr) all_staged = false;
      if (step->staged[i].data() != nullptr) state_[i] = std::move(step->staged[i]);
      state.push_back(state_[i].as<float>());
    }
    if (!all_staged) {
      const absl::Status absorbed = absorb(stream_.get(), step->gradient, state);
      EXPECT_TRUE(absorbed.ok()) << absorbed;
    }
  }
  for (DeviceBuffer& buffer : state_) {
    outcome->state.push_back(
        ToHost(buffer.data(), DType::kFp32, buffer.bytes() / static_cast<int64_t>(sizeof(float))));
  }
}

MatrixOnDevice::MatrixOnDevice(Backend* backend, const Rule& rule, int64_t rows, int64_t cols,
                               std::optional<std::pair<int64_t, int64_t>> partner)
    : some_pair_(SomePair(rule, rows, cols)),
      rule_(RuleOnDevice(backend, rule, rows, cols, partner)),
      memory_(backend, rule_->State(), rows, cols, rule_->WorkspaceBytes()) {}

Outcome MatrixOnDevice::Step(const HostView& view, const StepArgs& args,
                             const StepOptions& options) {
  const std::unique_ptr<MatrixMemory::Step> step =
      memory_.Begin(view, options, options.pair.has_value() ? options.pair : some_pair_);
  Outcome outcome;
  const absl::Status status = rule_->Compute(memory_.stream(), step->gradient, args, step->buffers,
                                             memory_.workspace(), &outcome.result);
  EXPECT_TRUE(status.ok()) << status;
  EXPECT_TRUE(memory_.stream()->Synchronize().ok());
  memory_.Take(
      step.get(), options,
      [&](Stream* stream, const GradientView& gradient, const std::vector<float*>& state) {
        return rule_->Absorb(stream, gradient, args, state);
      },
      &outcome);
  return outcome;
}

StepArgs ArgsOf(const Rule& rule, int64_t phase, int64_t step) {
  StepArgs args;
  args.step = step;
  args.commits = step - 1;
  args.kind = KindAtStep(rule, phase, step);
  args.lr = rule.lr;
  args.weight_decay = rule.weight_decay;
  return args;
}

Rule MakeRule(const std::string& preset,
              const std::vector<std::pair<std::string, std::string>>& options) {
  Rule rule = std::move(PresetRule(preset)).value();
  for (const auto& [key, value] : options) {
    const absl::Status status = SetOption(rule, key, value);
    EXPECT_TRUE(status.ok()) << status;
  }
  return rule;
}

std::vector<Rule> EveryPreset() {
  std::vector<Rule> rules;
  for (const PresetInfo& info : Presets()) {
    if (info.name != "polora") rules.push_back(MakeRule(std::string(info.name)));
  }
  rules.push_back(MakeRule("muonbp", {{"tile", "16"}}));
  rules.push_back(MakeRule("himuon", {{"tile", "16"}}));
  rules.push_back(MakeRule("polora", {{"factor", "a"}}));
  rules.push_back(MakeRule("polora", {{"factor", "b"}}));
  return rules;
}

ReferenceStep StepOf(ReferenceRule* reference, const Rule& rule, const Dense& gradient,
                     const StepArgs& args, const StepOptions& options) {
  std::optional<PairOnHost> pair = options.pair;
  if (!pair.has_value()) pair = SomePair(rule, gradient.rows, gradient.cols);
  if (!pair.has_value()) return reference->Step(gradient, args);
  if (options.weights.has_value())
    pair->weights = ToDense(*options.weights, gradient.rows, gradient.cols);
  const ReferencePair references{pair->weights, pair->partner_weights, pair->partner_state};
  return reference->Step(gradient, args, &references);
}

Dense ToDense(const std::vector<float>& values, int64_t rows, int64_t cols) {
  return Dense(rows, cols, std::vector<double>(values.begin(), values.end()));
}

Dense Rounded(const Dense& a) {
  return ToDense(std::vector<float>(a.values.begin(), a.values.end()), a.rows, a.cols);
}

double RelativeError(const std::vector<float>& a, const Dense& b) {
  double largest = 0;
  for (size_t i = 0; i < a.size(); ++i) largest = std::max(largest, std::fabs(a[i] - b.values[i]));
  if (!AllFinite(a)) return INFINITY;
  const double scale = MaxAbs(b);
  return largest == 0 ? 0 : largest / scale;
}

bool SameBits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

bool AllFinite(const std::vector<float>& values) {
  return std::all_of(values.begin(), values.end(), [](float v) { return std::isfinite(v); });
}

void ExpectSame(const std::vector<Outcome>& a, const std::vector<Outcome>& b,
                const std::string& where) {
  ASSERT_EQ(a.size(), b.size()) << where;
  for (size_t i = 0; i < a.size(); ++i) {
    EXPECT_TRUE(SameBits(a[i].delta, b[i].delta)) << where << " step " << i + 1;
    ASSERT_EQ(a[i].state.size(), b[i].state.size()) << where;
    for (size_t s = 0; s < a[i].state.size(); ++s) {
      EXPECT_TRUE(SameBits(a[i].state[s], b[i].state[s]))
          << where << " step " << i + 1 << " state " << s;
    }
    EXPECT_EQ(a[i].result.sum_squares, b[i].result.sum_squares) << where;
    EXPECT_EQ(a[i].result.update_rms, b[i].result.update_rms) << where;
    EXPECT_EQ(a[i].result.residual, b[i].result.residual) << where;
    EXPECT_EQ(a[i].result.row_wise_spectral, b[i].result.row_wise_spectral) << where;
  }
}

}  // namespace stiefel
