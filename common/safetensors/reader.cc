#include "common/safetensors/reader.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/dtype.h"
#include "common/status.h"

namespace stiefel {
namespace {

// Elements that are converted at once.
constexpr int64_t kPieceElements = int64_t{1} << 17;

absl::Status Invalid(const std::string& path, const std::string& what) {
  return absl::InvalidArgumentError(absl::StrCat(path, ": ", what));
}

// `n` elements of a dtype that ReadAs accepts.
void ConvertTo(const char* raw, const std::string& dtype, double* out, int64_t n) {
  if (dtype == "F64") {
    std::memcpy(out, raw, n * sizeof(double));
    return;
  }
  std::vector<float> floats(n);
  const DType from = dtype == "F32" ? DType::kFp32 : dtype == "F16" ? DType::kFp16 : DType::kBf16;
  Convert(raw, from, floats.data(), DType::kFp32, n);
  std::copy(floats.begin(), floats.end(), out);
}

void ConvertTo(const char* raw, const std::string& dtype, float* out, int64_t n) {
  if (dtype == "F64") {
    std::vector<double> doubles(n);
    std::memcpy(doubles.data(), raw, n * sizeof(double));
    std::transform(doubles.begin(), doubles.end(), out,
                   [](double value) { return static_cast<float>(value); });
    return;
  }
  const DType from = dtype == "F32" ? DType::kFp32 : dtype == "F16" ? DType::kFp16 : DType::kBf16;
  Convert(raw, from, out, DType::kFp32, n);
}

}  // namespace

absl::StatusOr<std::unique_ptr<SafetensorsReader>> SafetensorsReader::Open(
    const std::string& path) {
  // Not blocking: a named pipe must not hold us up before we see that it is one.
  const int file = open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (file < 0) return absl::ErrnoToStatus(errno, path);
  std::unique_ptr<SafetensorsReader> reader(new SafetensorsReader(path, file));
  STIEFEL_RETURN_IF_ERROR(reader->ReadIndex());
  return reader;
}

SafetensorsReader::~SafetensorsReader() { close(file_); }

absl::Status SafetensorsReader::ReadIndex() {
  struct stat info;
  if (fstat(file_, &info) != 0) return absl::ErrnoToStatus(errno, path_);
  if (!S_ISREG(info.st_mode)) return Invalid(path_, "not a regular file");
  const int64_t size = info.st_size;
  if (size < kSafetensorsLengthBytes) {
    return Invalid(path_,
                   absl::StrCat(size, " bytes are too few for a safetensors file, which has ",
                                "at least ", kSafetensorsLengthBytes));
  }
  unsigned char raw[kSafetensorsLengthBytes];
  STIEFEL_RETURN_IF_ERROR(ReadAt(0, raw, sizeof(raw)));
  uint64_t length = 0;
  for (int64_t i = kSafetensorsLengthBytes; i-- > 0;) length = length << 8 | raw[i];
  if (length > static_cast<uint64_t>(kMaxSafetensorsHeaderBytes)) {
    return Invalid(path_, absl::StrCat("a header of ", length, " bytes; the format allows ",
                                       kMaxSafetensorsHeaderBytes, ". Is it a safetensors file?"));
  }
  if (static_cast<int64_t>(length) > size - kSafetensorsLengthBytes) {
    return Invalid(path_, absl::StrCat("a header of ", length, " bytes in a file of ", size,
                                       ": it is truncated"));
  }
  data_position_ = kSafetensorsLengthBytes + static_cast<int64_t>(length);
  std::string json(length, '\0');
  STIEFEL_RETURN_IF_ERROR(ReadAt(kSafetensorsLengthBytes, json.data(), json.size()));
  absl::StatusOr<SafetensorsIndex> index = SafetensorsIndex::Parse(json, size - data_position_);
  if (!index.ok()) return Invalid(path_, std::string(index.status().message()));
  index_ = *std::move(index);
  return absl::OkStatus();
}

absl::Status SafetensorsReader::ReadAt(int64_t position, void* out, int64_t bytes) const {
  for (int64_t done = 0; done < bytes;) {
    const ssize_t got = pread(file_, static_cast<char*>(out) + done, bytes - done, position + done);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return absl::ErrnoToStatus(errno, path_);
    if (got == 0) {
      return absl::DataLossError(absl::StrCat(path_, ": ends at byte ", position + done,
                                              "; it has ", "become shorter since it was opened"));
    }
    done += got;
  }
  return absl::OkStatus();
}

absl::Status SafetensorsReader::Read(const TensorInfo& tensor, int64_t offset, void* out,
                                     int64_t bytes) const {
  const int64_t size = tensor.end - tensor.begin;
  if (offset < 0 || bytes < 0 || offset > size || bytes > size - offset) {
    return Invalid(path_, absl::StrCat("tensor ", tensor.name, ": ", bytes, " bytes at ", offset,
                                       " of ", size));
  }
  return ReadAt(data_position_ + tensor.begin + offset, out, bytes);
}

template <typename T>
absl::StatusOr<std::vector<T>> SafetensorsReader::ReadAs(const TensorInfo& tensor) const {
  if (tensor.dtype != "F64" && tensor.dtype != "F32" && tensor.dtype != "F16" &&
      tensor.dtype != "BF16") {
    return Invalid(path_, absl::StrCat("tensor ", tensor.name, " has dtype ", tensor.dtype,
                                       "; numbers are read from F64, F32, F16 and BF16"));
  }
  const int64_t element = *TensorDTypeBytes(tensor.dtype);
  const int64_t elements = (tensor.end - tensor.begin) / element;
  std::vector<T> values(elements);
  std::vector<char> raw(std::min(elements, kPieceElements) * element);
  for (int64_t i = 0; i < elements; i += kPieceElements) {
    const int64_t n = std::min(kPieceElements, elements - i);
    STIEFEL_RETURN_IF_ERROR(Read(tensor, i * element, raw.data(), n * element));
    ConvertTo(raw.data(), tensor.dtype, values.data() + i, n);
  }
  return values;
}

absl::StatusOr<std::vector<double>> SafetensorsReader::ReadDoubles(const TensorInfo& tensor) const {
  return ReadAs<double>(tensor);
}

absl::StatusOr<std::vector<float>> SafetensorsReader::ReadFloats(const TensorInfo& tensor) const {
  return ReadAs<float>(tensor);
}

}  // namespace stiefel
