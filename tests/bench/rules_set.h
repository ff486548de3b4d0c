// Matrices with a rule each on a backend: what a server computes in a step, without the server.
#ifndef STIEFEL_TESTS_BENCH_RULES_SET_H_
#define STIEFEL_TESTS_BENCH_RULES_SET_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "kernels/backend.h"
#include "kernels/cpu/thread_pool.h"
#include "kernels/rules/matrix_rule.h"
#include "plan/matrix.h"

namespace stiefel {

// One gradient per matrix, in its push_dtype: independent normal values.
class RandomGradients {
 public:
  // RESOURCE_EXHAUSTED where they do not fit.
  static absl::StatusOr<RandomGradients> Create(Backend* backend,
                                                const std::vector<PlanMatrix>& matrices);
  const std::vector<const void*>& data() const { return data_; }

 private:
  std::vector<DeviceBuffer> memory_;
  std::vector<const void*> data_;
};

// Several matrices at once, as a server does it: min(threads, 8) callers, each with a stream and a
// workspace, take one matrix after the other, the dearest first; the backend's threads that are
// free help them.
class RuleSet {
 public:
  // delta: the trainers hold the weights and the step delivers deltas in pull_dtype; weights: fp32
  // weights here, which start as zeros, are updated.
  enum class Mode { kDelta, kWeights };

  // Phases are those that the planner assigns. Errors: those of MatrixRule::Create and
  // Backend::Allocate. The backend must outlive it.
  static absl::StatusOr<std::unique_ptr<RuleSet>> Create(Backend* backend,
                                                         std::vector<PlanMatrix> matrices,
                                                         Mode mode);

  const std::vector<PlanMatrix>& matrices() const { return matrices_; }
  const MatrixRule& rule(size_t matrix) const { return *held_[matrix].rule; }
  // After how many steps the kinds repeat.
  int64_t cycle_steps() const { return cycle_steps_; }
  int64_t elements() const;
  // rows x cols values of a matrix. REQUIRES: Mode::kWeights.
  const float* weights(size_t matrix) const { return held_[matrix].weights.as<float>(); }

  // Computes and commits the next step, every matrix with its own kind or with `kind`. Returns the
  // seconds. INTERNAL where a gradient or an update is not finite: that was not the step to
  // measure. REQUIRES: one gradient per matrix, in its push_dtype.
  absl::StatusOr<double> Step(const std::vector<const void*>& gradients,
                              std::optional<StepKind> kind = std::nullopt);
  // Seconds to copy one state buffer of every matrix with memcpy, on as many threads, each matrix
  // in as many parts.
  double CopySeconds();
  int64_t CopiedBytes() const { return elements() * static_cast<int64_t>(sizeof(float)); }
  // Operations of a step by plan/cost.h, mean over a cycle.
  double FlopsPerStep() const;

 private:
  struct Held {
    std::unique_ptr<MatrixRule> rule;
    int64_t phase = 0;
    std::vector<DeviceBuffer> state, staged_state;
    DeviceBuffer delta, weights, staged_weights;
  };
  struct Worker {
    std::unique_ptr<Stream> stream;
    DeviceBuffer workspace;
    absl::Status status;
  };

  RuleSet(Backend* backend, std::vector<PlanMatrix> matrices, Mode mode);
  absl::Status Allocate();
  absl::Status AllocateMatrix(const PlanMatrix& matrix, Held* held);
  StepKind KindOf(size_t matrix, int64_t step) const;
  // Indices of the matrices, the dearest first.
  std::vector<size_t> Order(const std::vector<StepKind>& kinds) const;
  absl::Status StepMatrix(size_t matrix, const void* gradient, StepKind kind, Worker* worker);

  Backend* const backend_;
  const std::vector<PlanMatrix> matrices_;
  const Mode mode_;
  const int64_t cycle_steps_;
  ThreadPool callers_;
  std::vector<Worker> workers_;
  std::vector<Held> held_;
  int64_t step_ = 0;  // the last one
};

// Operations per second of Stream::Gemm on all threads of the backend: the best of square products
// of several sizes.
absl::StatusOr<double> GemmRate(Backend* backend, DType dtype);

}  // namespace stiefel

#endif  // STIEFEL_TESTS_BENCH_RULES_SET_H_
