#ifndef STIEFEL_SERVER_ORDERED_CALLS_H_
#define STIEFEL_SERVER_ORDERED_CALLS_H_

#include <deque>
#include <functional>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "common/mutex.h"

namespace stiefel {

// Calls that are decided under a lock and made outside it, in the order in which they were decided.
//
//   { MutexLock lock(&mutex_); ... calls_.Add(...); }
//   calls_.Run();
//
// Thread-safe. A call may Add; it is made by the Run that is under way, in whatever thread.
class OrderedCalls {
 public:
  void Add(std::function<void()> call) {
    MutexLock lock(&mutex_);
    calls_.push_back(std::move(call));
  }

  // Makes every call that was added, unless another thread is at it already: then that one does.
  void Run() {
    for (;;) {
      std::function<void()> call;
      {
        MutexLock lock(&mutex_);
        if (running_ || calls_.empty()) return;
        running_ = true;
        call = std::move(calls_.front());
        calls_.pop_front();
      }
      call();
      call = nullptr;  // what it holds is dropped outside the lock
      MutexLock lock(&mutex_);
      running_ = false;
    }
  }

 private:
  Mutex mutex_;
  bool running_ ABSL_GUARDED_BY(mutex_) = false;
  std::deque<std::function<void()>> calls_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace stiefel

#endif  // STIEFEL_SERVER_ORDERED_CALLS_H_
