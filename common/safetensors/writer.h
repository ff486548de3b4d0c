#ifndef STIEFEL_COMMON_SAFETENSORS_WRITER_H_
#define STIEFEL_COMMON_SAFETENSORS_WRITER_H_

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/atomic_file.h"
#include "common/interval_set.h"
#include "common/mutex.h"
#include "common/safetensors/format.h"

namespace stiefel {

// A safetensors file in the making: its tensors are declared first, their bytes come in any order
// and in any pieces, from memory that the caller keeps, and the file appears under its name, whole
// and durable, when it is published. Thread-safe, but for Publish.
class SafetensorsWriter {
 public:
  // Errors: those of LayOutSafetensors and of AtomicFile::Create.
  static absl::StatusOr<std::unique_ptr<SafetensorsWriter>> Create(
      const std::string& path, const std::vector<TensorSpec>& tensors,
      const std::map<std::string, std::string>& metadata, ExistingFile existing);

  // Bytes [offset, offset + bytes) of tensors[tensor]. INVALID_ARGUMENT: no such tensor, a range
  // outside it, or bytes that were written before; else the error of the disk.
  absl::Status Write(int64_t tensor, int64_t offset, const void* data, int64_t bytes);

  // FAILED_PRECONDITION, naming tensor and range, where bytes were never written; the error of a
  // Write that failed; else the errors of AtomicFile::Publish.
  absl::Status Publish();

 private:
  SafetensorsWriter(std::vector<TensorSpec> tensors, SafetensorsLayout layout,
                    std::unique_ptr<AtomicFile> file)
      : tensors_(std::move(tensors)),
        layout_(std::move(layout)),
        file_(std::move(file)),
        written_(tensors_.size()) {}

  // Constant after construction.
  const std::vector<TensorSpec> tensors_;
  const SafetensorsLayout layout_;
  const std::unique_ptr<AtomicFile> file_;

  Mutex mutex_;
  std::vector<IntervalSet> written_ ABSL_GUARDED_BY(mutex_);  // bytes of each tensor
  absl::Status failure_ ABSL_GUARDED_BY(mutex_);              // of the last Write that had one
};

}  // namespace stiefel

#endif  // STIEFEL_COMMON_SAFETENSORS_WRITER_H_
