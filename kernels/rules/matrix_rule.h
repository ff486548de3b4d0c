// One update rule on one matrix: the pipeline of docs/mathematics.md, composed of backend
// primitives.
//
//   std::unique_ptr<Stream> stream = ...;  one per calling thread
//   rule->Compute(stream.get(), gradient, args, buffers, &workspace, &result);
//   stream->Synchronize();                 or stream->Then(...): now `result` and the outputs are
//   valid
//
// Compute writes nothing but its staged outputs. Its caller commits by swapping staged state in
// (staging=double) or by Absorb with the gradient it kept (staging=lazy); both give the same bits.
#ifndef STIEFEL_KERNELS_RULES_MATRIX_RULE_H_
#define STIEFEL_KERNELS_RULES_MATRIX_RULE_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/dtype.h"
#include "kernels/backend.h"
#include "kernels/gradient.h"
#include "plan/rule.h"

namespace stiefel {

struct StepArgs {
  int64_t step = 1;
  int64_t commits = 0;  // of this matrix so far: Adam's bias correction counts these, not steps
  StepKind kind = StepKind::kRefresh;
  double clip_scale = 1;  // finite, >= 0; multiplies the gradient
  double lr = 0;          // the base lr, resolved; off_refresh_lr_ratio is applied here
  double weight_decay = 0;
  std::optional<double>
      beta;  // replaces the momentum coefficient: beta, or beta1 of adamw and lion
};

struct StepBuffers {
  std::vector<const float*> state;  // in the order of State()
  // Likewise; must not overlap `state`. With staging=lazy the element-wise ones are null; the
  // others are always given.
  std::vector<float*> staged_state;
  // polora: the other factor as it is before this step, with its state. Read only.
  const float* partner_weights = nullptr;
  std::vector<const float*> partner_state;
  // DELTA mode: -lr s O, without weight decay.
  void* delta = nullptr;
  DType delta_dtype = DType::kFp32;
  // WEIGHTS mode: W' = (1 - lr wd) W - lr s O, and optionally W' in the trainers' dtype.
  const float* weights = nullptr;
  float* staged_weights = nullptr;
  void* weights_payload = nullptr;
  DType payload_dtype = DType::kFp32;
};

// A figure that this step did not measure is kNotMeasured.
struct StepResult {
  static constexpr double kNotMeasured = -1;

  double sum_squares = 0;          // of g after grad_scale, before clipping
  int64_t nonfinite_gradient = 0;  // elements of g
  int64_t nonfinite_update = 0;    // elements of new state, delta, weights or payload, as delivered
  double update_rms = 0;           // of the update, that is before lr: of s O
  double residual = kNotMeasured;  // refresh: |O O^T - I|_F / sqrt(short side), from sampled rows
  double row_wise_spectral =
      kNotMeasured;            // |O|_2 of a row-wise step, power iteration, every 64th step or so
  bool newton_schulz = false;  // whether the polar map ran
};

// Immutable; its methods may run concurrently, each call with its own stream, workspace and result.
class MatrixRule {
 public:
  // Errors: those of ValidateRule; INVALID_ARGUMENT for a compute type that the backend cannot do,
  // and for a polora rule without `partner`, the shape of the other factor. The backend must
  // outlive the rule.
  static absl::StatusOr<std::unique_ptr<MatrixRule>> Create(
      const Rule& rule, int64_t rows, int64_t cols, Backend* backend,
      std::optional<std::pair<int64_t, int64_t>> partner = std::nullopt);
  virtual ~MatrixRule() = default;

  virtual const std::vector<StateBuffer>& State() const = 0;  // RuleState of the plan
  // Bytes that Compute needs for any step, allocated by the caller and free for others afterwards.
  // A few KiB and, times the matrix in fp32, with m its short side, n its long one and fp32
  // products (the device's own kernels may take less):
  //   element-wise rules   0
  //   whole matrices       2 + 2 m/n in the standard form, 2 + 5 m/n in the Gram form; of their
  //                        largest split where there are splits, of as many as are under way at
  //                        once where splits are small
  //   tiles of t x t       at most 2, or 1 + 4 t t / (m n) where that is more
  //   selection of f       1 + f, and the squares of the vectors selected
  //   row-wise steps       1 + 34 / rows, where that is more than the rule's refreshes take
  //   shaping              0.4 + 0.4 m/n more, for the default number of directions
  virtual int64_t WorkspaceBytes() const = 0;
  // What a refresh really runs, for status: "newton-schulz gram fp32", "element-wise fp32".
  virtual const std::string& Method() const = 0;
  // The same with the reason: per kind of unit (split, tile) its shape, the form and precision, and
  // the flops of both forms. Lines of text for people.
  virtual std::string Explain() const = 0;
  // Cost of a step of this kind in the units of plan/cost.h.
  virtual double CostUnits(StepKind kind) const = 0;

  // Enqueues one step. `result` is filled, and the outputs are valid, when the stream is done;
  // everything passed by pointer must live until then; `gradient` (but not the data of its pieces)
  // only during the call. Where the gradient or the update is not finite the outputs hold finite or
  // non-finite numbers of no meaning; the counts say so. INVALID_ARGUMENT, nothing enqueued: those
  // of ValidateGradient; arguments out of range; buffers that do not fit the rule; a workspace too
  // small; beta > 0 for an sgd that was registered without momentum.
  virtual absl::Status Compute(Stream* stream, const GradientView& gradient, const StepArgs& args,
                               const StepBuffers& buffers, DeviceBuffer* workspace,
                               StepResult* result) = 0;

  // Lazy commit: takes the gradient of the decided step into the element-wise buffers of `state` in
  // place, by the arithmetic of Compute. The small buffers have been swapped in before and are only
  // read (`selected` says what to damp).
  virtual absl::Status Absorb(Stream* stream, const GradientView& gradient, const StepArgs& args,
                              const std::vector<float*>& state) = 0;
};

}  // namespace stiefel

#endif  // STIEFEL_KERNELS_RULES_MATRIX_RULE_H_
