#include "kernels/cpu/thread_pool.h"

#include <atomic>
#include <set>
#include <thread>
#include <vector>

#include "gtest/gtest.h"

namespace stiefel {
namespace {

TEST(ThreadPoolTest, EveryIndexRunsOnce) {
  for (int threads : {1, 2, 5}) {
    ThreadPool pool(threads);
    for (int64_t count : {0, 1, 2, 1000}) {
      std::vector<std::atomic<int>> runs(count);
      pool.ParallelFor(count, [&](int64_t i) { ++runs[i]; });
      for (const std::atomic<int>& n : runs) EXPECT_EQ(n, 1);
    }
  }
}

TEST(ThreadPoolTest, AHelperTakesPart) {
  ThreadPool pool(2);
  Mutex mutex;
  CondVar entered;
  std::set<std::thread::id> threads;
  // Each of the two indices waits for the other: one thread alone would never end.
  pool.ParallelFor(2, [&](int64_t) {
    MutexLock lock(&mutex);
    threads.insert(std::this_thread::get_id());
    entered.NotifyAll();
    while (threads.size() < 2) entered.Wait(&mutex);
  });
  EXPECT_EQ(threads.size(), 2u);
}

TEST(ThreadPoolTest, CallersLoopAtTheSameTime) {
  ThreadPool pool(3);
  std::vector<int64_t> sums(6);
  std::vector<std::thread> callers;
  for (size_t c = 0; c < sums.size(); ++c) {
    callers.emplace_back([&, c] {
      for (int repeat = 0; repeat < 200; ++repeat) {
        std::atomic<int64_t> sum{0};
        pool.ParallelFor(20, [&](int64_t i) { sum += i; });
        sums[c] += sum;
      }
    });
  }
  for (std::thread& caller : callers) caller.join();
  for (int64_t sum : sums) EXPECT_EQ(sum, 200 * 190);
}

}  // namespace
}  // namespace stiefel
