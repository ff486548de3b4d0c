#include "server/shared_buffer.h"

#include <utility>

#include "common/status.h"

namespace stiefel {
namespace {

constexpr int64_t kAlignment = 64;

int64_t Aligned(int64_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

struct Memory {
  std::shared_ptr<Backend> backend;  // outlives the buffer
  DeviceBuffer buffer;
};

}  // namespace

absl::StatusOr<std::vector<std::shared_ptr<SharedBuffer>>> AllocateTogether(
    const std::shared_ptr<Backend>& backend, const std::vector<int64_t>& sizes) {
  int64_t total = 0;
  for (const int64_t size : sizes) total += Aligned(size);
  STIEFEL_ASSIGN_OR_RETURN(DeviceBuffer buffer, backend->Allocate(total));
  auto memory = std::make_shared<Memory>(Memory{backend, std::move(buffer)});
  std::vector<std::shared_ptr<SharedBuffer>> buffers;
  buffers.reserve(sizes.size());
  char* data = memory->buffer.as<char>();
  for (const int64_t size : sizes) {
    buffers.push_back(std::make_shared<SharedBuffer>(memory, data, size));
    data += Aligned(size);
  }
  return buffers;
}

}  // namespace stiefel
