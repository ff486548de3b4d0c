// Threads for what is too long for gRPC's: adding and copying for peers.
#ifndef STIEFEL_SERVER_PEER_WORKERS_H_
#define STIEFEL_SERVER_PEER_WORKERS_H_

#include <deque>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "common/mutex.h"

namespace stiefel {

// Runs what is posted to it, later, never on the posting thread's stack. Thread-safe.
class PeerExecutor {
 public:
  using Task = std::function<void()>;
  virtual ~PeerExecutor() = default;
  virtual void Post(Task task) = 0;
};

// Threads that take tasks in the order in which they were posted.
class PeerWorkers final : public PeerExecutor {
 public:
  // REQUIRES: threads >= 1.
  explicit PeerWorkers(int threads);
  // Runs what was posted, then returns.
  ~PeerWorkers() override;
  void Post(Task task) override;

 private:
  void Run();

  Mutex mutex_;
  CondVar wake_;
  std::deque<Task> tasks_ ABSL_GUARDED_BY(mutex_);
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  std::vector<std::thread> threads_;  // the last member: they use the others
};

// Tasks that run one at a time, in order, on an executor's threads. What only they touch needs no
// lock. Thread-safe; shared, because tasks under way outlive their owner's interest.
class PeerStrand : public std::enable_shared_from_this<PeerStrand> {
 public:
  using Task = PeerExecutor::Task;

  // The executor outlives the strand.
  explicit PeerStrand(PeerExecutor* executor) : executor_(executor) {}

  // False, with the task destroyed, once the strand is closed.
  bool Post(Task task);

  // No task waits or runs.
  bool Idle() const;

  // Waits for the task that runs; then runs `last` and, after it, the tasks that wait, on this
  // thread. Nothing runs after it returned. Once; not within a task of this strand.
  void Close(const Task& last);

 private:
  void Run();

  PeerExecutor* const executor_;
  mutable Mutex mutex_;
  CondVar rests_;
  std::deque<Task> tasks_ ABSL_GUARDED_BY(mutex_);
  bool scheduled_ ABSL_GUARDED_BY(mutex_) = false;  // the executor has it, or is running it
  bool running_ ABSL_GUARDED_BY(mutex_) = false;
  bool closed_ ABSL_GUARDED_BY(mutex_) = false;
};

}  // namespace stiefel

#endif  // STIEFEL_SERVER_PEER_WORKERS_H_
