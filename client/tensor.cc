#include "client/tensor.h"

#include <cstring>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "common/checked_math.h"

namespace stiefel {
namespace {

absl::Status Unfit(const std::string& what, const TensorView& view, int64_t rows, int64_t cols) {
  return absl::InvalidArgumentError(absl::StrCat(
      what, ": a view of shape [", absl::StrJoin(view.shape, ", "), "] does not fit a block of [",
      rows, ", ", cols, "] (", rows * cols, " elements)"));
}

// fp64 has no DType; a run of it is narrowed here.
void ConvertRun(const char* source, ElementType type, DType dtype, void* target, int64_t n) {
  if (type != ElementType::kFp64) {
    const DType from = type == ElementType::kFp32   ? DType::kFp32
                       : type == ElementType::kBf16 ? DType::kBf16
                                                    : DType::kFp16;
    return Convert(source, from, target, dtype, n);
  }
  constexpr int64_t kRun = 256;
  float narrow[kRun];
  for (int64_t begin = 0; begin < n; begin += kRun) {
    const int64_t count = std::min(kRun, n - begin);
    for (int64_t i = 0; i < count; ++i) {
      double value;
      std::memcpy(&value, source + (begin + i) * 8, sizeof(value));
      narrow[i] = static_cast<float>(value);
    }
    Convert(narrow, DType::kFp32, static_cast<char*>(target) + begin * DTypeSize(dtype), dtype,
            count);
  }
}

}  // namespace

std::string ElementTypeName(ElementType type) {
  switch (type) {
    case ElementType::kFp32:
      return "fp32";
    case ElementType::kBf16:
      return "bf16";
    case ElementType::kFp16:
      return "fp16";
    case ElementType::kFp64:
      return "fp64";
    case ElementType::kComplex64:
      return "complex64";
    case ElementType::kComplex128:
      return "complex128";
    case ElementType::kInt8:
      return "int8";
    case ElementType::kInt32:
      return "int32";
    case ElementType::kInt64:
      return "int64";
    case ElementType::kBool:
      return "bool";
  }
  return absl::StrCat("element type ", static_cast<int>(type));
}

int64_t ElementTypeSize(ElementType type) {
  switch (type) {
    case ElementType::kBf16:
    case ElementType::kFp16:
      return 2;
    case ElementType::kFp32:
    case ElementType::kInt32:
      return 4;
    case ElementType::kFp64:
    case ElementType::kComplex64:
    case ElementType::kInt64:
      return 8;
    case ElementType::kComplex128:
      return 16;
    case ElementType::kInt8:
    case ElementType::kBool:
      return 1;
  }
  return 0;
}

ElementType ToElementType(DType dtype) {
  switch (dtype) {
    case DType::kBf16:
      return ElementType::kBf16;
    case DType::kFp16:
      return ElementType::kFp16;
    case DType::kFp32:
      break;
  }
  return ElementType::kFp32;
}

absl::StatusOr<Walk2d> CheckView(const TensorView& view, int64_t rows, int64_t cols,
                                 const std::string& what) {
  if (view.type != ElementType::kFp32 && view.type != ElementType::kBf16 &&
      view.type != ElementType::kFp16 && view.type != ElementType::kFp64) {
    return absl::InvalidArgumentError(absl::StrCat(
        what, ": ", ElementTypeName(view.type),
        " elements cannot be used; only fp32, bf16, fp16 and fp64 (real, floating-point)"));
  }
  for (const int64_t size : view.shape) {
    if (size < 0) return Unfit(what, view, rows, cols);
  }
  const size_t dims = view.shape.size();
  const bool flat = dims == 1 && view.shape[0] == rows * cols;
  const bool matrix = dims == 2 && view.shape[0] == rows && view.shape[1] == cols;
  if (!flat && !matrix) return Unfit(what, view, rows, cols);
  if (!view.strides.empty() && view.strides.size() != dims) {
    return absl::InvalidArgumentError(
        absl::StrCat(what, ": ", view.strides.size(), " strides for ", dims, " dimensions"));
  }
  if (view.data == nullptr) return absl::InvalidArgumentError(absl::StrCat(what, ": no data"));
  Walk2d walk;
  walk.data = static_cast<const char*>(view.data);
  walk.type = view.type;
  walk.rows = rows;
  walk.cols = cols;
  walk.col_stride = view.strides.empty() ? 1 : view.strides.back();
  walk.row_stride = view.strides.empty() ? cols : view.strides[0];
  if (flat && !view.strides.empty() && !CheckedMul(walk.col_stride, cols, &walk.row_stride)) {
    return absl::InvalidArgumentError(
        absl::StrCat(what, ": a stride of ", walk.col_stride, " overflows"));
  }
  walk.contiguous = (walk.col_stride == 1 || cols == 1) && (walk.row_stride == cols || rows == 1);
  return walk;
}

void CopyAs(const Walk2d& view, DType dtype, void* target) {
  if (view.contiguous) {
    return ConvertRun(view.data, view.type, dtype, target, view.rows * view.cols);
  }
  const int64_t size = ElementTypeSize(view.type);
  const int64_t target_row_bytes = view.cols * DTypeSize(dtype);
  std::vector<char> row;
  for (int64_t i = 0; i < view.rows; ++i) {
    const char* source = view.data + i * view.row_stride * size;
    if (view.col_stride != 1) {
      row.resize(view.cols * size);
      for (int64_t j = 0; j < view.cols; ++j) {
        std::memcpy(row.data() + j * size, source + j * view.col_stride * size, size);
      }
      source = row.data();
    }
    ConvertRun(source, view.type, dtype, static_cast<char*>(target) + i * target_row_bytes,
               view.cols);
  }
}

}  // namespace stiefel
