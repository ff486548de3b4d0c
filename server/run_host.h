// A run as a server serves it: the pure RunMachine, and around it the memory, the engine and the
// streams. Transport-free: it speaks to trainers through sinks.
//
// Every event takes the lock, tells the machine, performs its actions in order, and then, outside
// the lock, puts chunks together and calls sinks and callbacks. Payload is copied outside the lock;
// the buffers of an attempt are not reused before every copy and computation in them has ended
// (RunMachine::OnSettled).
//
// Files: run_host.cc (calls, life), run_host_streams.cc (streams, chunks, credits),
// run_host_step.cc (the machine's actions, the engine), run_host_shards.cc (shards that are
// computed together), run_host_move.cc (changes of placement), run_host_status.cc.
#ifndef STIEFEL_SERVER_RUN_HOST_H_
#define STIEFEL_SERVER_RUN_HOST_H_

#include <cstdint>
#include <deque>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/clock.h"
#include "common/mutex.h"
#include "server/admission.h"
#include "server/engine.h"
#include "server/matrix_store.h"
#include "server/options.h"
#include "server/ordered_calls.h"
#include "server/peer_collective.h"
#include "server/peer_transport.h"
#include "server/peer_workers.h"
#include "server/publisher.h"
#include "server/run_machine.h"
#include "server/run_trace.h"
#include "server/sinks.h"
#include "server/weights_init.h"
#include "stiefel/v1/optimizer.pb.h"
#include "stiefel/v1/status.pb.h"

namespace stiefel {

class StateFetcher;

// Thread-safe. Made by Open; jobs and streams share its ownership.
class RunHost final : public PeerHandler, public std::enable_shared_from_this<RunHost> {
 public:
  // What a process lends to its run. All outlive it.
  struct Environment {
    ServerOptions options;  // resolved: no zeros that stand for defaults
    std::shared_ptr<Backend> backend;
    Engine* engine;
    const Clock* clock;
    Trace* trace = nullptr;  // null: none is written
    // To compute with other servers, and to fetch state from them; null: neither.
    PeerTransport* peers = nullptr;
    PeerExecutor* executor = nullptr;  // for collectives
  };

  // Checks and admits the run and allocates its state. INVALID_ARGUMENT and FAILED_PRECONDITION as
  // RunSpec::Create; RESOURCE_EXHAUSTED with the numbers, nothing allocated.
  static absl::StatusOr<std::shared_ptr<RunHost>> Open(Environment environment,
                                                       const v1::OpenRunRequest& request);

  ~RunHost() override;

  // ---- calls

  // `done` is called exactly once, outside locks, now or later, unless CancelJoin(token) came
  // first. Returns the token.
  using JoinDone = std::function<void(const absl::Status&, const v1::JoinRunResponse&)>;
  uint64_t Join(const v1::JoinRunRequest& request, JoinDone done);
  // True: `done` will not be called. False: it was or is being called.
  bool CancelJoin(uint64_t token);

  absl::StatusOr<v1::TakeOverResponse> TakeOver(const v1::TakeOverRequest& request);
  absl::StatusOr<v1::CloseRunResponse> CloseRun(const v1::CloseRunRequest& request);

  // ---- streams. An id names a stream until its On*Closed; what comes for an id that the host
  // ended is ignored.

  // FAILED_PRECONDITION: an unknown, stale or foreign sender. Messages may be sent before this
  // returns. A newer control stream of one incarnation replaces the older.
  absl::StatusOr<uint64_t> OpenControl(const v1::Sender& sender, std::shared_ptr<ControlSink> sink);
  void OnControlMessage(uint64_t stream, const v1::TrainerMessage& message);
  void OnControlClosed(uint64_t stream);

  // Likewise; RESOURCE_EXHAUSTED: too many streams of the rank.
  absl::StatusOr<uint64_t> OpenData(const v1::Sender& sender, std::shared_ptr<DataSink> sink);
  // Takes a chunk in; its bytes are read during the call. An error ends the stream, to which the
  // caller says it: INVALID_ARGUMENT, OUT_OF_RANGE, FAILED_PRECONDITION (stale sender, no credit),
  // RESOURCE_EXHAUSTED (beyond all credit), DATA_LOSS (checksum). Pieces before the refused one
  // stay accepted.
  absl::Status OnChunk(uint64_t stream, IncomingChunk* chunk);
  void OnDataWritten(uint64_t stream);
  void OnDataClosed(uint64_t stream);

  // WEIGHTS mode: one chunk of an InitWeights call. Errors: those of WeightsInit::Take;
  // FAILED_PRECONDITION: DELTA mode, or the sender has not joined.
  absl::StatusOr<WeightsInit::Progress> TakeInitWeights(IncomingChunk* chunk);

  // ---- the other servers

  // As PeerCollective::OnFetchPart.
  void OnFetchPart(const v1::FetchPartRequest& request, std::unique_ptr<PeerReply> reply) override;

  // ---- changes of placement (run_host_move.cc)

  // Another server asks for the state of a shard that it gains. Answered now or later.
  // FAILED_PRECONDITION: another run, epoch or step; NOT_FOUND: the shard is not here.
  void OnFetchState(const v1::FetchStateRequest& request,
                    std::unique_ptr<PeerReply> reply) override;

  // An operator asks for servers to be added or drained; the leader hears of it. `done` exactly
  // once, outside locks: the placement in force once it agrees with the request (at once where
  // wait_seconds is 0). FAILED_PRECONDITION: nobody leads the run, or the leader refuses, with its
  // reason; DEADLINE_EXCEEDED: the placement does not agree yet.
  using ReplanDone = std::function<void(const absl::Status&, const v1::ReplanResponse&)>;
  void Replan(const v1::ReplanRequest& request, ReplanDone done);
  // Asks the leader to take this server's shards elsewhere. False: nobody could do it.
  bool AskToLeave();
  // This server has no part in the run any more; and its ranks were told where it went.
  bool Away() const;
  bool Left() const;
  // It holds nothing that a run needs: the run went elsewhere, or was to come here under a
  // placement that `request` replaces.
  bool MayBeReplacedBy(const v1::OpenRunRequest& request) const;
  // It was asked to leave, and nothing speaks against it yet.
  bool Leaving() const;

  // ---- time and the end

  // About four times a second.
  void Tick();
  // No new attempt is begun; an unsealed one is dropped.
  void Drain();
  // After Drain: the attempt that was sealed then is decided and taken in, and connected trainers
  // were given their updates.
  bool Drained() const;
  // Ends all streams and pending joins with this status.
  void Disconnect(const absl::Status& status);
  bool ended() const;
  // Nothing new is given to the engine, and nothing is computed together with other servers any
  // more. Before the engine goes.
  void Stop();

  // ---- status

  std::shared_ptr<const RunSpec> spec() const;
  void FillHeldRun(v1::ServerInfo::HeldRun* held) const;
  void FillStatus(v1::RunStatus* status) const;
  double ReleaseSeconds() const;
  int64_t declared_bytes() const;
  int64_t open_streams() const;
  // Hashes of the committed state by matrix index, when nothing is being absorbed; on an engine
  // thread, or at once where nothing is owned.
  using HashDone = std::function<void(const std::map<int32_t, uint64_t>&)>;
  void HashState(HashDone done);

 private:
  using StreamKey = std::pair<int32_t, Incarnation>;  // of a rank's life

  struct ControlStream {
    StreamKey key;
    std::shared_ptr<ControlSink> sink;
  };
  struct DataStream {
    StreamKey key;
    std::shared_ptr<DataSink> sink;
    bool writing = false;
  };
  struct DataWrite {
    std::shared_ptr<DataSink> sink;
    ChunkPlan plan;
    v1::Sender receiver;
  };
  // One event: what it makes the machine ask for, and what is left to do outside the lock.
  struct Turn {
    Actions actions;
    std::vector<DataWrite> writes;
    // Set: what is computed together in this attempt, and before, is over.
    std::shared_ptr<PeerCollective> collective;
    std::pair<int64_t, int32_t> cancelled;
  };
  static constexpr std::pair<int64_t, int32_t> kAllAttempts{std::numeric_limits<int64_t>::max(),
                                                            std::numeric_limits<int32_t>::max()};
  // A shard's computation together with the other shards of its matrix: stages on the engine, one
  // at a time, a collective between each two. It counts as computing from its first stage until it
  // has ended, also while nobody works on it.
  struct Chain {
    MatrixJob job;
    int32_t matrix = 0;
    std::shared_ptr<PeerCollective> collective;
    std::unique_ptr<ShardedStep> step;
    JobEnd end;
    int64_t waits_since = 0;  // for the collective
  };
  struct Credit {
    int64_t step = 0;
    int32_t attempt = -1;
    int64_t consumed_bytes = 0;
    int64_t granted_bytes = 0;
  };
  // A rank's streams and what is on its way to it.
  struct RankIo {
    Credit credit;
    PullQueue queue;
    std::set<uint64_t> data_streams;
    Incarnation pulls_of;                           // whose pull blocks these are
    std::map<int32_t, std::vector<int32_t>> pulls;  // matrix -> owned pull blocks
  };
  // Where an accepted piece of a chunk goes. Null: its bytes are passed over.
  struct Placement {
    char* target = nullptr;
    int64_t bytes = 0;
    bool check = false;  // a checksum is to be compared
    bool lost = false;
  };
  // What is fetched for a placement that is prepared.
  struct Incoming {
    std::shared_ptr<const RunSpec> next;
    std::map<int32_t, std::unique_ptr<MatrixStore>> stores;  // of the shards gained
    std::map<int32_t, v1::ShardState> states;
    std::shared_ptr<StateFetcher> fetcher;  // null: nothing to fetch
  };
  // A FetchState call that waits until its step is decided here.
  struct StateCall {
    v1::FetchStateRequest request;
    std::shared_ptr<PeerReply> reply;
    int64_t deadline = 0;
  };
  struct ReplanWaiter {
    v1::ReplanRequest request;
    ReplanDone done;
    int64_t deadline = 0;
  };
  struct HashRun {
    HashDone done;
    std::map<int32_t, uint64_t> hashes;
    size_t missing = 0;
  };

  RunHost(Environment environment, std::shared_ptr<const RunSpec> spec);
  absl::Status Allocate();

  // run_host.cc
  int64_t Now() const { return environment_.clock->NowMicros(); }
  void EndTurn(Turn* turn) ABSL_LOCKS_EXCLUDED(mutex_);
  absl::Status AdmitSteps(const std::vector<RankState>& ranks)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  AdmissionLimits Limits() const;
  void CloseStreams(const absl::Status& status) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void ReleaseIfQuiet() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  // run_host_streams.cc
  absl::Status CheckChunk(const DataStream& stream, const IncomingChunk& chunk) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status CheckCredit(const v1::ChunkHeader& header, int64_t bytes)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status PlacePieces(const v1::ChunkHeader& header, std::vector<Placement>* placements)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  static absl::Status CopyPieces(IncomingChunk* chunk, std::vector<Placement>* placements);
  void GrantCredit(int32_t rank, bool always, Turn* turn) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void CloseData(uint64_t stream, const absl::Status& status) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void CloseControl(uint64_t stream, const absl::Status& status)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Pump(int32_t rank, Turn* turn) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void RefreshPulls(int32_t rank) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Enqueue(int32_t rank, int32_t block, const MatrixStore& store)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void EnqueueWeights(int32_t rank, int32_t block, const MatrixStore& store)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  // run_host_step.cc
  void Perform(Turn* turn) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Do(action::SendControl& action, Turn* turn) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Do(action::AnswerJoin& action, Turn* turn) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Do(action::GrantCredit& action, Turn* turn) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Do(action::Compute& action, Turn* turn) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Do(action::Publish& action, Turn* turn) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Do(action::Resend& action, Turn* turn) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Do(action::Finish& action, Turn* turn) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Do(action::FreeDeltas& action, Turn* turn) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Do(action::Fence& action, Turn* turn) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Do(action::FetchState& action, Turn* turn) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Do(action::DropPrepared& action, Turn* turn) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Do(action::SwitchPlacement& action, Turn* turn) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Do(action::EndRun& action, Turn* turn) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // What is computed together in this attempt, or before, ends.
  void CancelAttempt(int64_t step, int32_t attempt, Turn* turn)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  bool Current(const StepKey& key) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void RunCompute(MatrixJob job, int32_t matrix, const absl::Status& ready, Stream* stream,
                  DeviceBuffer* workspace);
  void TraceStage(const MatrixJob& job, int32_t matrix, int64_t begin, int64_t end)
      ABSL_LOCKS_EXCLUDED(mutex_);
  void EndCompute(const MatrixJob& job, int32_t matrix, const absl::Status& status,
                  const JobEnd& end) ABSL_LOCKS_EXCLUDED(mutex_);
  void CommitStores(const v1::Decide& decision) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void StartAbsorbs() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void RunAbsorb(const MatrixJob& job, const absl::Status& ready, Stream* stream);
  // Tells the machine that an ended attempt has left the buffers, once it has.
  void MaybeSettle(Turn* turn) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  // run_host_shards.cc
  absl::Status OpenCollective() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void StartChain(MatrixJob job, int32_t matrix) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void SubmitStage(std::shared_ptr<Chain> chain) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void RunStage(const std::shared_ptr<Chain>& chain, const absl::Status& ready, Stream* stream);
  void OnCollected(const std::shared_ptr<Chain>& chain, const absl::Status& status);
  void EndChain(const std::shared_ptr<Chain>& chain, const absl::Status& status);
  // run_host_move.cc
  absl::Status MakeRoom(Incoming* incoming) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void StartFetch(int64_t after_step) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void DropIncoming() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void OnFetched(int64_t epoch, const absl::Status& status);
  // OK: it can be answered now; UNAVAILABLE: later.
  absl::Status CheckStateCall(const v1::FetchStateRequest& request) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void AnswerStateCalls() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void SetWorkspaces() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  bool Agrees(const v1::ReplanRequest& request) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // The leader's control stream is up.
  bool Led() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  v1::ReplanResponse PlacementNow() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void AnswerReplans() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void OnReplanRefused(const v1::ReplanRefused& refused) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  // run_host_status.cc
  void StartHashes() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void RunHash(const std::shared_ptr<HashRun>& run, int32_t matrix, HashInput input);

  // Constant after construction.
  const Environment environment_;
  const int64_t opened_at_;
  std::unique_ptr<WeightsInit> init_;  // null: DELTA mode

  // Own synchronisation.
  OrderedCalls calls_;

  mutable Mutex mutex_;
  std::shared_ptr<const RunSpec> spec_ ABSL_GUARDED_BY(mutex_);  // of the placement in force
  RunMachine machine_ ABSL_GUARDED_BY(mutex_);
  std::unique_ptr<RunTrace> trace_ ABSL_GUARDED_BY(mutex_);  // null: none is written
  std::map<int32_t, std::unique_ptr<MatrixStore>> stores_ ABSL_GUARDED_BY(mutex_);
  // By rank and push block: the store and the region in it; null where another server owns it.
  std::vector<std::vector<std::pair<MatrixStore*, int32_t>>> targets_ ABSL_GUARDED_BY(mutex_);
  Admitted admitted_ ABSL_GUARDED_BY(mutex_);
  std::vector<int64_t> need_order_ ABSL_GUARDED_BY(mutex_);  // by matrix
  // Null: no matrix is computed together.
  std::shared_ptr<PeerCollective> collective_ ABSL_GUARDED_BY(mutex_);

  uint64_t next_id_ ABSL_GUARDED_BY(mutex_) = 1;
  std::map<uint64_t, JoinDone> joins_ ABSL_GUARDED_BY(mutex_);
  std::map<uint64_t, ControlStream> controls_ ABSL_GUARDED_BY(mutex_);
  std::map<StreamKey, uint64_t> control_of_ ABSL_GUARDED_BY(mutex_);
  std::map<uint64_t, DataStream> data_ ABSL_GUARDED_BY(mutex_);
  std::vector<RankIo> ranks_ ABSL_GUARDED_BY(mutex_);

  int64_t copies_ ABSL_GUARDED_BY(mutex_) = 0;     // chunks being copied into gradient buffers
  int64_t computing_ ABSL_GUARDED_BY(mutex_) = 0;  // step jobs with the engine
  int64_t absorbing_ ABSL_GUARDED_BY(mutex_) = 0;  // absorb jobs with the engine, or waiting
  int64_t hashing_ ABSL_GUARDED_BY(mutex_) = 0;    // hash jobs with the engine
  std::optional<std::pair<int64_t, int32_t>> settling_ ABSL_GUARDED_BY(mutex_);
  bool stopped_ ABSL_GUARDED_BY(mutex_) = false;
  bool drained_ ABSL_GUARDED_BY(mutex_) = false;  // no attempt is open that was so before Drain
  std::vector<MatrixJob> absorbs_ ABSL_GUARDED_BY(mutex_);  // wait for the hash jobs
  std::vector<HashDone> hash_waiters_ ABSL_GUARDED_BY(mutex_);

  std::optional<Incoming> incoming_ ABSL_GUARDED_BY(mutex_);
  std::vector<StateCall> state_calls_ ABSL_GUARDED_BY(mutex_);
  int64_t lending_ ABSL_GUARDED_BY(mutex_) = 0;  // FetchState calls that read committed state
  // Gradient buffers of stores that left, or were made anew, while copies into them may be under
  // way.
  std::vector<std::shared_ptr<SharedBuffer>> retired_ ABSL_GUARDED_BY(mutex_);
  std::vector<ReplanWaiter> replans_ ABSL_GUARDED_BY(mutex_);
  bool leaving_ ABSL_GUARDED_BY(mutex_) = false;
  std::set<int32_t> untold_
      ABSL_GUARDED_BY(mutex_);  // ranks that have not heard where the run went

  double last_grad_norm_ ABSL_GUARDED_BY(mutex_) = 0;
  std::deque<int64_t> step_ends_ ABSL_GUARDED_BY(mutex_);  // times of the last steps
  int64_t bytes_pushed_ ABSL_GUARDED_BY(mutex_) = 0;
  int64_t bytes_pulled_ ABSL_GUARDED_BY(mutex_) = 0;
};

}  // namespace stiefel

#endif  // STIEFEL_SERVER_RUN_HOST_H_
