// One matrix as its owner holds it: state, weights, the gradients of the open attempt, the staged
// outcome of the step and what is sent of it.
//
//   BeginJob -> [engine: RunStepJob] -> FinishJob -> update() is published
//     -> Commit (double staging and weights: pointers are swapped) [-> engine: RunAbsorbJob]
//     or Discard
//
// Where shards are computed together RunStageJob takes the place of RunStepJob, again and again.
//
// The object is guarded by its host's lock; the two Run* functions are called without it and touch
// only the memory that the job names.
#ifndef STIEFEL_SERVER_MATRIX_STORE_H_
#define STIEFEL_SERVER_MATRIX_STORE_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/backend.h"
#include "kernels/rules/matrix_rule.h"
#include "kernels/rules/sharded_rule.h"
#include "plan/memory.h"
#include "server/run_machine.h"
#include "server/run_spec.h"
#include "server/shared_buffer.h"
#include "stiefel/v1/peer.pb.h"

namespace stiefel {

// Names a computation: results of another one are of no interest.
struct StepKey {
  int64_t step = 0;
  int32_t attempt = 0;
  int32_t round = 0;

  friend bool operator==(const StepKey& a, const StepKey& b) {
    return a.step == b.step && a.attempt == b.attempt && a.round == b.round;
  }
};

// Everything that the engine needs to compute a matrix, or to absorb its gradient. The pointers are
// those of the store, which outlives its jobs.
struct MatrixJob {
  StepKey key;
  const MatrixSpec* spec = nullptr;
  MatrixRule* rule = nullptr;  // one of these two
  ShardedRule* sharded = nullptr;
  DeviceBuffer* held = nullptr;  // the shard's own workspace, with `sharded`
  GradientView gradient;
  StepArgs args;
  StepBuffers buffers;
  std::vector<float*> state;       // all of it; to absorb into
  float* zero_elements = nullptr;  // element-wise state as it was allocated: to zero first
  int64_t elementwise_bytes = 0;   // of it
  // What the job reads of another matrix stays as it is while they live.
  std::vector<std::shared_ptr<const void>> pins;
};

// What a step of this kind is called: "refresh", "row_wise", "tiled", "element_wise".
const char* KindName(const Rule& rule, StepKind kind);

// What a computation came to.
struct JobEnd {
  StepResult result;
  std::string explanation;  // what is not finite, and whose
  bool written = true;      // the outputs hold something
  bool absent = false;      // no shard had a gradient
  int64_t micros = 0;
};

// On the engine.
absl::Status RunStepJob(const MatrixJob& job, Stream* stream, DeviceBuffer* workspace, JobEnd* end);
// The next stage of a job with `sharded`: the first makes `step`. After the last, which has no
// step->next(), `end` is filled. `end` stays where it is from the first stage on.
absl::Status RunStageJob(const MatrixJob& job, Stream* stream, std::unique_ptr<ShardedStep>* step,
                         JobEnd* end);
absl::Status RunAbsorbJob(const MatrixJob& job, Stream* stream);

// The gradient of one push block: `parts` regions one after the other.
struct PushRegion {
  int32_t rank = 0;
  int32_t block_index = 0;  // among the rank's push blocks
  BlockSpec block;
  char* data = nullptr;
};

// What trainers may be sent of a step. buffer is null where the matrix is absent or not finite.
struct MatrixUpdate {
  StepKey key;
  bool absent = false;
  std::shared_ptr<SharedBuffer> buffer;  // rows x cols in the pull dtype
};

// For status, of committed steps only.
struct MatrixFigures {
  std::string last_kind;  // refresh, row_wise, tiled, element_wise; empty before the first step
  int64_t last_refresh_step = 0;
  std::optional<double> residual;
  std::optional<double> row_wise_spectral;  // |O|_2 of the last row-wise step that was measured
  std::optional<double> update_rms;
  int64_t commits = 0;
  int64_t refreshes = 0;
  int64_t skips = 0;
  std::string last_skip_reason;
  int64_t compute_micros = 0;  // of all steps, committed or not
};

// Memory of a matrix to be hashed, held as it is while the pins live.
struct HashInput {
  std::string name;
  const char* state = nullptr;  // element-wise; null: all zero
  int64_t state_bytes = 0;
  const char* small_state = nullptr;
  int64_t small_state_bytes = 0;
  const char* weights = nullptr;
  int64_t weights_bytes = 0;
  std::vector<std::shared_ptr<const void>> pins;
};

// The committed state of a matrix, for the server that gains it: what Peer.FetchState sends, in the
// order in which it lies in the spans. Held as it is while the pins live.
struct StateImage {
  struct Span {
    const char* data = nullptr;
    int64_t bytes = 0;
  };
  v1::ShardState state;
  std::vector<Span> spans;
  std::vector<std::shared_ptr<const void>> pins;

  int64_t bytes() const {
    return state.elementwise_bytes() + state.small_bytes() + state.weight_bytes();
  }
};

// XXH3 over the name, the state buffers and the weights.
uint64_t HashMatrix(const HashInput& input);

class MatrixStore {
 public:
  // INVALID_ARGUMENT as MatrixRule::Create and ShardedRule::Create. `spec` and the backend outlive
  // the store.
  static absl::StatusOr<std::unique_ptr<MatrixStore>> Create(int32_t index, const MatrixSpec* spec,
                                                             bool weights_mode,
                                                             std::shared_ptr<Backend> backend);

  // All stores of a run get their memory together. First what lives as long as the run (state,
  // weights), then, once everybody has joined, what steps need; a store that has it already, of
  // these sizes, keeps it. RESOURCE_EXHAUSTED: nothing changed.
  static absl::Status AllocateState(const std::vector<MatrixStore*>& stores,
                                    const std::shared_ptr<Backend>& backend);
  static absl::Status AllocateSteps(const std::vector<MatrixStore*>& stores, Staging staging,
                                    const std::vector<RankState>& ranks,
                                    const std::shared_ptr<Backend>& backend);

  int32_t index() const { return index_; }
  const MatrixSpec& spec() const { return *spec_; }
  // What its jobs need of the engine.
  int64_t WorkspaceBytes() const { return rule_ == nullptr ? 0 : rule_->WorkspaceBytes(); }
  const std::string& Method() const {
    return rule_ == nullptr ? sharded_->Method() : rule_->Method();
  }
  const MatrixFigures& figures() const { return figures_; }
  const std::optional<MatrixUpdate>& update() const { return update_; }
  const std::shared_ptr<SharedBuffer>& weights() const { return weights_; }
  const std::vector<PushRegion>& regions() const { return regions_; }
  const std::shared_ptr<SharedBuffer>& gradient() const { return gradient_; }
  // Of the state and weights that a StateImage may have.
  int64_t CommittedBytes() const {
    return StateBytes(/*elementwise=*/true) + StateBytes(/*elementwise=*/false) + WeightBytes();
  }

  // Where a piece of a push block goes. REQUIRES: checked by the run's machine.
  char* PieceTarget(int32_t region, int32_t part, int64_t offset) const;

  // A job for the open attempt of the machine, whose blocks are all here. Nothing of an earlier
  // update is needed any more by whoever has not pinned it. `partner`: the store of spec().partner,
  // whose committed weights and small state the job reads; null where the matrix has none.
  // RESOURCE_EXHAUSTED: a reader holds a buffer and there is no memory for another.
  absl::StatusOr<MatrixJob> BeginJob(const StepKey& key, const Attempt& attempt, double scale,
                                     const MatrixStore* partner = nullptr);
  // It ended (the result may be not finite): stages it. REQUIRES: not end.absent.
  void FinishJob(const MatrixJob& job, const JobEnd& end);
  void SetAbsent(const StepKey& key);

  // The staged step was decided. Returns the job that takes the gradient in, for lazy staging;
  // it must not run while the state is pinned.
  std::optional<MatrixJob> Commit(int64_t step);
  // The attempt was dropped.
  void Discard();
  // The step, or this matrix in it, was skipped. The matrix's own explanation goes before `reason`.
  void Skip(const std::string& reason);
  // Nobody needs the update of the last step any more.
  void FreeUpdate() { update_.reset(); }

  HashInput PinForHash() const;

  // The state after the last decided step. REQUIRES: nothing is absorbed while the pins live.
  StateImage PinState() const;
  // Where bytes of a StateImage go, in order; memory of this store. REQUIRES: AllocateState, and no
  // step yet. INVALID_ARGUMENT, with both sizes: it is not the state of this matrix.
  struct StateTarget {
    char* data = nullptr;
    int64_t bytes = 0;
  };
  absl::StatusOr<std::vector<StateTarget>> TargetsOf(const v1::ShardState& state);
  // All of them are filled: from here on the store is as the one that the state came from.
  void TakeState(const v1::ShardState& state);

  // The same matrix in a later placement. REQUIRES: no job is under way, nothing is staged.
  void Moved(const MatrixSpec* spec) {
    FreeUpdate();
    staged_step_.reset();
    spec_ = spec;
  }

 private:
  MatrixStore(int32_t index, const MatrixSpec* spec, bool weights_mode,
              std::shared_ptr<Backend> backend)
      : index_(index), weights_mode_(weights_mode), backend_(std::move(backend)), spec_(spec) {}

  bool sends_staged_weights() const { return weights_mode_ && spec_->pull_dtype == DType::kFp32; }
  const std::vector<StateBuffer>& State() const {
    return rule_ == nullptr ? sharded_->State() : rule_->State();
  }
  int64_t StateBytes(bool elementwise) const;
  int64_t WeightBytes() const;
  int64_t PayloadBytes() const;
  bool HasSteps(bool twice, int64_t gradient_bytes) const {
    return gradient_ != nullptr && gradient_->bytes() == gradient_bytes &&
           (staged_ != nullptr) == twice;
  }
  void SetRegions(std::vector<PushRegion> regions);
  // One pointer for each of the rule's buffers, null for those whose memory is not given.
  std::vector<float*> StatePointers(const SharedBuffer* elementwise,
                                    const SharedBuffer* small) const;
  GradientView View(const Attempt& attempt) const;
  StepArgs Args(const StepKey& key, const Attempt& attempt, double scale) const;
  // Makes `slot` a buffer that nobody reads.
  absl::Status MakeIdle(std::shared_ptr<SharedBuffer>* slot);

  // Constant after construction.
  const int32_t index_;
  const bool weights_mode_;
  const std::shared_ptr<Backend> backend_;
  std::unique_ptr<MatrixRule> rule_;  // one of these two
  std::unique_ptr<ShardedRule> sharded_;

  DeviceBuffer held_;  // what a step of a sharded rule works in, from its first stage to its last
  const MatrixSpec* spec_;

  // The rule's state: the element-wise buffers one after the other, and the small ones likewise.
  std::shared_ptr<SharedBuffer> state_, small_state_;
  std::shared_ptr<SharedBuffer> staged_;  // null: lazy
  std::shared_ptr<SharedBuffer> staged_small_;
  std::shared_ptr<SharedBuffer> weights_, staged_weights_;
  std::shared_ptr<SharedBuffer> payload_;              // null: the staged weights are sent
  std::shared_ptr<SharedBuffer> gradient_;             // of all regions
  std::vector<std::shared_ptr<SharedBuffer>> spares_;  // whose readers were slow
  std::vector<PushRegion> regions_;                    // in rank order
  bool zeroed_ = false;                                // state_ is not as allocated

  struct Staged {
    MatrixJob job;
    JobEnd end;
  };
  std::optional<Staged> staged_step_;
  std::optional<MatrixUpdate> update_;
  MatrixFigures figures_;
};

}  // namespace stiefel

#endif  // STIEFEL_SERVER_MATRIX_STORE_H_
