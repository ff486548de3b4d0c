#ifndef STIEFEL_KERNELS_LOCAL_COLLECTIVE_H_
#define STIEFEL_KERNELS_LOCAL_COLLECTIVE_H_

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "common/mutex.h"
#include "kernels/collective.h"

namespace stiefel {

// The collectives of matrices all of whose shards live in this process, in memory that the host
// reads. One thread of its own adds up what is complete, in shard order, and calls `done`; so a
// `done` must not block, and may call Start and Cancel. It keeps no outcome: memory named in a part
// is free as soon as its `done` is called.
//
// Misuse ends every part of the collective that has come with INVALID_ARGUMENT: a matrix or shard
// that does not exist, a shard that comes twice, kinds or counts that differ.
class LocalCollective final : public Collective {
 public:
  // shards[matrix]: of how many shards a matrix consists.
  explicit LocalCollective(std::vector<int32_t> shards);
  // What is under way ends with CANCELLED. REQUIRES: not on its own thread.
  ~LocalCollective() override;

  void Start(const CollectiveKey& key, const CollectivePart& part, Done done) override;
  // Also for parts that still come: of this attempt and all before it.
  void Cancel(int64_t step, int32_t attempt) override;

 private:
  using Attempt = std::pair<int64_t, int32_t>;  // step, attempt
  struct KeyOrder {
    bool operator()(const CollectiveKey& a, const CollectiveKey& b) const;
  };
  // The parts of one collective that have come, by shard.
  struct Meeting {
    std::vector<std::optional<CollectivePart>> parts;
    std::vector<Done> done;
  };
  // What the thread is to do: call every `done` with the status, after computing where it is OK.
  struct Task {
    Attempt attempt;
    Meeting meeting;
    absl::Status status;
  };

  absl::Status Enter(const CollectiveKey& key, const CollectivePart& part, Meeting* meeting) const;
  void Work();

  const std::vector<int32_t> shards_;

  Mutex mutex_;
  CondVar wake_;      // there is a task, or an end
  CondVar computed_;  // computing_ has changed
  std::map<CollectiveKey, Meeting, KeyOrder> meetings_ ABSL_GUARDED_BY(mutex_);
  std::deque<Task> tasks_ ABSL_GUARDED_BY(mutex_);
  std::optional<Attempt> computing_ ABSL_GUARDED_BY(mutex_);  // whose memory is in use
  std::optional<Attempt> cancelled_ ABSL_GUARDED_BY(mutex_);  // it and all before
  bool ends_ ABSL_GUARDED_BY(mutex_) = false;

  std::thread thread_;  // last: it uses the others
};

}  // namespace stiefel

#endif  // STIEFEL_KERNELS_LOCAL_COLLECTIVE_H_
