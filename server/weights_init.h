#ifndef STIEFEL_SERVER_WEIGHTS_INIT_H_
#define STIEFEL_SERVER_WEIGHTS_INIT_H_

#include <cstdint>
#include <map>
#include <memory>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "common/mutex.h"
#include "common/rect.h"
#include "proto/chunk.h"
#include "server/run_spec.h"
#include "server/shared_buffer.h"

namespace stiefel {

// Takes in initial weights (WEIGHTS mode): rectangles in any order and from any rank, until every
// owned matrix is covered. Thread-safe.
class WeightsInit {
 public:
  struct Progress {
    int64_t accepted_elements = 0;  // of this chunk, new or equal
    bool complete = false;
    bool completed_now = false;  // by this chunk
  };

  // `weights`: fp32, by matrix index, of all owned matrices.
  WeightsInit(std::shared_ptr<const RunSpec> spec,
              std::map<int32_t, std::shared_ptr<SharedBuffer>> weights);

  // INVALID_ARGUMENT: pieces that are no rectangles of owned matrices, payload of another size;
  // DATA_LOSS: another checksum; ALREADY_EXISTS: other values than were sent before (the first
  // element that differs). Pieces before the one that is refused stay accepted.
  absl::StatusOr<Progress> Take(IncomingChunk* chunk);

  // The first step changed the weights: what still comes is acknowledged and not compared.
  void Close();

 private:
  struct Target {
    std::shared_ptr<SharedBuffer> weights;
    std::shared_ptr<const void> pin;  // no step writes them while copies are compared
    std::vector<Rect> covered;        // disjoint
    bool complete = false;
  };

  absl::Status Check(const IncomingChunk& chunk) const;
  absl::Status Place(int32_t index, const Rect& rect, const float* values, Target* target)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const std::shared_ptr<const RunSpec> spec_;
  Mutex mutex_;
  std::map<int32_t, Target> targets_ ABSL_GUARDED_BY(mutex_);
  bool closed_ ABSL_GUARDED_BY(mutex_) = false;
  size_t incomplete_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace stiefel

#endif  // STIEFEL_SERVER_WEIGHTS_INIT_H_
