#include "client/tensor.h"

#include <cstring>
#include <optional>

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

Walk Walk::Part(const Rect& part) const {
  Walk slice = *this;
  slice.rows = part.rows();
  slice.cols = part.cols();
  if (contiguous && slice.cols == cols) {
    slice.data += part.row_begin * cols * ElementTypeSize(type);
  } else {
    slice.contiguous = false;
    slice.first_row += part.row_begin;
    slice.first_col += part.col_begin;
  }
  return slice;
}

namespace {

// The dimensions as few as possible; one of size 1 says nothing.
std::vector<WalkDim> Merged(const std::vector<WalkDim>& dims) {
  std::vector<WalkDim> merged;
  for (const WalkDim& dim : dims) {
    if (dim.size == 1) continue;
    if (!merged.empty() && merged.back().stride == dim.size * dim.stride) {
      merged.back() = {merged.back().size * dim.size, dim.stride};
    } else {
      merged.push_back(dim);
    }
  }
  if (merged.empty()) merged.push_back({1, 0});
  return merged;
}

// How many leading dimensions make up the rows; nothing where the view is not of the block's shape.
std::optional<size_t> RowDimensions(const std::vector<int64_t>& shape, int64_t rows, int64_t cols) {
  int64_t leading = 1;
  for (size_t d = 0; d <= shape.size(); ++d) {
    if (leading == rows) {
      int64_t trailing = 1;
      for (size_t i = d; i < shape.size(); ++i) {
        if (!CheckedMul(trailing, shape[i], &trailing)) return std::nullopt;
      }
      if (trailing == cols) return d;
    }
    if (d < shape.size() && !CheckedMul(leading, shape[d], &leading)) return std::nullopt;
  }
  return std::nullopt;
}

}  // namespace

absl::StatusOr<Walk> CheckView(const TensorView& view, int64_t rows, int64_t cols,
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
  const size_t count = view.shape.size();
  const bool flat = count == 1 && view.shape[0] == rows * cols;
  const std::optional<size_t> row_dims =
      flat ? std::optional<size_t>(1) : RowDimensions(view.shape, rows, cols);
  if (count == 0 || !row_dims) return Unfit(what, view, rows, cols);
  if (!view.strides.empty() && view.strides.size() != count) {
    return absl::InvalidArgumentError(
        absl::StrCat(what, ": ", view.strides.size(), " strides for ", count, " dimensions"));
  }
  if (view.data == nullptr) return absl::InvalidArgumentError(absl::StrCat(what, ": no data"));
  std::vector<WalkDim> dims(count);
  int64_t plain = 1;  // stride of a contiguous view
  for (size_t d = count; d-- > 0;) {
    dims[d] = {view.shape[d], view.strides.empty() ? plain : view.strides[d]};
    plain *= view.shape[d];
    int64_t extent = 0;
    if (!CheckedMul(dims[d].stride, dims[d].size, &extent) || !CheckedMul(extent, 8, &extent)) {
      return absl::InvalidArgumentError(
          absl::StrCat(what, ": a stride of ", dims[d].stride, " overflows"));
    }
  }
  if (flat) dims = {{rows, dims[0].stride * cols}, {cols, dims[0].stride}};
  Walk walk;
  walk.data = static_cast<const char*>(view.data);
  walk.type = view.type;
  walk.rows = rows;
  walk.cols = cols;
  const auto boundary = dims.begin() + static_cast<int64_t>(*row_dims);
  walk.row_dims = Merged({dims.begin(), boundary});
  walk.col_dims = Merged({boundary, dims.end()});
  walk.contiguous = walk.col_dims.size() == 1 && walk.row_dims.size() == 1 &&
                    (walk.col_dims[0].stride == 1 || cols == 1) &&
                    (walk.row_dims[0].stride == cols || rows == 1);
  return walk;
}

void CopyAs(const Walk& view, DType dtype, void* target) {
  const int64_t size = ElementTypeSize(view.type);
  char scratch[kWalkRun * 8];
  ForEachRun(view, [&](int64_t first, const char* source, int64_t stride, int64_t count) {
    if (stride != 1) {
      for (int64_t k = 0; k < count; ++k) {
        std::memcpy(scratch + k * size, source + k * stride * size, static_cast<size_t>(size));
      }
      source = scratch;
    }
    ConvertRun(source, view.type, dtype, static_cast<char*>(target) + first * DTypeSize(dtype),
               count);
  });
}

}  // namespace stiefel
