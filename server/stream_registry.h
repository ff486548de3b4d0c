#ifndef STIEFEL_SERVER_STREAM_REGISTRY_H_
#define STIEFEL_SERVER_STREAM_REGISTRY_H_

#include <cstdint>
#include <memory>
#include <set>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "common/mutex.h"

namespace stiefel {

// An open gRPC stream, as far as time and shutdown are concerned.
class StreamEntry {
 public:
  virtual ~StreamEntry() = default;
  // Ends what takes too long: a stream that never said who it is, or one whose reader does not take
  // what is left of it.
  virtual void OnTick(int64_t now) = 0;
  virtual void End(const absl::Status& status) = 0;
  // At once, whatever is under way.
  virtual void Cancel() = 0;
};

// All streams of a process. Thread-safe.
class StreamRegistry {
 public:
  explicit StreamRegistry(int max_streams) : max_streams_(max_streams) {}

  // RESOURCE_EXHAUSTED: too many. UNAVAILABLE: after EndAll.
  absl::Status Add(std::shared_ptr<StreamEntry> stream);
  void Remove(const std::shared_ptr<StreamEntry>& stream);

  void Tick(int64_t now);
  // Ends every stream and lets no new one in.
  void EndAll(const absl::Status& status);
  void CancelAll();
  int64_t size() const;

 private:
  std::set<std::shared_ptr<StreamEntry>> Copy() const;

  const int max_streams_;
  mutable Mutex mutex_;
  std::set<std::shared_ptr<StreamEntry>> streams_ ABSL_GUARDED_BY(mutex_);
  bool ending_ ABSL_GUARDED_BY(mutex_) = false;
};

}  // namespace stiefel

#endif  // STIEFEL_SERVER_STREAM_REGISTRY_H_
