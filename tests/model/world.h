// A small world around the real machines of servers, leader and trainers: the network, the
// processes' hosts and the user's training loop, all as one value whose next events can be listed
// and applied one by one. Whatever the protocol promises (docs/PROTOCOL.md, last section) is
// checked at every event; the first broken promise is kept in violation().
//
// The network is a set of messages in flight: any of them may be delivered next (so they are
// delayed and reordered without limit), delivered twice, or lost together with the streams of its
// pair. Those of dead lives stay in flight. Time stands still: leases and deadlines end by events.
#ifndef STIEFEL_TESTS_MODEL_WORLD_H_
#define STIEFEL_TESTS_MODEL_WORLD_H_

#include <array>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "client/leader_machine.h"
#include "client/trainer_machine.h"
#include "server/run_machine.h"
#include "server/run_machine_testing.h"
#include "tests/model/message.h"

namespace stiefel::model {

// What a move does: the last server is replaced by one that comes in; owners go round among the
// servers; the last server leaves; one comes in.
enum class MoveKind { kReplace, kRotate, kShrink, kGrow };

// What may happen in a world, and how often.
struct Config {
  int32_t servers = 2;
  int32_t trainers = 2;
  int64_t steps = 2;
  bool weights = false;        // WEIGHTS mode
  int64_t pieces = 1;          // a block travels in this many
  bool idle_server = false;    // the last server owns nothing
  bool absent_matrix = false;  // one more matrix, which nobody has a gradient of
  int64_t clip_step = 0;       // its norm is too large: Rescale
  int64_t skip_step = 0;       // a gradient of it is not finite
  int64_t local_step = 0;      // the last rank says in EndPush that its own gradient is not finite
  int64_t fail_step = 0;       // its attempt 0 cannot be computed in round 1
  bool small_window = false;   // credit of one piece, else unlimited
  // Matrices 0 and 1 are shards of one: their computations of a round meet in a collective.
  bool coupled = false;
  // The leader moves the run after this step, and after the next; a cancelled move is tried again.
  // Each try is of the next kind, while any are left.
  int64_t move_step = -1;
  int32_t moves = 0;
  MoveKind move_kind = MoveKind::kReplace;
  bool fetch_fails = false;  // the first server that fetches state cannot
  // What happens at once instead of as an event of its own.
  bool join_at_once = true;  // the first joins
  bool credit_at_once = true;
  bool compute_at_once = true;
  bool settle_at_once = true;
  bool connect_at_once = true;
  bool chunks_at_once = false;  // gradients and updates
  // Messages that are out of date for ever: of a superseded life, or of what the receiver is past.
  // Delivering them early loses no behaviour as long as they change nothing, now or later.
  bool stale_at_once = false;
  // Faults.
  int32_t restarts = 0;          // a process dies and a new life of its rank starts
  int32_t zombies = 0;           // the same, but the old one lives on
  int32_t losses = 0;            // a message, and the streams of its pair
  int32_t duplicates = 0;        // a message is delivered and stays in flight
  int32_t deadlines = 0;         // of steps and moves
  int32_t restart_rank = -1;     // only this rank
  bool old_snapshots = false;    // a new life may start from one step less
  bool without_weights = false;  // or, in WEIGHTS mode, from none
  ProtocolPolicy policy;
};

// A Config with everything that worlds of it share.
struct Setting {
  explicit Setting(const Config& config);
  int32_t matrices() const { return shape.matrices; }
  Config config;
  testing::RunShape shape;
  // Servers of the first placement, and one that may come in.
  int32_t servers() const { return config.servers + (config.moves > 0 ? 1 : 0); }
  std::vector<TrainerBlock> Blocks(const v1::Placement& placement) const;
  std::vector<std::shared_ptr<const RunSpec>> specs;  // by server of the first placement
};

// The servers of a placement, in its order.
std::vector<int32_t> ServersOf(const v1::Placement& placement);

struct Event {
  enum class Kind {
    kDeliver,
    kDuplicate,
    kLose,  // message
    kConnect,
    kRetry,    // process, server
    kCompute,  // server, index
    kSettle,
    kFetch,         // server
    kDeadline,      // server
    kMoveDeadline,  // process
    kRestart,       // process (the dying one), variant
  };
  Kind kind;
  int32_t process = 0;
  int32_t server = 0;
  int32_t index = 0;    // of the computation
  int32_t variant = 0;  // kRestart: 0 all that was applied, 1 one step less, 2 nothing
  bool zombie = false;
  Hash message{};

  bool fault() const {
    return kind == Kind::kDuplicate || kind == Kind::kLose || kind == Kind::kDeadline ||
           kind == Kind::kMoveDeadline || kind == Kind::kRestart;
  }
};

class World {
 public:
  explicit World(const Setting* setting);

  // Everything that may happen next, in a fixed order.
  std::vector<Event> Enabled() const;
  // False: it cannot happen in this state; nothing was changed.
  bool Apply(const Event& event);
  std::string Describe(const Event& event) const;

  // The first broken promise; empty: none.
  const std::string& violation() const { return violation_; }
  // All ranks have applied all steps, and all servers have decided them.
  bool Done() const;
  // Some rank was explicitly refused with "restore", which is a legal end.
  bool NeedsRestore() const;
  Hash StateHash();

  // With no further fault and fair delivery: does the run come to its end? Fills violation() if
  // not ("stuck ..."). Returns the events it took.
  std::vector<Event> CloseFairly(uint64_t seed);
  int64_t attempts_dropped() const;
  // The run is under another placement than the one it was opened with.
  bool moved() const { return processes_[Current(0)]->placement.epoch() > 1; }
  // The oldest (step, attempt) that is open at some server.
  std::pair<int64_t, int32_t> OldestOpen() const;
  // The attempt that committed or skipped the step; -1: none yet.
  int32_t ConsumedAttempt(int64_t step) const;
  // The newest life of the rank.
  int32_t Current(int32_t rank) const;

 private:
  struct Staged {  // what a server computed of one matrix
    int64_t step = 0;
    int32_t attempt = 0;
    int32_t round = 0;
    bool absent = false;
    Value delta = 0;
    std::vector<int64_t> lives;  // by rank: the generation whose gradient is in it
    std::string flaw;            // why it must not be committed
  };
  struct Computing {
    int32_t matrix;
    int64_t step;
    int32_t attempt;
    int32_t round;
    int64_t epoch;
    bool met = false;  // coupled: the other shard's computation has met this one
  };
  struct Fetch {
    std::shared_ptr<const RunSpec> next;
    int64_t after_step;
  };
  // A server: its machine, and what its host holds.
  struct Server {
    explicit Server(RunMachine m) : machine(std::move(m)) {}
    bool open = true;     // false: it has not been opened, or its run has ended
    std::string request;  // that it was opened with, if it came in
    RunMachine machine;   // of whatever run while not open
    std::optional<Fetch> fetch;
    std::map<int32_t, Value> fetched;              // by matrix
    std::map<std::array<int64_t, 3>, Tag> placed;  // (rank, block, offset) of the open attempt
    std::map<int32_t, Staged> staged;              // by matrix, of the open attempt
    std::map<int32_t, Staged> kept;                // by matrix, of the kept step
    std::vector<Value> weights;                    // by matrix
    std::vector<Computing> computing;
    std::vector<std::pair<int64_t, int32_t>> settling;
    std::vector<int64_t> consumed_bytes;  // by rank, in the open attempt
    int64_t decided = 0;
    Hash hash{};
    bool hashed = false;
  };
  struct Link {            // to one server
    bool calling = false;  // a JoinRun or TakeOver is unanswered
    bool taken_over = false;
    bool joined = false;
    bool control = false;
    bool data = false;
  };
  // One life of a rank.
  struct Process {
    Process(int32_t r, Incarnation i, TrainerMachine t) : rank(r), life(i), trainer(std::move(t)) {}
    int32_t rank;
    Incarnation life;
    bool alive = true;
    bool zombie = false;  // a newer life of the rank exists
    bool joining = false;
    bool restore = false;          // stopped by an explicit refusal
    std::string stopped;           // why; empty: it runs
    v1::Placement placement;       // as far as it knows
    std::vector<int32_t> members;  // its servers; the trainer machine's numbers
    bool takes_over = false;
    std::map<int32_t, std::optional<v1::TakeOverResponse>> records;  // by server; unset: no run
    std::set<int32_t> asked;                                         // for their records
    std::optional<LeaderMachine> leader;
    std::vector<int32_t> leader_servers;  // the leader machine's numbers
    std::optional<v1::Prepare> move;      // that this leader is at
    TrainerMachine trainer;
    std::vector<Link> links;  // by server
    bool has_weights = true;
    int64_t applied = 0;
    std::vector<Value> weights;
    int64_t older_applied = -1;  // the snapshot before
    std::vector<Value> older;
    std::map<std::pair<int32_t, int64_t>, Value> received;  // (block, offset)
    bool old_copy = false;  // started from less than its rank had applied
    Hash hash{};
    bool hashed = false;
  };
  // What the world knows of the whole run, to check everyone against.
  struct Truth {
    std::map<std::array<int64_t, 3>, std::string> said;       // (epoch, step, attempt)
    std::map<int64_t, std::pair<int64_t, int32_t>> consumed;  // step -> (epoch, attempt)
    std::map<std::pair<int64_t, int32_t>, Value> weights;     // (step, matrix) -> after the step
    std::map<int64_t, std::vector<int64_t>> lives;            // step -> generation by rank
    std::set<int64_t> moved_after;                            // steps
  };

  // world.cc
  Server& MutableServer(int32_t server);
  Process& MutableProcess(int32_t process);
  Truth& MutableTruth();
  int32_t Find(int32_t rank, const Incarnation& life) const;
  void Violate(const std::string& what);
  void Say(const std::string& who, int64_t epoch, int64_t step, int32_t attempt,
           v1::Outcome outcome, int32_t round);
  void CheckWeights(const std::string& who, int64_t step, int32_t matrix, Value value);
  void Post(Message message);
  bool Runs(int32_t process) const {
    return processes_[process]->alive && processes_[process]->stopped.empty();
  }
  void Forget(int32_t process);
  void Deliver(const Message& message);
  bool AtOnce(const Message& message) const;
  void Settle();
  void EnableFaults(std::vector<Event>* events) const;
  std::string Waits() const;

  // world_server.cc: what a server's host does
  void DeliverUp(const Message& message);
  void DeliverCall(const Message& message);
  void DeliverChunkUp(const Message& message, const ChunkUp& chunk);
  void Perform(int32_t server, Actions actions);
  void PerformSend(int32_t server, const action::SendControl& send);
  void PerformGrant(int32_t server, int32_t rank);
  void PerformPublish(int32_t server, int32_t rank, int32_t matrix, const Staged& staged,
                      Value value);
  void PerformResend(int32_t server, int32_t rank);
  void PerformFinish(int32_t server, const v1::Decide& decision);
  void CommitMatrix(int32_t server, const v1::Decide& decision, int32_t matrix);
  void PerformFree(int32_t server, int64_t step);
  // Where the computation that meets this one is: server and index; -1: not (yet) there.
  std::pair<int32_t, int32_t> Other(const Computing& work) const;
  bool MayCompute(int32_t server, int32_t index) const;
  int32_t ComputingCount(int32_t server) const {
    return static_cast<int32_t>(servers_[server]->computing.size());
  }
  void Compute(int32_t server, int32_t index);
  Value UpdateValue(const Server& host, int32_t matrix, const Staged& staged) const;
  Staged Sum(const Server& host, const Computing& work) const;
  void SettleServer(int32_t server);
  void EndLeaseOfTheDead(int32_t server, int32_t rank, const Incarnation& newer);

  // world_process.cc: what a trainer's host and its user do
  void StartProcess(int32_t rank, Incarnation life, const Process* before, int32_t variant);
  void Call(int32_t process, int32_t server);
  void Connect(int32_t process, int32_t server);
  void DeliverDown(const Message& message);
  void DeliverControlDown(int32_t process, int32_t server, const v1::ServerMessage& message);
  void DeliverChunkDown(int32_t process, int32_t server, const ChunkDown& chunk);
  void DeliverJoinAnswer(int32_t process, int32_t server, const JoinAnswer& answer);
  void DeliverTakeOverAnswer(int32_t process, int32_t server, const TakeOverAnswer& answer);
  void Stop(int32_t process, const std::string& why);
  void SendFrom(int32_t process, int32_t server, v1::TrainerMessage message);
  void SendFromLeader(int32_t process, const LeaderSends& sends);
  void SendFromTrainer(int32_t process, const TrainerSends& sends);
  void Drive(int32_t process);
  void TakeEnd(int32_t process, const StepEnd& end);
  void BeginStep(int32_t process);
  void SendChunks(int32_t process);
  void Break(int32_t process, int32_t server);
  void Restart(const Event& event);

  // world_move.cc: changes of placement, on both ends
  bool IsMember(const Process& process, int32_t server) const;
  int32_t TrainerIndex(const Process& process, int32_t server) const;
  int32_t LeaderIndex(const Process& process, int32_t server) const;
  // Whether this life has the server in its hands as the leader, and something to say to it.
  bool Leads(const Process& process, int32_t server) const;
  void LeaveOthers(int32_t process);
  // Whether the leader may still ask this server, one that comes in, to open the run.
  bool ToOpen(const Process& process, int32_t server) const;
  v1::Placement NextPlacement(const v1::Placement& now, int64_t epoch) const;
  bool WantsMove(const Process& process) const;
  void StartMove(int32_t process);
  v1::OpenRunRequest OpenRequest(const Process& leader, int32_t server) const;
  void DeliverOpen(const Message& message, const v1::OpenRunRequest& request);
  void DeliverOpenAnswer(int32_t process, int32_t server, const OpenAnswer& answer);
  void AfterMove(int32_t process);
  void Adopt(int32_t process, const v1::Placement& placement);
  void FinishGathering(int32_t process);
  void TellAgain(int32_t process);
  static bool ComesIn(const Server& host);
  void ReleaseIncoming(int32_t server);
  const v1::Placement& InForce(const Server& host, v1::Placement* own) const;
  bool MayFetch(int32_t server) const;
  void FetchState(int32_t server);
  void PerformSwitch(int32_t server, const action::SwitchPlacement& change);
  void CloseServer(int32_t server);

  const Setting* setting_;
  std::vector<std::shared_ptr<Server>> servers_;
  std::vector<std::shared_ptr<Process>> processes_;
  std::shared_ptr<Truth> truth_;
  Bag bag_;
  std::vector<int32_t> to_drive_;  // processes that something reached in this event
  // Faults left.
  int32_t restarts_, zombies_, losses_, duplicates_, deadlines_;
  int32_t moves_;
  bool fetch_fails_;
  std::string violation_;
};

}  // namespace stiefel::model

#endif  // STIEFEL_TESTS_MODEL_WORLD_H_
