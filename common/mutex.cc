#include "common/mutex.h"

#include <algorithm>
#include <chrono>

namespace stiefel {
namespace {

using SteadyTime = std::chrono::steady_clock::time_point;

// A century: added to now() it still fits steady_clock's nanoseconds, which a caller's "for ever"
// would not.
constexpr int64_t kLongestWaitMicros = int64_t{100} * 365 * 24 * 3600 * 1000000;

SteadyTime TimeOf(int64_t micros) {
  return SteadyTime(std::chrono::microseconds(std::clamp<int64_t>(micros, 0, kLongestWaitMicros)));
}

}  // namespace

// The caller owns the lock before and after: unique_lock only borrows it for the wait.
void CondVar::Wait(Mutex* mutex) {
  std::unique_lock<std::mutex> lock(mutex->mutex_, std::adopt_lock);
  condition_.wait(lock);
  lock.release();
}

bool CondVar::WaitUntilMicros(Mutex* mutex, int64_t deadline_micros) {
  std::unique_lock<std::mutex> lock(mutex->mutex_, std::adopt_lock);
  const std::cv_status status = condition_.wait_until(lock, TimeOf(deadline_micros));
  lock.release();
  return status == std::cv_status::no_timeout;
}

bool CondVar::WaitForMicros(Mutex* mutex, int64_t micros) {
  std::unique_lock<std::mutex> lock(mutex->mutex_, std::adopt_lock);
  const SteadyTime deadline =
      std::chrono::steady_clock::now() +
      std::chrono::microseconds(std::clamp<int64_t>(micros, 0, kLongestWaitMicros));
  const std::cv_status status = condition_.wait_until(lock, deadline);
  lock.release();
  return status == std::cv_status::no_timeout;
}

}  // namespace stiefel
