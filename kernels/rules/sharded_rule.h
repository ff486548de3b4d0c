// A spectral rule on one shard of a matrix: a chain of stages with a collective between each two.
//
//   stage 0: momentum and direction of the shard, its figures         -> figures are gathered
//   refresh: normalise, the shard's part of the Gram matrix           -> sum over shards
//            small products on the sum, until the next restart (every iteration in the standard
//            form), the shard times their outcome, its new Gram part  -> sum ...
//            last: the shard times the outcome, delivered
//   row-wise step: nothing is exchanged where the vectors lie within the shards, else the m sums of
//            squares of the short side's vectors, and how many shards have a gradient
//
// A non-finite gradient or direction anywhere ends the computation on all shards after the first
// exchange; so does a gradient that is absent (a GradientView without pieces) on every shard. Where
// only some shards have none, theirs is zero; but where nothing is exchanged a shard without a
// gradient is left as it is, whatever the others have. Element-wise rules need none of this: a
// shard is a matrix to them.
#ifndef STIEFEL_KERNELS_RULES_SHARDED_RULE_H_
#define STIEFEL_KERNELS_RULES_SHARDED_RULE_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/rect.h"
#include "kernels/backend.h"
#include "kernels/collective.h"
#include "kernels/rules/matrix_rule.h"

namespace stiefel {

// The shard's place.
struct ShardOf {
  int64_t rows = 0, cols = 0;  // of the whole matrix
  int32_t shard = 0;
  std::vector<int64_t> cuts;  // as ShardRects takes them
};

// One computation under way. Owned by the caller, used by one thread at a time. What a collective
// is given lies in the workspace, device memory, which must not move or be given away between
// stages, and after the last one stays as it is until the next computation of the shard begins or
// Collective::Cancel returned: others may still be served from it.
class ShardedStep {
 public:
  virtual ~ShardedStep() = default;

  // Enqueues the next stage; after the exchange of figures waits for the stream, to read them. When
  // the stream is done the stage has ended: next() then says what to do. The first error ends the
  // computation. Every stage may be given another stream. REQUIRES: not finished; the collective
  // before it is done.
  virtual absl::Status RunStage(Stream* stream) = 0;

  // After a stage: the collective to start before the next (its `shard` filled in), or nothing
  // when the computation is finished and `result` and the staged outputs are valid.
  virtual const std::optional<CollectivePart>& next() const = 0;

  // The index of next(): 0, 1, ...
  virtual int32_t index() const = 0;

  enum class Outcome {
    kComputed,   // the outputs are written
    kNonFinite,  // on some shard, as far as this one knows, or as delivered on this one; the
                 // outputs have no meaning
    kAbsent,     // no shard has a gradient; the outputs have no meaning
  };
  // REQUIRES: finished.
  virtual Outcome outcome() const = 0;
};

// Immutable; its methods may run concurrently. Outlives its steps.
class ShardedRule {
 public:
  // INVALID_ARGUMENT: ValidateSharding, ValidateCuts, a shard that does not exist, ValidateRule, a
  // family other than kSpectral. The backend must outlive the rule.
  static absl::StatusOr<std::unique_ptr<ShardedRule>> Create(const Rule& rule, const ShardOf& shard,
                                                             Backend* backend);
  virtual ~ShardedRule() = default;

  // As MatrixRule's, of the shard.
  virtual const std::vector<StateBuffer>& State() const = 0;
  virtual const std::string& Method() const = 0;
  virtual double CostUnits(StepKind kind) const = 0;
  // Held from the first stage to the last: 8 bytes an element of the shard, 4 m^2 times 6 in the
  // Gram form or 3 in the standard form, 16 m, and 80 bytes a shard.
  virtual int64_t WorkspaceBytes() const = 0;
  // How many sums of m x m fp32 values a refresh takes: 1 + restarts in the Gram form, one an
  // iteration in the standard form. Each of p servers with one shard sends 2 (p-1)/p m^2 values for
  // one, on average.
  virtual int64_t RefreshSums() const = 0;

  // The gradient, buffers and figures are the shard's. Everything passed by pointer must live until
  // the step has finished; `gradient` (but not its data) only during the call. It may have no
  // pieces. Errors as MatrixRule::Compute. StepResult counts of non-finite elements are those of
  // this shard; where only another shard has some they are 0. row_wise_spectral is not measured;
  // residual is that of the whole matrix.
  virtual absl::StatusOr<std::unique_ptr<ShardedStep>> Begin(const GradientView& gradient,
                                                             const StepArgs& args,
                                                             const StepBuffers& buffers,
                                                             DeviceBuffer* workspace,
                                                             StepResult* result) = 0;
  virtual absl::Status Absorb(Stream* stream, const GradientView& gradient, const StepArgs& args,
                              const std::vector<float*>& state) = 0;
};

}  // namespace stiefel

#endif  // STIEFEL_KERNELS_RULES_SHARDED_RULE_H_
