#include "kernels/cpu/thread_pool.h"

namespace stiefel {

ThreadPool::ThreadPool(int threads) : threads_(threads) {
  for (int i = 1; i < threads; ++i) helpers_.emplace_back([this] { Help(); });
}

ThreadPool::~ThreadPool() {
  {
    MutexLock lock(&mutex_);
    closing_ = true;
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
  }
  changed_.NotifyAll();
  Work(&loop);
  {
    MutexLock lock(&mutex_);
    loops_.erase(place);
    --busy_;
    while (loop.helpers > 0) helpers_left_.Wait(&mutex_);
  }
  changed_.NotifyOne();
}

// A loop with indices left, while a processor is free for it; null when the pool closes.
ThreadPool::Loop* ThreadPool::WaitForLoop() {
  while (!closing_) {
    if (busy_ < threads_) {
      for (Loop* loop : loops_) {
        if (loop->next.load() < loop->count) return loop;
      }
    }
    changed_.Wait(&mutex_);
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
