// `stiefelctl apply --backend=cpu`: MatrixRule on the CPU backend, as the servers run it.
#include <algorithm>
#include <cstring>
#include <map>
#include <tuple>
#include <utility>

#include "cli/apply_backend.h"
#include "common/dtype.h"
#include "common/status.h"
#include "kernels/cpu/cpu_backend.h"
#include "kernels/rules/batch.h"
#include "kernels/rules/matrix_rule.h"

namespace stiefel {
namespace {

// Matrices of at most this many elements go in one batch, with a workspace for each thread; for
// larger ones there is one workspace, and all threads share the work.
constexpr int64_t kBatchElements = int64_t{1} << 20;

DType DTypeOf(std::string_view dtype) {
  return dtype == "F16" ? DType::kFp16 : dtype == "BF16" ? DType::kBf16 : DType::kFp32;
}

// What one matrix keeps on the device.
struct OnDevice {
  MatrixRule* rule = nullptr;
  std::vector<DeviceBuffer> state, staged;
  DeviceBuffer weights, staged_weights;
  DeviceBuffer delta;
  DeviceBuffer gradient;  // in fp32, where the file has it in fp64
};

class CpuApply final : public ApplyBackend {
 public:
  static absl::StatusOr<std::unique_ptr<ApplyBackend>> Create(
      const std::vector<ApplyParameter>& parameters, bool with_weights, int threads) {
    STIEFEL_ASSIGN_OR_RETURN(std::unique_ptr<Backend> backend, CreateCpuBackend(threads));
    std::unique_ptr<CpuApply> apply(new CpuApply(std::move(backend), parameters, with_weights));
    STIEFEL_ASSIGN_OR_RETURN(apply->stream_, apply->backend_->CreateStream());
    STIEFEL_RETURN_IF_ERROR(apply->CreateRules(parameters));
    STIEFEL_RETURN_IF_ERROR(apply->AllocateAll(threads));
    return apply;
  }

  std::string_view dtype() const override { return "F32"; }
  std::string Description() const override {
    const DeviceInfo& info = backend_->Info();
    return info.name + ", " + info.instruction_set;
  }
  std::string Explain(int64_t matrix) const override { return devices_[matrix].rule->Explain(); }

  void SetWeights(const std::vector<FileElements>& weights) override {
    for (size_t i = 0; i < weights.size(); ++i) {
      ToFloats(weights[i], matrices_[i].elements(), devices_[i].weights.as<float>());
    }
  }

  absl::Status Step(int64_t step, const std::vector<FileElements>& gradients,
                    std::vector<ApplyFigures>* figures) override {
    Running running;
    const absl::Status enqueued = Enqueue(step, gradients, &running);
    STIEFEL_RETURN_IF_ERROR(stream_->Synchronize());  // also where not all of it was enqueued
    STIEFEL_RETURN_IF_ERROR(enqueued);
    figures->assign(matrices_.size(), ApplyFigures());
    for (size_t i = 0; i < matrices_.size(); ++i) {
      const StepResult& result = running.results[i];
      ApplyFigures& f = (*figures)[i];
      f.update_rms = result.update_rms;
      if (result.residual != StepResult::kNotMeasured) f.residual = result.residual;
      f.nonfinite_update = result.nonfinite_update;
      std::swap(devices_[i].state, devices_[i].staged);
      std::swap(devices_[i].weights, devices_[i].staged_weights);
    }
    return absl::OkStatus();
  }

  const void* Delta(int64_t matrix) const override { return devices_[matrix].delta.data(); }
  const void* State(int64_t matrix, int64_t buffer) const override {
    return devices_[matrix].state[buffer].data();
  }
  const void* Weights(int64_t matrix) const override {
    return with_weights_ ? devices_[matrix].weights.data() : nullptr;
  }

 private:
  CpuApply(std::unique_ptr<Backend> backend, const std::vector<ApplyParameter>& parameters,
           bool with_weights)
      : backend_(std::move(backend)),
        with_weights_(with_weights),
        matrices_(MatricesOf(parameters)) {}

  // One rule for each parameter: its matrices are all alike.
  absl::Status CreateRules(const std::vector<ApplyParameter>& parameters) {
    for (const ApplyParameter& p : parameters) {
      std::optional<std::pair<int64_t, int64_t>> partner;
      if (p.partner >= 0) {
        partner.emplace(parameters[p.partner].rows, parameters[p.partner].cols);
      }
      STIEFEL_ASSIGN_OR_RETURN(std::unique_ptr<MatrixRule> rule,
                               MatrixRule::Create(p.rule, p.rows, p.cols, backend_.get(), partner));
      rules_.emplace(&p, std::move(rule));
    }
    return absl::OkStatus();
  }

  absl::Status AllocateAll(int threads) {
    int64_t small = 0, large = 0;  // bytes of workspace
    for (const ApplyMatrix& m : matrices_) {
      OnDevice device;
      device.rule = rules_.at(m.parameter).get();
      STIEFEL_RETURN_IF_ERROR(Allocate(m, &device));
      int64_t& workspace = m.elements() <= kBatchElements ? small : large;
      workspace = std::max(workspace, device.rule->WorkspaceBytes());
      devices_.push_back(std::move(device));
    }
    for (int t = 0; t < threads; ++t) {
      STIEFEL_ASSIGN_OR_RETURN(DeviceBuffer workspace, backend_->Allocate(small));
      small_workspaces_.push_back(std::move(workspace));
    }
    STIEFEL_ASSIGN_OR_RETURN(DeviceBuffer workspace, backend_->Allocate(large));
    large_workspace_.push_back(std::move(workspace));
    return stream_->Synchronize();
  }

  absl::Status Allocate(const ApplyMatrix& m, OnDevice* device) {
    for (const StateBuffer& buffer : device->rule->State()) {
      const int64_t size = buffer.rows * buffer.cols * static_cast<int64_t>(sizeof(float));
      for (std::vector<DeviceBuffer>* all : {&device->state, &device->staged}) {
        STIEFEL_ASSIGN_OR_RETURN(DeviceBuffer memory, backend_->Allocate(size));
        stream_->Zero(memory.data(), size);
        all->push_back(std::move(memory));
      }
    }
    std::vector<DeviceBuffer*> whole = {&device->delta};
    if (with_weights_) {
      whole.push_back(&device->weights);
      whole.push_back(&device->staged_weights);
    }
    const std::vector<const TensorInfo*>& steps = m.parameter->gradients.steps;
    if (std::any_of(steps.begin(), steps.end(),
                    [](const TensorInfo* tensor) { return tensor->dtype == "F64"; })) {
      whole.push_back(&device->gradient);
    }
    for (DeviceBuffer* buffer : whole) {
      STIEFEL_ASSIGN_OR_RETURN(*buffer, backend_->Allocate(m.elements() * sizeof(float)));
    }
    return absl::OkStatus();
  }

  // Everything that the jobs of one step point at.
  struct Running {
    std::vector<GradientView> gradients;
    std::vector<StepArgs> args;
    std::vector<StepBuffers> buffers;
    std::vector<StepResult> results;
  };

  // Enqueues all matrices; `running` must live until the stream is done.
  absl::Status Enqueue(int64_t step, const std::vector<FileElements>& gradients, Running* running) {
    const size_t count = matrices_.size();
    running->results.resize(count);
    for (size_t i = 0; i < count; ++i) {
      running->gradients.push_back(ViewOf(i, gradients[i]));
      running->args.push_back(ArgsOfStep(*matrices_[i].parameter, step));
      running->buffers.push_back(BuffersOf(i));
    }
    std::vector<StepJob> small, large;
    for (size_t i = 0; i < count; ++i) {
      std::vector<StepJob>& jobs = matrices_[i].elements() <= kBatchElements ? small : large;
      jobs.push_back({devices_[i].rule, &running->gradients[i], &running->args[i],
                      &running->buffers[i], &running->results[i]});
    }
    STIEFEL_RETURN_IF_ERROR(ComputeBatch(stream_.get(), small, &small_workspaces_));
    return ComputeBatch(stream_.get(), large, &large_workspace_);
  }

  GradientView ViewOf(size_t i, const FileElements& gradient) {
    const ApplyMatrix& m = matrices_[i];
    GradientPiece piece;
    piece.rect = WholeRect(m.parameter->rows, m.parameter->cols);
    piece.dtype = DTypeOf(gradient.dtype);
    piece.data = gradient.data;
    if (gradient.dtype == "F64") {
      ToFloats(gradient, m.elements(), devices_[i].gradient.as<float>());
      piece.data = devices_[i].gradient.data();
    }
    GradientView view;
    view.pieces.push_back(piece);
    return view;
  }

  StepBuffers BuffersOf(size_t i) {
    OnDevice& device = devices_[i];
    StepBuffers buffers;
    for (const DeviceBuffer& state : device.state) buffers.state.push_back(state.as<float>());
    for (const DeviceBuffer& staged : device.staged) {
      buffers.staged_state.push_back(staged.as<float>());
    }
    buffers.delta = device.delta.data();
    if (with_weights_) {
      buffers.weights = device.weights.as<float>();
      buffers.staged_weights = device.staged_weights.as<float>();
    }
    if (matrices_[i].partner >= 0) {
      const OnDevice& partner = devices_[matrices_[i].partner];
      buffers.partner_weights = partner.weights.as<float>();
      for (const DeviceBuffer& state : partner.state) {
        buffers.partner_state.push_back(state.as<float>());
      }
    }
    return buffers;
  }

  static void ToFloats(const FileElements& elements, int64_t n, float* out) {
    if (elements.dtype != "F64") {
      Convert(elements.data, DTypeOf(elements.dtype), out, DType::kFp32, n);
      return;
    }
    const double* doubles = static_cast<const double*>(elements.data);
    std::transform(doubles, doubles + n, out, [](double v) { return static_cast<float>(v); });
  }

  const std::unique_ptr<Backend> backend_;  // outlives everything below
  const bool with_weights_;
  const std::vector<ApplyMatrix> matrices_;
  std::unique_ptr<Stream> stream_;
  std::map<const ApplyParameter*, std::unique_ptr<MatrixRule>> rules_;
  std::vector<OnDevice> devices_;
  std::vector<DeviceBuffer> small_workspaces_, large_workspace_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<ApplyBackend>> CreateCpuApply(
    const std::vector<ApplyParameter>& parameters, bool with_weights, int threads) {
  return CpuApply::Create(parameters, with_weights, threads);
}

}  // namespace stiefel
