// One rank's life in a run: the pure machines, the streams that carry their messages, and the
// memory that they speak of.
//
// Flow of a step (docs/client.md has the picture)
//   Push      -> a source (memory, staged or borrowed) and pieces queued in the TrainerMachine
//   Pump      -> pieces under credit, many to a chunk, checksummed outside the lock, to a free
//   stream OnControl -> credits, decisions (TrainerMachine); votes and acknowledgements
//   (LeaderMachine) OnChunk   -> verdict under the lock, copy outside it, completion under it Wait
//   -> until TrainerMachine::End, or something says that it cannot come
//
// Streams of one server live and die together, as a Link: when one breaks all are cancelled, the
// machine is told, and the session's own thread opens a new link after a backoff. That thread also
// sends heartbeats, and is the only one that cancels and destroys streams.
//
// Files: session.cc (connecting, life), session_step.cc (the calls of a step), session_wait.cc
// (waiting), session_links.cc (streams, own thread), session_updates.cc (what arrives, and applying
// it), session_weights.cc (initial weights), session_move.cc and
// session_lead.cc (changes of placement).
//
// Users speak of blocks of parameters; the machines and the wire of those blocks' parts in each
// shard ("wire blocks", client/layout.h), which differ where a parameter is a stack of matrices and
// where a matrix is cut. What the machines call a matrix is a shard.
#ifndef STIEFEL_CLIENT_SESSION_H_
#define STIEFEL_CLIENT_SESSION_H_

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/borrow.h"
#include "client/calls.h"
#include "client/layout.h"
#include "client/leader_machine.h"
#include "client/move_request.h"
#include "client/open_run.h"
#include "client/session_trace.h"
#include "client/trainer.h"
#include "client/trainer_machine.h"
#include "client/transport.h"
#include "common/mutex.h"

namespace stiefel {

class Session {
 public:
  static absl::StatusOr<std::unique_ptr<Session>> Connect(Layout layout, Transport* transport);
  // Cancels, and waits until no stream is left and all borrowed memory has come back.
  ~Session();

  const Layout& layout() const { return layout_; }

  // As in Trainer, with blocks by index.
  bool weights_needed() const;
  absl::Status InitWeights(int32_t parameter, const Rect& rect, const TensorView& weights);
  int64_t next_step() const;
  absl::Status Begin(int64_t step, const StepOptions& options);
  absl::Status Push(int32_t block, int32_t part, const TensorView* gradient);  // null: absent
  absl::Status EndPush(double local_sum_squares, bool local_finite);
  // `parameter` < 0: everything.
  absl::StatusOr<StepOutcome> Wait(int32_t parameter, absl::Duration timeout);
  absl::StatusOr<StepOutcome> PullWeights(absl::Duration timeout);
  absl::StatusOr<TensorView> Delta(int32_t pull_block);
  absl::Status Apply(int32_t pull_block, const MutableTensorView& weights,
                     const ApplyOptions& options);
  absl::Status Done();
  StepTimings timings() const;
  void Cancel();
  absl::Status Close();

 private:
  class ControlEvents;
  class DataEvents;

  // Marks a thread inside a public call: the destructor waits for it.
  class Caller {
   public:
    explicit Caller(const Session* session) : session_(session) {
      MutexLock lock(&session_->mutex_);
      ++session_->callers_;
    }
    ~Caller() {
      MutexLock lock(&session_->mutex_);
      if (--session_->callers_ == 0) session_->no_callers_.NotifyAll();
    }
    Caller(const Caller&) = delete;
    Caller& operator=(const Caller&) = delete;

   private:
    const Session* const session_;
  };

  // All streams to one server, from opening to the last OnClosed.
  struct Link {
    Link();
    ~Link();

    // Listeners outlive their streams.
    std::unique_ptr<ControlEvents> control_events;
    std::vector<std::unique_ptr<DataEvents>> data_events;
    std::unique_ptr<ClientControlStream> control;
    std::vector<std::unique_ptr<ClientDataStream>> data;
    std::vector<bool> busy;  // by data stream: a chunk is between Send and OnSent
    size_t next_stream = 0;
    int open_streams = 0;
    int users = 0;         // threads inside Send, without the lock
    bool closing = false;  // one stream broke, or nobody wants it any more
    bool cancelled = false;
  };

  struct ServerState {
    std::string address;
    std::shared_ptr<ServerConnection> connection;
    std::unique_ptr<Link> link;
    int64_t reopen_at = 0;
    int failures = 0;
    int64_t heard = 0;         // when a message last came
    int64_t heartbeat_at = 0;  // when the next is due
    absl::Status last_error;
    int64_t consumed = 0;  // at join
    bool weights_needed = false;
    bool comes_in = false;    // of the leader: it is not in the run yet, and has no data streams
    bool link_wanted = true;  // as long as links are
  };

  // Where the bytes of a (block, part) are during an attempt.
  struct Source {
    const char* data = nullptr;
    bool strided = false;             // row-major as the block; else its wire blocks one by one
    std::unique_ptr<char[]> staging;  // kept for the next step
  };

  // Memory of one version (step, attempt, round) of a wire block that is pulled. A copy that is
  // late for its version still owns the buffer it was given, so it can never write over a newer
  // one.
  struct Buffer {
    std::unique_ptr<char[]> bytes;
    int users = 0;  // copies into it and Apply calls out of it; guarded by mutex_
  };
  struct Pulled {
    std::shared_ptr<Buffer> buffer;
    int64_t step = 0;
    int32_t attempt = 0;
    int32_t round = 0;
    v1::ChunkHeader::Type type = v1::ChunkHeader::UPDATE;
    bool absent = false;
    bool applied = false;
  };
  // How an update is taken in.
  struct Application {
    bool delta = false;  // else weights are copied
    float decay = 1;
    uint64_t seed = 0;
  };
  struct Copy {         // of one piece of an arriving chunk
    int32_t block = 0;  // on the wire
    UpdateVerdict verdict = UpdateVerdict::kDiscard;
    std::shared_ptr<Buffer> buffer;
    char* target = nullptr;
    int64_t bytes = 0;
    bool intact = true;
  };

  Session(Layout layout, Transport* transport);

  // ---- connecting (session.cc)
  absl::Status Join();
  absl::StatusOr<Incarnation> OpenOrTakeOver(int64_t connect_deadline, int64_t deadline);
  absl::Status TakeOverAll(const Survey& survey, const Incarnation& incarnation, int64_t deadline);
  absl::Status FinishTakeOver(const std::vector<v1::TakeOverResponse>& records, int64_t deadline);
  void SetServers(const Servers& servers);
  void StartTrainer(const std::vector<v1::JoinRunResponse>& answers);
  // The blocks as the machine knows them, under owners_.
  void MachineBlocks(std::vector<TrainerBlock>* push, std::vector<TrainerBlock>* pull) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  Servers AllServers() const;

  // ---- streams (session_links.cc)
  void RunThread();
  void OpenLink(int32_t server) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void OpenDataStreams(int32_t server) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void CloseLink(int32_t server, Link* link, const absl::Status& why)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  bool TendLinks(int64_t now, std::vector<Link*>* cancel,
                 std::vector<std::unique_ptr<Link>>* destroy, int64_t* wake)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void SendControl(int32_t server, v1::TrainerMessage message)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  template <typename Sends>
  void Perform(Sends sends) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Sends what may be sent. REQUIRES: mutex_ is not held.
  void Pump(int32_t server) ABSL_LOCKS_EXCLUDED(mutex_);
  void PumpAll() ABSL_LOCKS_EXCLUDED(mutex_);
  // The last byte of the attempt may just have been handed over.
  void NotePushed() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  bool NextChunk(int32_t server, Link** link, size_t* stream, OutgoingChunk* chunk)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void OnControl(int32_t server, Link* link, const v1::ServerMessage& message);
  void HandleControl(int32_t server, const v1::ServerMessage& message)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void OnSent(int32_t server, Link* link, size_t stream);
  void OnStreamClosed(int32_t server, Link* link, const absl::Status& why);
  void Fail(const absl::Status& why) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  // ---- changes of placement (session_move.cc, session_lead.cc)
  void RunMover();
  bool Stopping() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void SetCalling(const Servers& servers);
  bool MaySurvey() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void SurveyServers();
  void RefuseWish(const absl::Status& why) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  bool MayLead() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void MaybeLead() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void OnReplanAsked(const v1::ReplanAsked& asked) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void OnEpochAck(int32_t server, const v1::EpochAck& ack) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void OnMoved(int32_t server, const v1::Moved& moved) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::StatusOr<v1::Placement> Lead();
  absl::Status OpenOnNew(const Servers& all, const v1::OpenRunRequest& opened,
                         const v1::Prepare& prepare);
  void CloseOnNew(const Servers& all, const v1::OpenRunRequest& opened);
  absl::StatusOr<v1::Placement> DriveMove(const Servers& all, const v1::Prepare& prepare);
  void ResumeHere(const absl::Status& why);
  bool AnyLinkFrom(size_t first) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status LeaveLinks();
  absl::Status Follow(const v1::Placement& placement);
  Servers ConnectTo(const std::vector<std::string>& addresses);
  absl::StatusOr<std::vector<v1::JoinRunResponse>> JoinNewest(Servers* servers,
                                                              const Incarnation& incarnation,
                                                              std::optional<int64_t> applied,
                                                              int64_t epoch, int64_t deadline);
  void Adopt(const Servers& servers, const std::vector<v1::JoinRunResponse>& answers,
             std::optional<int64_t> applied);

  // ---- updates (session_updates.cc)
  void OnChunk(int32_t server, Link* link, IncomingChunk* chunk);
  absl::Status AdmitChunk(int32_t server, const IncomingChunk& chunk, std::vector<Copy>* copies)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  char* PlaceFor(const v1::ChunkHeader& header, int32_t block, std::shared_ptr<Buffer>* buffer)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // The wire block has an update to take in: null if it was skipped or untouched.
  absl::StatusOr<Pulled*> Ready(int32_t wire) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::StatusOr<const char*> JoinedDelta(int32_t pull_block) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status TakeUpdates(const LayoutBlock& block, std::vector<std::shared_ptr<Buffer>>* buffers)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  Application ApplicationOf(int32_t pull_block, const ApplyOptions& options) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  // ---- the calls of a step (session_step.cc), initial weights (session_weights.cc)
  // The gradient where it lies, or copied into `staging` as the wire wants it.
  absl::StatusOr<const char*> Stage(const LayoutBlock& spec, size_t source, const std::string& part,
                                    const TensorView& gradient, std::unique_ptr<char[]>* staging)
      ABSL_LOCKS_EXCLUDED(mutex_);
  // Where elements [offset, offset + count) of a wire block are.
  void AddSpans(const WireBlock& wire, const Source& source, int64_t offset, int64_t count,
                std::vector<OutgoingChunk::Span>* spans) const;
  absl::Status SendInitWeights(int32_t server, std::vector<OutgoingChunk> chunks)
      ABSL_LOCKS_EXCLUDED(mutex_);

  // ---- waiting (session_wait.cc)
  static int64_t DeadlineAfter(absl::Duration timeout);
  absl::Status FinalError() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // The outcome, an error that ends the wait, or nothing yet.
  std::optional<absl::StatusOr<StepOutcome>> CheckWait(int32_t parameter, int64_t now)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  std::optional<StepEnd> EndOf(int32_t parameter) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  StepOutcome ToOutcome(const StepEnd& end) const;
  void Look(int64_t now) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status Silent(int64_t now, int64_t limit) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status TimedOut(int64_t now) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  bool OutcomeIsKnown() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  int64_t HeartbeatMicros() const;

  // Constant after construction.
  Transport* const transport_;
  const std::shared_ptr<BorrowedMemory> borrowed_ = std::make_shared<BorrowedMemory>();
  // Constant after Connect.
  Layout layout_;                        // matrices are cut when the run was joined
  std::unique_ptr<SessionTrace> trace_;  // null: none is written; used under mutex_
  std::vector<size_t> first_source_;     // by push block: index of its part 0 in sources_
  int64_t step_timeout_ = 0;             // microseconds, as the next
  int64_t lease_ = 0;
  int64_t chunk_bytes_ = 0;

  mutable Mutex mutex_;
  CondVar changed_;  // somebody in Wait may have to look
  CondVar wake_;     // the own thread has something to do
  std::vector<ServerState> servers_ ABSL_GUARDED_BY(mutex_);
  std::vector<int32_t> owners_ ABSL_GUARDED_BY(mutex_);  // by shard: index of its server
  int links_dying_ ABSL_GUARDED_BY(mutex_) = 0;          // taken from servers_, not yet destroyed
  v1::Sender sender_ ABSL_GUARDED_BY(mutex_);
  std::optional<TrainerMachine> trainer_ ABSL_GUARDED_BY(mutex_);
  std::optional<LeaderMachine> leader_ ABSL_GUARDED_BY(mutex_);
  std::vector<std::pair<int32_t, v1::ServerMessage>> early_ ABSL_GUARDED_BY(mutex_);
  std::vector<Source> sources_ ABSL_GUARDED_BY(mutex_);
  std::vector<Pulled> pulled_ ABSL_GUARDED_BY(mutex_);                   // by wire block
  std::vector<std::unique_ptr<char[]>> joined_ ABSL_GUARDED_BY(mutex_);  // by pull block; see Delta

  StepOptions step_options_ ABSL_GUARDED_BY(mutex_);
  std::optional<v1::Decided> decided_ ABSL_GUARDED_BY(mutex_);  // of the target step, not a drop
  int64_t awaiting_since_ ABSL_GUARDED_BY(mutex_) = 0;          // first Awaiting; 0: none
  int64_t looked_at_ ABSL_GUARDED_BY(mutex_) = 0;  // when a thread of this process last ran here
  int64_t begun_at_ ABSL_GUARDED_BY(mutex_) = 0;
  bool push_ended_ ABSL_GUARDED_BY(mutex_) = false;
  StepTimings timings_ ABSL_GUARDED_BY(mutex_);

  // Changes of placement.
  v1::OpenRunRequest opened_ ABSL_GUARDED_BY(mutex_);  // of the leader: the run as it is now
  int64_t largest_epoch_ ABSL_GUARDED_BY(mutex_) = 1;  // ever in force or prepared, as far as known
  MoveWish wish_ ABSL_GUARDED_BY(mutex_);              // what the leader was asked for
  int64_t lead_after_ ABSL_GUARDED_BY(mutex_) = 0;     // no move begins before
  // The servers in force and those to come in, and what they said; empty: to be asked.
  Servers surveyed_ ABSL_GUARDED_BY(mutex_);
  std::vector<v1::ServerInfo> infos_ ABSL_GUARDED_BY(mutex_);
  // The leader withholds its BeginStep: it is about to move the run, or at it.
  bool leading_ ABSL_GUARDED_BY(mutex_) = false;
  bool moving_ ABSL_GUARDED_BY(mutex_) = false;  // the mover is at work
  std::optional<v1::Placement> heard_moved_ ABSL_GUARDED_BY(mutex_);
  std::vector<std::shared_ptr<ServerConnection>> calling_ ABSL_GUARDED_BY(mutex_);  // of the mover
  bool mover_ended_ ABSL_GUARDED_BY(mutex_) = true;

  absl::Status fatal_ ABSL_GUARDED_BY(mutex_);
  bool cancelled_ ABSL_GUARDED_BY(mutex_) = false;
  bool closed_ ABSL_GUARDED_BY(mutex_) = false;
  bool links_wanted_ ABSL_GUARDED_BY(mutex_) = false;
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  mutable int callers_ ABSL_GUARDED_BY(mutex_) = 0;
  mutable CondVar no_callers_;

  std::thread thread_;
  std::thread mover_;
};

}  // namespace stiefel

#endif  // STIEFEL_CLIENT_SESSION_H_
