#include "server/stream_registry.h"

#include <utility>

#include "absl/strings/str_cat.h"

namespace stiefel {

absl::Status StreamRegistry::Add(std::shared_ptr<StreamEntry> stream) {
  MutexLock lock(&mutex_);
  if (ending_) return absl::UnavailableError("the server is shutting down");
  if (static_cast<int>(streams_.size()) >= max_streams_) {
    return absl::ResourceExhaustedError(
        absl::StrCat("this server has ", streams_.size(), " open streams; no more are allowed"));
  }
  streams_.insert(std::move(stream));
  return absl::OkStatus();
}

void StreamRegistry::Remove(const std::shared_ptr<StreamEntry>& stream) {
  MutexLock lock(&mutex_);
  streams_.erase(stream);
}

std::set<std::shared_ptr<StreamEntry>> StreamRegistry::Copy() const {
  MutexLock lock(&mutex_);
  return streams_;
}

void StreamRegistry::Tick(int64_t now) {
  for (const auto& stream : Copy()) stream->OnTick(now);
}

void StreamRegistry::EndAll(const absl::Status& status) {
  {
    MutexLock lock(&mutex_);
    ending_ = true;
  }
  for (const auto& stream : Copy()) stream->End(status);
}

void StreamRegistry::CancelAll() {
  for (const auto& stream : Copy()) stream->Cancel();
}

int64_t StreamRegistry::size() const {
  MutexLock lock(&mutex_);
  return static_cast<int64_t>(streams_.size());
}

}  // namespace stiefel
