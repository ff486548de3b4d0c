#include "kernels/backend.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"

namespace stiefel {

DeviceBuffer& DeviceBuffer::operator=(DeviceBuffer&& other) noexcept {
  if (this != &other) {
    Free();
    backend_ = std::exchange(other.backend_, nullptr);
    data_ = std::exchange(other.data_, nullptr);
    bytes_ = std::exchange(other.bytes_, 0);
  }
  return *this;
}

void DeviceBuffer::Free() {
  if (backend_ != nullptr && data_ != nullptr) backend_->FreeBytes(data_, bytes_);
  backend_ = nullptr;
  data_ = nullptr;
  bytes_ = 0;
}

absl::StatusOr<DeviceBuffer> Backend::Allocate(int64_t bytes) {
  if (bytes < 0)
    return absl::InvalidArgumentError(absl::StrCat("cannot allocate ", bytes, " bytes"));
  absl::StatusOr<void*> data = AllocateBytes(bytes);
  if (!data.ok()) return data.status();
  return DeviceBuffer(this, *data, bytes);
}

// One norm per vector; and for the power iteration two vectors of cols and a partial sum of cols
// for each of its row blocks.
int64_t RowWiseScratch(int64_t rows, int64_t cols) {
  return (1 + std::min(rows, kSpectralBlocks)) * cols;
}

}  // namespace stiefel
