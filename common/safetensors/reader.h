#ifndef STIEFEL_COMMON_SAFETENSORS_READER_H_
#define STIEFEL_COMMON_SAFETENSORS_READER_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/safetensors/format.h"

namespace stiefel {

// A safetensors file that is open for reading. Its bytes are read when asked for, and never mapped:
// a file that shrinks meanwhile is an error, not a signal. Thread-safe.
class SafetensorsReader {
 public:
  // Reads the header. NOT_FOUND, PERMISSION_DENIED and the like if the file cannot be read;
  // INVALID_ARGUMENT, with path and numbers, where it is no regular file, is too short, has a
  // header above the limit or beyond its own end, and for the errors of SafetensorsIndex::Parse.
  static absl::StatusOr<std::unique_ptr<SafetensorsReader>> Open(const std::string& path);
  ~SafetensorsReader();
  SafetensorsReader(const SafetensorsReader&) = delete;
  SafetensorsReader& operator=(const SafetensorsReader&) = delete;

  const std::string& path() const { return path_; }
  const SafetensorsIndex& index() const { return index_; }

  // Bytes [offset, offset + bytes) of a tensor of index(). INVALID_ARGUMENT for a range outside the
  // tensor; DATA_LOSS where the file has become shorter.
  absl::Status Read(const TensorInfo& tensor, int64_t offset, void* out, int64_t bytes) const;

  // All elements of an F64, F32, F16 or BF16 tensor; F64 rounds to nearest in floats.
  // INVALID_ARGUMENT for other dtypes.
  absl::StatusOr<std::vector<double>> ReadDoubles(const TensorInfo& tensor) const;
  absl::StatusOr<std::vector<float>> ReadFloats(const TensorInfo& tensor) const;

 private:
  SafetensorsReader(std::string path, int file) : path_(std::move(path)), file_(file) {}
  absl::Status ReadIndex();
  absl::Status ReadAt(int64_t position, void* out, int64_t bytes) const;
  template <typename T>
  absl::StatusOr<std::vector<T>> ReadAs(const TensorInfo& tensor) const;

  const std::string path_;
  const int file_;
  int64_t data_position_ = 0;
  SafetensorsIndex index_;
};

}  // namespace stiefel

#endif  // STIEFEL_COMMON_SAFETENSORS_READER_H_
