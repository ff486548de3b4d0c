#ifndef STIEFEL_COMMON_MUTEX_H_
#define STIEFEL_COMMON_MUTEX_H_

#include <condition_variable>
#include <cstdint>
#include <mutex>

#include "absl/base/thread_annotations.h"

// std::mutex and std::condition_variable with clang's thread-safety annotations. Not absl::Mutex:
// Debian's build of it is not instrumented, so TSan would not see its locking.
//
//   Mutex mutex_;
//   int64_t step_ ABSL_GUARDED_BY(mutex_);

namespace stiefel {

// Not recursive. Not copyable.
class ABSL_LOCKABLE Mutex {
 public:
  Mutex() = default;
  Mutex(const Mutex&) = delete;
  Mutex& operator=(const Mutex&) = delete;

  void Lock() ABSL_EXCLUSIVE_LOCK_FUNCTION() { mutex_.lock(); }
  void Unlock() ABSL_UNLOCK_FUNCTION() { mutex_.unlock(); }
  bool TryLock() ABSL_EXCLUSIVE_TRYLOCK_FUNCTION(true) { return mutex_.try_lock(); }

  // Tells the analysis that the calling code holds the mutex where it cannot see it (lambdas).
  void AssertHeld() const ABSL_ASSERT_EXCLUSIVE_LOCK() {}

 private:
  friend class CondVar;
  std::mutex mutex_;
};

// Holds `mutex` for its scope.
class ABSL_SCOPED_LOCKABLE MutexLock {
 public:
  explicit MutexLock(Mutex* mutex) ABSL_EXCLUSIVE_LOCK_FUNCTION(mutex) : mutex_(mutex) {
    mutex_->Lock();
  }
  ~MutexLock() ABSL_UNLOCK_FUNCTION() { mutex_->Unlock(); }
  MutexLock(const MutexLock&) = delete;
  MutexLock& operator=(const MutexLock&) = delete;

 private:
  Mutex* const mutex_;
};

// Every wait may also wake without a reason: call it in a loop that tests the condition.
class CondVar {
 public:
  CondVar() = default;
  CondVar(const CondVar&) = delete;
  CondVar& operator=(const CondVar&) = delete;

  void Wait(Mutex* mutex) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex);

  // Waits at most until RealClock() reads `deadline_micros`; false when that time has come.
  bool WaitUntilMicros(Mutex* mutex, int64_t deadline_micros) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex);

  // Waits at most `micros` (0 and less: not at all); false when they are over.
  bool WaitForMicros(Mutex* mutex, int64_t micros) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex);

  void NotifyOne() { condition_.notify_one(); }
  void NotifyAll() { condition_.notify_all(); }

 private:
  std::condition_variable condition_;
};

}  // namespace stiefel

#endif  // STIEFEL_COMMON_MUTEX_H_
