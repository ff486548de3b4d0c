#include "common/clock.h"

#include <chrono>

namespace stiefel {
namespace {

class SteadyClock : public Clock {
 public:
  int64_t NowMicros() const override {
    return std::chrono::duration_cast<std::chrono::microseconds>(
               std::chrono::steady_clock::now().time_since_epoch())
        .count();
  }
};

}  // namespace

const Clock& RealClock() {
  static const SteadyClock* const clock = new SteadyClock();
  return *clock;
}

}  // namespace stiefel
