// The safetensors format: eight bytes of little-endian header length, a JSON header
// {"NAME": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}, "__metadata__": {...}},
// padded with spaces, and the data, which the tensors fill without gap or overlap.
//
// Pure functions between bytes and descriptions; files are read by reader.h and written by
// writer.h.
#ifndef STIEFEL_COMMON_SAFETENSORS_FORMAT_H_
#define STIEFEL_COMMON_SAFETENSORS_FORMAT_H_

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace stiefel {

// Limits on what is read and written: of the JSON, as the format says, and of one shape.
inline constexpr int64_t kMaxSafetensorsHeaderBytes = 100'000'000;
inline constexpr int64_t kMaxTensorDimensions = 32;
// Bytes in front of the JSON.
inline constexpr int64_t kSafetensorsLengthBytes = 8;

// What a tensor is called and looks like. `dtype` is the format's name: "F64", "F32", "F16",
// "BF16", "I64" ...
struct TensorSpec {
  std::string name;
  std::string dtype;
  std::vector<int64_t> shape;  // empty: a scalar
};

// Bytes per element; nothing for a dtype that is not known here.
std::optional<int64_t> TensorDTypeBytes(absl::string_view dtype);

// Product of the sizes. INVALID_ARGUMENT, with the shape: a negative size, more than
// kMaxTensorDimensions, a product of 2^63 or more.
absl::StatusOr<int64_t> TensorElements(const std::vector<int64_t>& shape);

// "[2, 3]"
std::string ShapeText(const std::vector<int64_t>& shape);

// A tensor of a file: bytes [begin, end) of the data. Where the dtype is known that is exactly the
// size of the shape.
struct TensorInfo : TensorSpec {
  int64_t begin = 0, end = 0;
};

// What a header says. Immutable.
class SafetensorsIndex {
 public:
  // Reads the JSON of a file that has `data_bytes` after it. INVALID_ARGUMENT, naming tensor and
  // numbers: text that is not UTF-8 JSON of this form (at which byte), keys that are unknown,
  // missing or given twice, two tensors of one name, sizes and offsets that are not whole numbers
  // below 2^63, offsets that leave gaps, overlap, end elsewhere than the data, or do not agree with
  // shape and dtype. A tensor of an unknown dtype is listed. Needs memory in proportion to the text
  // alone, whatever it says.
  static absl::StatusOr<SafetensorsIndex> Parse(absl::string_view json, int64_t data_bytes);

  // In the order of their bytes.
  const std::vector<TensorInfo>& tensors() const { return tensors_; }
  const std::map<std::string, std::string>& metadata() const { return metadata_; }
  // Null where there is none of that name.
  const TensorInfo* Find(absl::string_view name) const;

 private:
  std::vector<TensorInfo> tensors_;
  std::vector<int64_t> by_name_;  // indices of tensors_
  std::map<std::string, std::string> metadata_;
};

// A file to be: everything in front of the data, and where each tensor's bytes go in it.
struct SafetensorsLayout {
  std::string head;             // length, JSON and padding; a multiple of 64 bytes
  std::vector<int64_t> begins;  // of each tensor, in the order they were given in
  std::vector<int64_t> sizes;
  int64_t data_bytes = 0;
};

// The data is ordered by element size, largest first, then by name, so that every tensor is aligned
// to its element and equal contents give equal files. INVALID_ARGUMENT: names that are not UTF-8,
// are given twice or are "__metadata__"; unknown dtypes; the errors of TensorElements; a header
// above the limit.
absl::StatusOr<SafetensorsLayout> LayOutSafetensors(
    const std::vector<TensorSpec>& tensors, const std::map<std::string, std::string>& metadata);

}  // namespace stiefel

#endif  // STIEFEL_COMMON_SAFETENSORS_FORMAT_H_
