// The client library: one rank of a training run on a group of optimizer servers.
//
//   auto trainer = Trainer::Connect(options, parameters);           // opens or joins the run
//   for (int64_t step = (*trainer)->next_step(); ...;) {
//     trainer->Begin(step, {});
//     trainer->Push("h.0.w", view);                                 // as soon as backward has it
//     trainer->EndPush();
//     auto outcome = trainer->Wait();                               // commit, skip or drop
//     if (outcome->outcome == Outcome::kCommit) trainer->ApplyAll(weights);
//     trainer->Done();                                              // gradients are yours again
//     if (outcome->outcome != Outcome::kDrop) ++step;               // a dropped attempt is redone
//   }
//   trainer->Close();
//
// docs/client.md is the guide. Every call returns in bounded time; what it waits for, and which
// server or rank is at fault, stands in the error. In a child after fork() every call fails with
// FAILED_PRECONDITION: connect again there.
//
// Threads: all methods may be called from any thread. Begin, EndPush and Done of one step must not
// run at the same time as each other; Push, Wait and Apply of different blocks may.
#ifndef STIEFEL_CLIENT_TRAINER_H_
#define STIEFEL_CLIENT_TRAINER_H_

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "client/tensor.h"
#include "common/dtype.h"
#include "common/rect.h"
#include "plan/rule.h"

namespace stiefel {

class Session;
class Transport;

enum class UpdateMode {
  kDelta,    // the trainer keeps fp32 weights; w = (1 - lr wd) w + delta
  kWeights,  // the servers keep fp32 weights; the trainer pulls them in its own dtype
};
enum class Reduce { kMean, kSum };
enum class CommitMode { kWholeStep, kPerMatrix };
enum class Outcome {
  kCommit,
  kSkip,  // a non-finite gradient or update: nothing changed anywhere, the step number is consumed
  kDrop,  // the attempt ended without a decision on the step: Begin the same step again
};

// A parameter as every rank registers it; the list, in the same order, is the same on all ranks.
//
// Which axes make up matrices is said, never guessed (plan/shape.h): the first `stack_dims` of the
// shape count matrices, the next one is the rows, the others together the columns. So [E, out, in]
// with stack_dims = 1 is a stack of E matrices "name[0]" .. "name[E-1]", each placed and updated on
// its own; [out, in, kh, kw] with stack_dims = 0 is a convolution, one matrix of out x (in kh kw).
// Blocks are rectangles of the stacked view, the matrices one below the other.
struct ParameterSpec {
  std::string name;
  std::vector<int64_t> shape;  // [rows, cols] with rows = outputs, [n], or more dimensions
  Rule rule;                   // PresetRule("muon"), SetOption(...)
  int32_t group = 0;
  DType push_dtype = DType::kFp32;       // gradients on the wire
  std::optional<DType> pull_dtype = {};  // deltas or weights on the wire; default push_dtype
  Reduce reduce = Reduce::kMean;         // over the ranks that push an element
  std::optional<int> stack_dims = {};    // needed where the shape has more than two dimensions
  // Each matrix is cut along its long side into this many shards of even size, which may have
  // owners of their own; 1: whole; 0: as the planner finds best for the servers that there are
  // (docs/planner.md). Every rank gives the same; the leader's counts.
  int64_t shards = 0;

  // Of the stacked view; at most the largest int64.
  int64_t rows() const;
  int64_t cols() const;
};

// A rectangle of a parameter that this rank pushes in every step.
struct PushBlock {
  std::string parameter;
  Rect rect;
  std::optional<int32_t> reduce_group = {};  // blocks of one group are summed before the mean
  int32_t parts = 1;                         // summands that the block comes in
};
struct PullBlock {
  std::string parameter;
  Rect rect;
};

// Every parameter whole, in order: block i is parameter i.
std::vector<PushBlock> WholePushBlocks(const std::vector<ParameterSpec>& parameters);
std::vector<PullBlock> WholePullBlocks(const std::vector<ParameterSpec>& parameters);
// Rows [rank * rows / world_size, (rank + 1) * rows / world_size) of every parameter's stacked view
// (columns of a 1-D one), as FSDP cuts them. Parameters of which a rank gets nothing have no block.
std::vector<PushBlock> RowPushBlocks(const std::vector<ParameterSpec>& parameters, int32_t rank,
                                     int32_t world_size);
std::vector<PullBlock> RowPullBlocks(const std::vector<ParameterSpec>& parameters, int32_t rank,
                                     int32_t world_size);

struct TrainerOptions {
  std::vector<std::string> servers;  // "host:port"; the same list in the same order on all ranks
  std::string run;                   // name of the run
  int32_t rank = 0;
  int32_t world_size = 1;
  UpdateMode mode = UpdateMode::kDelta;
  // At most one of several ranks need push an element; all that do are averaged or summed.
  std::vector<PushBlock> push;
  // In the order in which the next forward pass needs them: servers compute and send, among what is
  // ready, what is first here first. Registration order where empty.
  std::vector<PullBlock> pull;
  bool whole_if_empty = true;  // an empty list stands for whole parameters; false: for no blocks
  // The last step that this trainer's weights have in them. Unset (WEIGHTS mode): it has none and
  // pulls them first (PullWeights).
  std::optional<int64_t> applied_step = 0;

  int data_streams = 2;           // per server, each a connection of its own, 1..64
  int64_t chunk_bytes = 1 << 20;  // payload of one message, 4 KiB..3.75 MiB
  absl::Duration connect_timeout = absl::Seconds(30);  // until every server answered once
  absl::Duration join_timeout = absl::Seconds(120);    // until all ranks joined on all servers

  // Where to write what this rank did when, as a Chrome trace (docs/benchmarks.md). Empty: nowhere.
  std::string trace_file;

  // What the leader opens the run with; other ranks take over the run's values.
  absl::Duration step_timeout = absl::Seconds(60);
  absl::Duration lease = absl::Seconds(15);
  absl::Duration takeover_timeout = absl::Seconds(300);
  // State and weights that one change of placement may move, in bytes; what is left moves at later
  // steps. One shard always may.
  int64_t move_bytes = int64_t{1} << 30;
};

// Overrides of one step for one parameter group; unset: the registered value, or the schedule.
struct GroupOptions {
  std::optional<double> lr = {};
  std::optional<double> weight_decay = {};
  std::optional<double> beta = {};
  std::optional<StepKind> kind = {};
};

// All fields but `weight` must be equal on all ranks, else the attempt is dropped and both values
// are named.
struct StepOptions {
  double weight = 1;  // of this rank in the mean; finite, >= 0
  std::map<int32_t, GroupOptions> groups = {};
  std::optional<double> max_grad_norm = {};  // unset: no clipping
  std::optional<double> grad_scale = {};     // gradients are divided by it
  CommitMode commit = CommitMode::kWholeStep;
};

struct StepOutcome {
  Outcome outcome = Outcome::kDrop;
  int64_t step = 0;
  int32_t attempt = 0;
  double grad_norm = 0;              // after grad_scale, before clipping
  std::vector<std::string> skipped;  // matrices left out (CommitMode::kPerMatrix)
  std::string reason;                // of a skip or drop
};

// Of the current or last step. Seconds of wall-clock time.
struct StepTimings {
  double push_s = 0;         // Begin until the last byte was handed to the network; 0 until then
  double decide_s = 0;       // Begin until the outcome and all updates were here; 0 until then
  double wait_s = 0;         // spent by callers in Wait and WaitParameter
  double apply_s = 0;        // spent by callers in Apply
  int64_t bytes_pushed = 0;  // payload, resent bytes included
  int64_t bytes_pulled = 0;
  int64_t bytes_staged = 0;  // of them copied first: another dtype, or strides
  int64_t chunks_pushed = 0;
  int64_t chunks_pulled = 0;
  int64_t reconnects = 0;
  int64_t moves = 0;  // changes of placement since Connect
  double move_s = 0;  // that they took, from the leader's first question or the first word of them
};

struct ApplyOptions {
  // Unset: those of the step (Begin's group override, else the rule's).
  std::optional<double> lr = {};
  std::optional<double> weight_decay = {};
  // DELTA into bf16 weights only: round up or down with the probability that keeps the mean. A
  // function of (seed, step, block, element).
  std::optional<uint64_t> stochastic_rounding = {};
};

class Trainer {
 public:
  // Rank 0 plans the placement and opens the run on all servers, or takes over a run of that name
  // whose leader died, and finishes what that one had decided. Other ranks wait for the run.
  // Returns when all ranks have joined on all servers. `transport`: how to reach servers, null for
  // gRPC; must outlive the trainer. INVALID_ARGUMENT: options or parameters (with the value).
  // UNAVAILABLE names the server that could not be reached within connect_timeout.
  // DEADLINE_EXCEEDED names the ranks that did not join. FAILED_PRECONDITION: servers hold another
  // run, or are at another step. ALREADY_EXISTS: this rank lives already.
  static absl::StatusOr<std::unique_ptr<Trainer>> Connect(
      const TrainerOptions& options, const std::vector<ParameterSpec>& parameters,
      Transport* transport = nullptr);

  // Safe in the middle of a step: calls that other threads are inside are cancelled and waited for
  // (REQUIRES: no thread enters a call any more). Leaves the run without saying so: Close first.
  // When it returns no borrowed memory is in use.
  ~Trainer();
  Trainer(const Trainer&) = delete;
  Trainer& operator=(const Trainer&) = delete;

  // ---- weights (WEIGHTS mode)
  // Some server lacks initial weights: ranks must together give all of every parameter before the
  // first step can end.
  bool weights_needed() const;
  // Sends initial weights of a whole parameter, or of a rectangle of it; returns when the server
  // has them. What several ranks give must be equal (ALREADY_EXISTS otherwise).
  absl::Status InitWeights(std::string_view parameter, const TensorView& weights);
  absl::Status InitWeights(std::string_view parameter, const Rect& rect, const TensorView& weights);
  // For a trainer that joined without weights: waits for those of the newest decided step. Copy
  // them out with Apply, then call Done.
  absl::StatusOr<StepOutcome> PullWeights(absl::Duration timeout = absl::InfiniteDuration());

  // ---- a step
  // The step to begin next, 1 + the last applied one.
  int64_t next_step() const;
  // FAILED_PRECONDITION: another step than next_step(), the last one is not Done, the rank was
  // replaced.
  absl::Status Begin(int64_t step, const StepOptions& options = {});
  // Hands over a part of a block of TrainerOptions::push. A contiguous view of the wire dtype is
  // not copied: the memory is borrowed until Done returns. Others are converted at once and stay
  // the caller's. INVALID_ARGUMENT: a view that does not fit the block; FAILED_PRECONDITION: no
  // step begun, pushed before.
  absl::Status Push(int32_t block, const TensorView& gradient, int32_t part = 0);
  // The same for a parameter that has one push block.
  absl::Status Push(std::string_view parameter, const TensorView& gradient);
  // The block has no gradient in this step.
  absl::Status PushAbsent(int32_t block, int32_t part = 0);
  absl::Status PushAbsent(std::string_view parameter);
  // Everything was pushed or declared absent. Of parameters that the trainer updates itself: their
  // sum of squares (for the norm) and whether they are finite, each counted by one rank.
  absl::Status EndPush(double local_sum_squares = 0, bool local_finite = true);

  // Waits for the outcome of the step and all updates that this rank pulls. Ends by itself,
  // whatever the timeout: UNAVAILABLE names a server not heard of for the step timeout;
  // DEADLINE_EXCEEDED says who has not voted or pushed; CANCELLED; FAILED_PRECONDITION: this rank
  // was replaced. After an error that is not final Wait may be called again.
  absl::StatusOr<StepOutcome> Wait(absl::Duration timeout = absl::InfiniteDuration());
  // Waits for the outcome and the updates of one parameter only.
  absl::StatusOr<StepOutcome> WaitParameter(std::string_view parameter,
                                            absl::Duration timeout = absl::InfiniteDuration());

  // The received bytes of a pull block (row-major, wire dtype), until Done; those of several
  // matrices of a stack are put together first. NOT_FOUND: there are none, the parameter was
  // skipped or untouched. Matrices of a stack that were are zeros in DELTA mode, and NOT_FOUND
  // names them in WEIGHTS mode. FAILED_PRECONDITION: not here yet.
  absl::StatusOr<TensorView> Delta(int32_t pull_block) const;
  absl::StatusOr<TensorView> Delta(std::string_view parameter) const;

  // Takes the update of a pull block into the caller's weights, once. DELTA: w = (1 - lr wd) w +
  // delta; fp32 weights, or bf16 with stochastic rounding. WEIGHTS: copies, to any floating type.
  // Nothing happens to parameters that were skipped or untouched.
  absl::Status Apply(int32_t pull_block, const MutableTensorView& weights,
                     const ApplyOptions& options = {});
  absl::Status Apply(std::string_view parameter, const MutableTensorView& weights,
                     const ApplyOptions& options = {});
  // All pull blocks, in order.
  absl::Status ApplyAll(const std::vector<MutableTensorView>& weights,
                        const ApplyOptions& options = {});

  // The outcome was taken in: the next Begin tells the servers so. Returns when the borrowed
  // gradient memory is free. REQUIRES: Wait (or PullWeights) returned an outcome, else
  // FAILED_PRECONDITION.
  absl::Status Done();

  StepTimings timings() const;

  // ---- the end
  // Waiting and later calls return CANCELLED. Any thread, any time.
  void Cancel();
  // Leaves the run on all servers; the first error, all are tried. Nothing can be called after it.
  absl::Status Close();

 private:
  explicit Trainer(std::unique_ptr<Session> session);
  absl::Status CheckProcess() const;

  const int64_t process_;  // that connected
  std::unique_ptr<Session> session_;
};

}  // namespace stiefel

#endif  // STIEFEL_CLIENT_TRAINER_H_
