#include "tests/conformance/backend_fixture.h"

#include <algorithm>
#include <cmath>

#include "common/dtype.h"

namespace stiefel {

std::vector<HostPiece> WholeGradient(const Dense& g) {
  return {{WholeRect(g.rows, g.cols), g.values}};
}

MatrixOnDevice::MatrixOnDevice(Backend* backend, const Rule& rule, int64_t rows, int64_t cols)
    : backend_(backend), rows_(rows), cols_(cols) {
  stream_ = std::move(backend->CreateStream()).value();
  rule_ = std::move(MatrixRule::Create(rule, rows, cols, backend)).value();
  for (const StateSpec& spec : rule_->State()) {
    DeviceBuffer buffer = std::move(backend->Allocate(spec.elements * sizeof(float))).value();
    stream_->Zero(buffer.data(), buffer.bytes());
    state_.push_back(std::move(buffer));
  }
  workspace_ = std::move(backend->Allocate(rule_->WorkspaceBytes())).value();
}

DeviceBuffer MatrixOnDevice::ToDevice(const void* data, int64_t bytes, int64_t shift) {
  DeviceBuffer buffer = std::move(backend_->Allocate(bytes + shift)).value();
  stream_->CopyToDevice(buffer.as<char>() + shift, data, bytes);
  return buffer;
}

std::vector<float> MatrixOnDevice::ToHost(const void* device, DType dtype, int64_t elements) {
  std::vector<char> raw(elements * DTypeSize(dtype));
  stream_->CopyToHost(raw.data(), device, static_cast<int64_t>(raw.size()));
  EXPECT_TRUE(stream_->Synchronize().ok());
  std::vector<float> values(elements);
  Convert(raw.data(), dtype, values.data(), DType::kFp32, elements);
  return values;
}

Outcome MatrixOnDevice::Step(const HostView& view, const StepArgs& args,
                             const StepOptions& options) {
  const int64_t elements = rows_ * cols_;
  std::vector<DeviceBuffer> data;
  GradientView gradient;
  gradient.mean = view.mean;
  gradient.grad_scale = view.grad_scale;
  for (const HostPiece& piece : view.pieces) {
    std::vector<float> fp32(piece.values.begin(), piece.values.end());
    std::vector<char> raw(fp32.size() * DTypeSize(piece.dtype));
    Convert(fp32.data(), DType::kFp32, raw.data(), piece.dtype, static_cast<int64_t>(fp32.size()));
    const int64_t shift = options.misalign * DTypeSize(piece.dtype);
    data.push_back(ToDevice(raw.data(), static_cast<int64_t>(raw.size()), shift));
    gradient.pieces.push_back({piece.rect, data.back().as<char>() + shift, piece.dtype,
                               piece.weight, piece.group, piece.group});
  }

  StepBuffers buffers;
  std::vector<DeviceBuffer> staged;
  for (size_t i = 0; i < state_.size(); ++i) {
    buffers.state.push_back(state_[i].as<float>());
    if (options.lazy) continue;
    staged.push_back(std::move(backend_->Allocate(state_[i].bytes())).value());
    buffers.staged_state.push_back(staged.back().as<float>());
  }
  const int64_t shift = options.misalign * DTypeSize(options.delta_dtype);
  DeviceBuffer delta = std::move(backend_->Allocate(elements * 4 + shift)).value();
  DeviceBuffer weights, staged_weights, payload;
  if (options.weights.has_value()) {
    weights = ToDevice(options.weights->data(), elements * 4);
    staged_weights = std::move(backend_->Allocate(elements * 4)).value();
    payload = std::move(backend_->Allocate(elements * 4)).value();
    buffers.weights = weights.as<float>();
    buffers.staged_weights = staged_weights.as<float>();
    buffers.weights_payload = payload.data();
    buffers.payload_dtype = options.payload_dtype;
  } else {
    buffers.delta = delta.as<char>() + shift;
    buffers.delta_dtype = options.delta_dtype;
  }

  Outcome outcome;
  const absl::Status status =
      rule_->Compute(stream_.get(), gradient, args, buffers, &workspace_, &outcome.result);
  EXPECT_TRUE(status.ok()) << status;
  EXPECT_TRUE(stream_->Synchronize().ok());
  if (options.weights.has_value()) {
    outcome.weights = ToHost(staged_weights.data(), DType::kFp32, elements);
    outcome.payload = ToHost(payload.data(), options.payload_dtype, elements);
  } else {
    outcome.delta = ToHost(buffers.delta, options.delta_dtype, elements);
  }
  if (options.commit && options.lazy) {
    std::vector<float*> state;
    for (DeviceBuffer& buffer : state_) state.push_back(buffer.as<float>());
    const absl::Status absorbed = rule_->Absorb(stream_.get(), gradient, args, state);
    EXPECT_TRUE(absorbed.ok()) << absorbed;
  } else if (options.commit) {
    for (size_t i = 0; i < state_.size(); ++i) state_[i] = std::move(staged[i]);
  }
  for (DeviceBuffer& buffer : state_)
    outcome.state.push_back(ToHost(buffer.data(), DType::kFp32, elements));
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

Dense ToDense(const std::vector<float>& values, int64_t rows, int64_t cols) {
  return Dense(rows, cols, std::vector<double>(values.begin(), values.end()));
}

double RelativeError(const std::vector<float>& a, const Dense& b) {
  double largest = 0;
  for (size_t i = 0; i < a.size(); ++i) largest = std::max(largest, std::fabs(a[i] - b.values[i]));
  for (float v : a) {
    if (!std::isfinite(v)) return INFINITY;
  }
  const double scale = MaxAbs(b);
  return largest == 0 ? 0 : largest / scale;
}

}  // namespace stiefel
