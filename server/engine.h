// The step engine of a process: a few workers that compute matrices, each job with a stream and a
// workspace. gRPC threads only submit.
#ifndef STIEFEL_SERVER_ENGINE_H_
#define STIEFEL_SERVER_ENGINE_H_

#include <atomic>
#include <cstdint>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "common/clock.h"
#include "common/mutex.h"
#include "kernels/backend.h"

namespace stiefel {

// Thread-safe.
class Engine {
 public:
  // `ready` is OK, or says why there is no workspace: then the other two are null. Runs on a
  // worker, exactly once unless the engine is destroyed first. The stream is idle before, and must
  // be left idle (Synchronize).
  using Work =
      std::function<void(const absl::Status& ready, Stream* stream, DeviceBuffer* workspace)>;

  // INVALID_ARGUMENT unless workers >= 1.
  static absl::StatusOr<std::unique_ptr<Engine>> Create(std::shared_ptr<Backend> backend,
                                                        int workers, const Clock* clock);
  // Waits for the jobs that run; those that wait are forgotten.
  ~Engine();

  int workers() const { return static_cast<int>(threads_.size()); }

  // Workspaces that jobs will ask for, in bytes, one entry per matrix. From here on the engine
  // holds the `workers` largest of them, allocated when first needed: this is the bound that
  // plan/memory.h states. An empty list frees all that no running job uses.
  void SetWorkspaces(std::vector<int64_t> bytes);

  // For Submit: before all jobs that have an order.
  static constexpr int64_t kFirst = std::numeric_limits<int64_t>::min();
  // A job waits for at most so many that were submitted after it.
  static constexpr uint64_t kMaxOvertaking = 4096;

  // Queues a job. Of those that wait, the one with the smallest `order` begins first, equal ones in
  // the order in which they came; but one whose workspace is in use does not hold up others. The
  // callers bound the queue: a run has at most one step job and one hash job per matrix.
  void Submit(int64_t workspace_bytes, Work work, int64_t order = kFirst);

  // Jobs waiting or running.
  int pending() const;
  // Microseconds that workers have spent in jobs, in all.
  int64_t busy_micros() const { return busy_micros_.load(); }

 private:
  struct Slot {
    int64_t bytes = 0;
    bool busy = false;
    DeviceBuffer memory;
  };
  struct Job {
    int64_t workspace_bytes = 0;
    Work work;
  };
  // Jobs come in groups of kMaxOvertaking, of which the older goes first: so nobody starves.
  struct Place {
    uint64_t group;
    int64_t order;
    uint64_t number;
    friend bool operator<(const Place& a, const Place& b) {
      return std::tie(a.group, a.order, a.number) < std::tie(b.group, b.order, b.number);
    }
  };

  Engine(std::shared_ptr<Backend> backend, const Clock* clock)
      : backend_(std::move(backend)), clock_(clock) {}
  void Loop(Stream* stream);
  // The next job that can run now, with its slot (null: no workspace is large enough). False: none.
  bool Take(Job* job, std::shared_ptr<Slot>* slot) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void RunJob(const Job& job, const std::shared_ptr<Slot>& slot, Stream* stream);

  // Constant after construction.
  const std::shared_ptr<Backend> backend_;
  const Clock* const clock_;
  std::vector<std::unique_ptr<Stream>> streams_;
  std::vector<std::thread> threads_;

  std::atomic<int64_t> busy_micros_{0};

  mutable Mutex mutex_;
  CondVar changed_;
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  std::map<Place, Job> queue_ ABSL_GUARDED_BY(mutex_);
  uint64_t submitted_ ABSL_GUARDED_BY(mutex_) = 0;
  int running_ ABSL_GUARDED_BY(mutex_) = 0;
  // Ascending by size.
  std::vector<std::shared_ptr<Slot>> slots_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace stiefel

#endif  // STIEFEL_SERVER_ENGINE_H_
