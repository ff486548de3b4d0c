#include "kernels/cpu/thread_pool.h"

#include <chrono>

namespace stiefel {
namespace {

// How long a thread looks for work before it sleeps: a product's next loop follows within
// microseconds, and waking a thread takes tens of them.
constexpr std::chrono::microseconds kSpin{50};
constexpr int kPausesPerLook = 16;

// Returns when done() is true, or after kSpin. Lets others have the processor if they want it.
template <typename Done>
void Spin(const Done& done) {
  const auto end = std::chrono::steady_clock::now() + kSpin;
  while (!done()) {
    for (int i = 0; i < kPausesPerLook; ++i) __builtin_ia32_pause();
    std::this_thread::yield();
    if (std::chrono::steady_clock::now() > end) return;
  }
}

}  // namespace

ThreadPool::ThreadPool(int threads) : threads_(threads) {
  for (int i = 1; i < threads; ++i) helpers_.emplace_back([this] { Help(); });
}

ThreadPool::~ThreadPool() {
  {
    MutexLock lock(&mutex_);
    closing_ = true;
    ++changes_;
  }
  changed_.NotifyAll();
  for (std::thread& helper : helpers_) helper.join();
}

void ThreadPool::Work(Loop* loop) {
  for (int64_t i = loop->next.fetch_add(1); i < loop->count; i = loop->next.fetch_add(1))
    loop->body(i);
}

void ThreadPool::ParallelFor(int64_t count, const std::function<void(int64_t)>& body) {
  if (threads_ == 1 || count <= 1) {
    for (int64_t i = 0; i < count; ++i) body(i);
    return;
  }
  Loop loop(count, body);
  std::list<Loop*>::iterator place;
  {
    MutexLock lock(&mutex_);
    ++busy_;
    place = loops_.insert(loops_.end(), &loop);
    ++changes_;
  }
  changed_.NotifyAll();
  Work(&loop);
  {
    MutexLock lock(&mutex_);
    loops_.erase(place);
    --busy_;
  }
  Spin([&loop] { return loop.helpers == 0; });
  {
    MutexLock lock(&mutex_);
    while (loop.helpers > 0) helpers_left_.Wait(&mutex_);
  }
  changed_.NotifyOne();
}

// A loop with indices left, while a processor is free for it; null when the pool closes.
ThreadPool::Loop* ThreadPool::WaitForLoop() {
  bool spun = false;
  while (!closing_) {
    if (busy_ < threads_) {
      for (Loop* loop : loops_) {
        if (loop->next.load() < loop->count) return loop;
      }
      if (!spun) {
        spun = true;
        const uint64_t seen = changes_;
        mutex_.Unlock();
        Spin([this, seen] { return changes_ != seen; });
        mutex_.Lock();
        continue;
      }
    }
    changed_.Wait(&mutex_);
    spun = false;
  }
  return nullptr;
}

void ThreadPool::Help() {
  MutexLock lock(&mutex_);
  while (Loop* loop = WaitForLoop()) {
    ++busy_;
    ++loop->helpers;
    mutex_.Unlock();
    Work(loop);
    mutex_.Lock();
    --busy_;
    if (--loop->helpers == 0) helpers_left_.NotifyAll();
  }
}

}  // namespace stiefel
