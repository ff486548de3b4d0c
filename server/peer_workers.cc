#include "server/peer_workers.h"

#include <utility>

namespace stiefel {

PeerWorkers::PeerWorkers(int threads) {
  for (int i = 0; i < threads; ++i) threads_.emplace_back([this] { Run(); });
}

PeerWorkers::~PeerWorkers() {
  {
    MutexLock lock(&mutex_);
    stopping_ = true;
  }
  wake_.NotifyAll();
  for (std::thread& thread : threads_) thread.join();
}

void PeerWorkers::Post(Task task) {
  {
    MutexLock lock(&mutex_);
    tasks_.push_back(std::move(task));
  }
  wake_.NotifyOne();
}

void PeerWorkers::Run() {
  for (;;) {
    Task task;
    {
      MutexLock lock(&mutex_);
      while (tasks_.empty() && !stopping_) wake_.Wait(&mutex_);
      if (tasks_.empty()) return;
      task = std::move(tasks_.front());
      tasks_.pop_front();
    }
    task();
  }
}

bool PeerStrand::Post(Task task) {
  {
    MutexLock lock(&mutex_);
    if (closed_) return false;
    tasks_.push_back(std::move(task));
    if (scheduled_) return true;
    scheduled_ = true;
  }
  executor_->Post([self = shared_from_this()] { self->Run(); });
  return true;
}

bool PeerStrand::Idle() const {
  MutexLock lock(&mutex_);
  return tasks_.empty() && !running_;
}

void PeerStrand::Run() {
  for (;;) {
    Task task;
    {
      MutexLock lock(&mutex_);
      running_ = false;
      if (closed_ || tasks_.empty()) {
        scheduled_ = false;
        rests_.NotifyAll();
        return;
      }
      running_ = true;
      task = std::move(tasks_.front());
      tasks_.pop_front();
    }
    task();
  }
}

void PeerStrand::Close(const Task& last) {
  std::deque<Task> rest;
  {
    MutexLock lock(&mutex_);
    closed_ = true;
    while (running_) rests_.Wait(&mutex_);
    rest.swap(tasks_);
  }
  last();
  for (const Task& task : rest) task();
}

}  // namespace stiefel
