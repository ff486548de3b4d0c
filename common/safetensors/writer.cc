#include "common/safetensors/writer.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "common/errors.h"
#include "common/status.h"

namespace stiefel {

absl::StatusOr<std::unique_ptr<SafetensorsWriter>> SafetensorsWriter::Create(
    const std::string& path, const std::vector<TensorSpec>& tensors,
    const std::map<std::string, std::string>& metadata, ExistingFile existing) {
  STIEFEL_ASSIGN_OR_RETURN(SafetensorsLayout layout, LayOutSafetensors(tensors, metadata));
  const int64_t head_bytes = static_cast<int64_t>(layout.head.size());
  STIEFEL_ASSIGN_OR_RETURN(std::unique_ptr<AtomicFile> file, AtomicFile::Create(path, existing));
  STIEFEL_RETURN_IF_ERROR(file->WriteAt(0, layout.head.data(), head_bytes));
  return std::unique_ptr<SafetensorsWriter>(
      new SafetensorsWriter(tensors, std::move(layout), std::move(file)));
}

absl::Status SafetensorsWriter::Write(int64_t tensor, int64_t offset, const void* data,
                                      int64_t bytes) {
  const int64_t count = static_cast<int64_t>(tensors_.size());
  if (tensor < 0 || tensor >= count) return IndexOutOfRange("tensor", tensor, count);
  const int64_t size = layout_.sizes[tensor];
  const std::string& name = tensors_[tensor].name;
  if (offset < 0 || bytes < 0 || offset > size || bytes > size - offset) {
    return absl::InvalidArgumentError(
        absl::StrCat("tensor ", name, ": ", bytes, " bytes at ", offset, " of ", size));
  }
  {
    MutexLock lock(&mutex_);
    if (written_[tensor].Intersects(offset, offset + bytes)) {
      return absl::InvalidArgumentError(absl::StrCat("tensor ", name, ": some of bytes ", offset,
                                                     "..", offset + bytes, " were written before"));
    }
    written_[tensor].Add(offset, offset + bytes);
  }
  const int64_t data_position = static_cast<int64_t>(layout_.head.size());
  const absl::Status status =
      file_->WriteAt(data_position + layout_.begins[tensor] + offset, data, bytes);
  if (!status.ok()) {
    MutexLock lock(&mutex_);
    failure_ = status;
  }
  return status;
}

absl::Status SafetensorsWriter::Publish() {
  {
    MutexLock lock(&mutex_);
    STIEFEL_RETURN_IF_ERROR(failure_);
    for (size_t i = 0; i < tensors_.size(); ++i) {
      const auto gaps = written_[i].Gaps(0, layout_.sizes[i]);
      if (gaps.empty()) continue;
      return absl::FailedPreconditionError(absl::StrCat("tensor ", tensors_[i].name, ": bytes ",
                                                        gaps[0].first, "..", gaps[0].second,
                                                        " were never written"));
    }
  }
  return file_->Publish();
}

}  // namespace stiefel
