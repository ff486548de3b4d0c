// Servers that fetch from each other within one process, without gRPC. Nothing happens by itself:
// a test delivers what is under way, in an order that a seed draws, and breaks what it wants to.
// Or a thread delivers all, in order, for tests with real threads.
#ifndef STIEFEL_TESTS_INMEMORY_MEMORY_PEERS_H_
#define STIEFEL_TESTS_INMEMORY_MEMORY_PEERS_H_

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "common/clock.h"
#include "common/mutex.h"
#include "server/peer_transport.h"
#include "server/peer_workers.h"

namespace stiefel {

// Tasks that a test runs itself, in an order of its choice.
class ManualExecutor final : public PeerExecutor {
 public:
  void Post(Task task) override { tasks_.push_back(std::move(task)); }
  size_t size() const { return tasks_.size(); }
  // Runs the task at this place. REQUIRES: index < size().
  void Run(size_t index);

 private:
  std::deque<Task> tasks_;
};

// How often something goes wrong with a call, in [0, 1].
struct PeerFaults {
  double drop_request = 0;  // nobody hears of it; the caller's time runs out
  double duplicate = 0;     // the request is heard twice, the second answer is nobody's
  double drop_answer = 0;   // heard and answered, but the connection breaks before the answer comes
  double corrupt = 0;       // a bit of the answer's payload is flipped
};

// Thread-safe in so far as its calls are. Outlives the transports and every call.
class MemoryPeers {
 public:
  // Delivers in the order that `seed` draws, when Deliver is called. The clock outlives this.
  MemoryPeers(uint64_t seed, const Clock* clock) : clock_(clock), random_(seed) {}
  ~MemoryPeers();

  // What answers at this address; not owned. Until then: UNAVAILABLE.
  void Add(const std::string& address, PeerHandler* handler);
  // The transport of the server at this address.
  std::unique_ptr<PeerTransport> Transport(const std::string& address);

  void set_faults(const PeerFaults& faults);
  // Calls from it and to it end with UNAVAILABLE from now on; when this returns its handler is not
  // called any more.
  void Kill(const std::string& address);
  // Nothing that it sends or is sent arrives until Thaw.
  void Freeze(const std::string& address);
  void Thaw(const std::string& address);

  // Delivers one thing that is under way; false where nothing can be delivered now.
  bool Deliver();
  // Ends the calls whose time has run out.
  void Expire();
  // Calls that are not over, for their callers.
  size_t pending() const;

  // Delivers and expires on a thread of its own from now on.
  void StartThread();

 private:
  using Question = std::function<void(PeerHandler*, std::unique_ptr<PeerReply>)>;
  struct Call;
  class CallHandle;
  class Reply;
  class OneTransport;

  std::unique_ptr<PeerCall> Send(const std::string& from, const std::string& to,
                                 int64_t timeout_micros, const Question& question,
                                 PeerTransport::OnChunk chunk, PeerTransport::Done done);
  void Ask(const std::shared_ptr<Call>& call, const Question& question);
  void Answer(const std::shared_ptr<Call>& call, v1::PeerChunk chunk);
  void Enqueue(const std::shared_ptr<Call>& call, std::function<void()> event);
  // Events that can be delivered, by the call's place.
  std::vector<size_t> Deliverable() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  bool Draw(double rate) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void RunThread();

  const Clock* const clock_;
  mutable Mutex mutex_;
  CondVar wake_;
  std::mt19937_64 random_ ABSL_GUARDED_BY(mutex_);
  PeerFaults faults_ ABSL_GUARDED_BY(mutex_);
  std::map<std::string, PeerHandler*> handlers_ ABSL_GUARDED_BY(mutex_);
  std::set<std::string> dead_ ABSL_GUARDED_BY(mutex_);
  std::set<std::string> frozen_ ABSL_GUARDED_BY(mutex_);
  std::vector<std::shared_ptr<Call>> calls_ ABSL_GUARDED_BY(mutex_);
  bool delivering_ ABSL_GUARDED_BY(mutex_) = false;
  bool threaded_ ABSL_GUARDED_BY(mutex_) = false;
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  std::thread thread_;
};

}  // namespace stiefel

#endif  // STIEFEL_TESTS_INMEMORY_MEMORY_PEERS_H_
