#ifndef STIEFEL_SERVER_SHARED_BUFFER_H_
#define STIEFEL_SERVER_SHARED_BUFFER_H_

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "kernels/backend.h"

namespace stiefel {

// Memory that a step writes and others read later, for as long as they please: gRPC may hold slices
// of it long after the stream died. A writer takes a buffer only while it is idle.
class SharedBuffer {
 public:
  // `memory` keeps data alive.
  SharedBuffer(std::shared_ptr<const void> memory, void* data, int64_t bytes)
      : memory_(std::move(memory)), data_(static_cast<char*>(data)), bytes_(bytes) {}

  char* data() const { return data_; }
  float* floats() const { return reinterpret_cast<float*>(data_); }
  int64_t bytes() const { return bytes_; }

  // No pin is held. What readers did before dropping theirs happened before this returns true.
  bool idle() const { return readers_.load(std::memory_order_acquire) == 0; }

  // Keeps the bytes as they are until the pin is dropped, on any thread. REQUIRES: nothing is
  // writing now.
  static std::shared_ptr<const void> Pin(const std::shared_ptr<SharedBuffer>& buffer) {
    buffer->readers_.fetch_add(1, std::memory_order_relaxed);
    return std::shared_ptr<const void>(buffer->data_, [buffer](const void*) {
      buffer->readers_.fetch_sub(1, std::memory_order_release);
    });
  }

 private:
  const std::shared_ptr<const void> memory_;
  char* const data_;
  const int64_t bytes_;
  std::atomic<int64_t> readers_{0};
};

// One buffer per size, cut from one allocation (so that rounding up to pages is paid once), each
// aligned to 64 bytes. The backend lives at least as long as the last buffer.
absl::StatusOr<std::vector<std::shared_ptr<SharedBuffer>>> AllocateTogether(
    const std::shared_ptr<Backend>& backend, const std::vector<int64_t>& sizes);

}  // namespace stiefel

#endif  // STIEFEL_SERVER_SHARED_BUFFER_H_
