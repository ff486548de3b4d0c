#ifndef STIEFEL_KERNELS_CPU_THREAD_POOL_H_
#define STIEFEL_KERNELS_CPU_THREAD_POOL_H_

#include <atomic>
#include <cstdint>
#include <functional>
#include <list>
#include <thread>
#include <vector>

#include "common/mutex.h"

namespace stiefel {

// Threads that help their callers through loops. Several callers may loop at once: each works on
// its own loop, and idle threads help whichever began first. Helpers stand back while callers alone
// keep `threads` processors busy.
//
// Which thread runs which index is not determined, so a loop's body must give the same result on
// any.
class ThreadPool {
 public:
  // REQUIRES: threads >= 1. Starts threads - 1 helpers: the caller is the last.
  explicit ThreadPool(int threads);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int threads() const { return threads_; }

  // Calls body(i) once for every i in [0, count), and returns when all calls have. `body` must not
  // throw.
  void ParallelFor(int64_t count, const std::function<void(int64_t)>& body);

 private:
  struct Loop {
    Loop(int64_t count, const std::function<void(int64_t)>& body) : count(count), body(body) {}
    const int64_t count;
    const std::function<void(int64_t)>& body;
    std::atomic<int64_t> next{0};
    std::atomic<int> helpers{0};  // inside it; changes under mutex_ of the pool
  };

  static void Work(Loop* loop);
  void Help();
  Loop* WaitForLoop() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const int threads_;
  Mutex mutex_;
  CondVar changed_;       // a loop began, a caller left, or the pool is closing
  CondVar helpers_left_;  // of some loop
  std::list<Loop*> loops_ ABSL_GUARDED_BY(mutex_);
  int busy_ ABSL_GUARDED_BY(mutex_) = 0;  // callers and helpers at work
  std::atomic<uint64_t> changes_{0};  // counts loops begun, and closing: what a helper spins for
  bool closing_ ABSL_GUARDED_BY(mutex_) = false;
  std::vector<std::thread> helpers_;
};

}  // namespace stiefel

#endif  // STIEFEL_KERNELS_CPU_THREAD_POOL_H_
