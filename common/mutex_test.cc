#include "common/mutex.h"

#include <gtest/gtest.h>

#include <limits>
#include <thread>
#include <vector>

#include "common/clock.h"

namespace stiefel {
namespace {

class Counter {
 public:
  void Increment() {
    MutexLock lock(&mutex_);
    ++value_;
    changed_.NotifyAll();
  }

  void WaitFor(int64_t value) {
    MutexLock lock(&mutex_);
    while (value_ < value) changed_.Wait(&mutex_);
  }

  bool WaitUntil(int64_t value, int64_t deadline_micros) {
    MutexLock lock(&mutex_);
    while (value_ < value) {
      if (!changed_.WaitUntilMicros(&mutex_, deadline_micros)) return value_ >= value;
    }
    return true;
  }

  bool WaitFor(int64_t value, int64_t micros) {
    MutexLock lock(&mutex_);
    while (value_ < value) {
      if (!changed_.WaitForMicros(&mutex_, micros)) return value_ >= value;
    }
    return true;
  }

 private:
  Mutex mutex_;
  CondVar changed_;
  int64_t value_ ABSL_GUARDED_BY(mutex_) = 0;
};

// Under TSan this also says whether it sees our locks and waits.
TEST(Mutex, IncrementsFromManyThreadsAreNotLostAndWakeTheWaiter) {
  constexpr int kThreads = 4, kPerThread = 2000;
  Counter counter;
  std::vector<std::thread> threads;
  for (int i = 0; i < kThreads; ++i) {
    threads.emplace_back([&counter] {
      for (int j = 0; j < kPerThread; ++j) counter.Increment();
    });
  }
  counter.WaitFor(kThreads * kPerThread);
  for (std::thread& thread : threads) thread.join();
  EXPECT_FALSE(counter.WaitFor(kThreads * kPerThread + 1, 0));
}

TEST(Mutex, TryLockFailsWhileHeldElsewhere) {
  Mutex mutex;
  mutex.Lock();
  std::thread([&mutex] {
    if (mutex.TryLock()) {
      mutex.Unlock();
      ADD_FAILURE() << "locked twice";
    }
  }).join();
  mutex.Unlock();
  if (mutex.TryLock()) {
    mutex.Unlock();
  } else {
    ADD_FAILURE() << "nobody holds it";
  }
}

TEST(CondVar, DeadlinesAreOnTheRealClock) {
  Counter counter;
  const int64_t start = RealClock().NowMicros();
  EXPECT_FALSE(counter.WaitUntil(1, start + 3000));
  EXPECT_GE(RealClock().NowMicros(), start + 3000);
  EXPECT_FALSE(counter.WaitUntil(1, start - 1));
  EXPECT_FALSE(counter.WaitFor(1, -5));
}

TEST(CondVar, ForEverDoesNotOverflow) {
  Counter counter;
  std::thread thread([&counter] {
    counter.Increment();
    counter.Increment();
  });
  EXPECT_TRUE(counter.WaitFor(1, std::numeric_limits<int64_t>::max()));
  EXPECT_TRUE(counter.WaitUntil(2, std::numeric_limits<int64_t>::max()));
  thread.join();
}

}  // namespace
}  // namespace stiefel
