#ifndef STIEFEL_COMMON_CLOCK_H_
#define STIEFEL_COMMON_CLOCK_H_

#include <atomic>
#include <cstdint>

namespace stiefel {

// Monotonic time as a parameter, so that tests never sleep. Thread-safe.
class Clock {
 public:
  virtual ~Clock() = default;

  // Microseconds since an arbitrary, fixed point. Never decreases; not related to the time of day.
  virtual int64_t NowMicros() const = 0;
};

// The machine's monotonic clock; lives for ever. CondVar::WaitUntilMicros uses the same time line.
const Clock& RealClock();

// A clock that moves only when told. Thread-safe.
class FakeClock : public Clock {
 public:
  explicit FakeClock(int64_t now_micros = 0) : now_micros_(now_micros) {}

  int64_t NowMicros() const override { return now_micros_.load(); }

  // REQUIRES: micros >= 0.
  void Advance(int64_t micros) { now_micros_.fetch_add(micros); }

 private:
  std::atomic<int64_t> now_micros_;
};

}  // namespace stiefel

#endif  // STIEFEL_COMMON_CLOCK_H_
