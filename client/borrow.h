// Counts who still reads memory that the caller lent.
#ifndef STIEFEL_CLIENT_BORROW_H_
#define STIEFEL_CLIENT_BORROW_H_

#include <cstdint>
#include <memory>

#include "common/mutex.h"

namespace stiefel {

// Every chunk under way holds a loan; the transport drops it on any of its threads when the last
// byte was read. Made with std::make_shared: loans outlive the session if they must. Thread-safe.
class BorrowedMemory : public std::enable_shared_from_this<BorrowedMemory> {
 public:
  std::shared_ptr<const void> Lend() {
    {
      MutexLock lock(&mutex_);
      ++loans_;
    }
    return std::shared_ptr<const void>(this, [self = shared_from_this()](const void*) {
      MutexLock lock(&self->mutex_);
      if (--self->loans_ == 0) self->returned_.NotifyAll();
    });
  }

  // Waits until no loan is out; false at the deadline (RealClock).
  bool WaitReturned(int64_t deadline_micros) {
    MutexLock lock(&mutex_);
    while (loans_ > 0) {
      if (!returned_.WaitUntilMicros(&mutex_, deadline_micros)) return loans_ == 0;
    }
    return true;
  }

  int64_t loans() const {
    MutexLock lock(&mutex_);
    return loans_;
  }

 private:
  mutable Mutex mutex_;
  CondVar returned_;
  int64_t loans_ ABSL_GUARDED_BY(mutex_) = 0;
};

}  // namespace stiefel

#endif  // STIEFEL_CLIENT_BORROW_H_
