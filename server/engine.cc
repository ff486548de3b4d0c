#include "server/engine.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/status.h"

namespace stiefel {

absl::StatusOr<std::unique_ptr<Engine>> Engine::Create(std::shared_ptr<Backend> backend,
                                                       int workers, const Clock* clock) {
  if (workers < 1)
    return absl::InvalidArgumentError(absl::StrCat("an engine of ", workers, " workers"));
  std::unique_ptr<Engine> engine(new Engine(std::move(backend), clock));
  for (int i = 0; i < workers; ++i) {
    STIEFEL_ASSIGN_OR_RETURN(std::unique_ptr<Stream> stream, engine->backend_->CreateStream());
    engine->streams_.push_back(std::move(stream));
  }
  for (const std::unique_ptr<Stream>& stream : engine->streams_) {
    engine->threads_.emplace_back([self = engine.get(), s = stream.get()] { self->Loop(s); });
  }
  return engine;
}

Engine::~Engine() {
  {
    MutexLock lock(&mutex_);
    stopping_ = true;
  }
  changed_.NotifyAll();
  for (std::thread& thread : threads_) thread.join();
}

void Engine::SetWorkspaces(std::vector<int64_t> bytes) {
  const size_t count = std::min(bytes.size(), streams_.size());
  std::partial_sort(bytes.begin(), bytes.begin() + count, bytes.end(), std::greater<int64_t>());
  std::vector<std::shared_ptr<Slot>> slots;
  for (size_t i = count; i-- > 0;) {
    slots.push_back(std::make_shared<Slot>());
    slots.back()->bytes = bytes[i];
  }
  {
    MutexLock lock(&mutex_);
    slots_.swap(slots);
  }
  changed_.NotifyAll();
}  // the old slots are freed here, or by the jobs that still use them

void Engine::Submit(int64_t workspace_bytes, Work work, int64_t order) {
  {
    MutexLock lock(&mutex_);
    const uint64_t number = submitted_++;
    queue_[{number / kMaxOvertaking, order, number}] = {workspace_bytes, std::move(work)};
  }
  changed_.NotifyAll();
}

int Engine::pending() const {
  MutexLock lock(&mutex_);
  return static_cast<int>(queue_.size()) + running_;
}

bool Engine::Take(Job* job, std::shared_ptr<Slot>* slot) {
  for (auto place = queue_.begin(); place != queue_.end(); ++place) {
    Job* const candidate = &place->second;
    bool any = candidate->workspace_bytes == 0;
    std::shared_ptr<Slot> free;
    for (const std::shared_ptr<Slot>& s : slots_) {
      if (candidate->workspace_bytes == 0) break;
      if (s->bytes < candidate->workspace_bytes) continue;
      any = true;
      if (s->busy) continue;
      free = s;
      break;
    }
    if (any && candidate->workspace_bytes > 0 && free == nullptr) continue;
    if (free != nullptr) free->busy = true;
    *job = std::move(*candidate);
    *slot = std::move(free);
    queue_.erase(place);
    return true;
  }
  return false;
}

void Engine::RunJob(const Job& job, const std::shared_ptr<Slot>& slot, Stream* stream) {
  if (job.workspace_bytes == 0) return job.work(absl::OkStatus(), stream, nullptr);
  if (slot == nullptr) {
    return job.work(absl::ResourceExhaustedError(absl::StrCat(
                        "no workspace of ", job.workspace_bytes, " bytes was set aside")),
                    nullptr, nullptr);
  }
  if (slot->memory.data() == nullptr) {
    absl::StatusOr<DeviceBuffer> memory = backend_->Allocate(slot->bytes);
    if (!memory.ok()) return job.work(memory.status(), nullptr, nullptr);
    slot->memory = *std::move(memory);
  }
  job.work(absl::OkStatus(), stream, &slot->memory);
}

void Engine::Loop(Stream* stream) {
  for (;;) {
    Job job;
    std::shared_ptr<Slot> slot;
    {
      MutexLock lock(&mutex_);
      while (!stopping_ && !Take(&job, &slot)) changed_.Wait(&mutex_);
      if (stopping_) return;
      ++running_;
    }
    const int64_t begin = clock_->NowMicros();
    RunJob(job, slot, stream);
    job.work = nullptr;  // what it holds is dropped before the job counts as done
    busy_micros_ += clock_->NowMicros() - begin;
    {
      MutexLock lock(&mutex_);
      --running_;
      if (slot != nullptr) slot->busy = false;
      slot.reset();  // memory that nobody else holds is free when pending() no longer counts the
                     // job
    }
    changed_.NotifyAll();
  }
}

}  // namespace stiefel
