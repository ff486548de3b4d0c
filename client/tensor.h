// Views of memory that belongs to the caller: gradients to push, weights to apply an update to.
#ifndef STIEFEL_CLIENT_TENSOR_H_
#define STIEFEL_CLIENT_TENSOR_H_

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/dtype.h"
#include "common/rect.h"

namespace stiefel {

// What an element is. Everything that a framework may hold has a name here, so that what cannot be
// used is refused by name and not misread.
enum class ElementType : uint8_t {
  kFp32,
  kBf16,
  kFp16,
  kFp64,        // pushed by way of fp32
  kComplex64,   // refused
  kComplex128,  // refused
  kInt8,        // refused, as the following
  kInt32,
  kInt64,
  kBool,
};

// "fp32", "complex64" ...
std::string ElementTypeName(ElementType type);
int64_t ElementTypeSize(ElementType type);
ElementType ToElementType(DType dtype);

// Read-only, of any number of dimensions. Strides are in elements and may be zero or negative;
// none: row-major and contiguous.
struct TensorView {
  const void* data = nullptr;
  ElementType type = ElementType::kFp32;
  std::vector<int64_t> shape;
  std::vector<int64_t> strides;
};

// The same, writable.
struct MutableTensorView {
  void* data = nullptr;
  ElementType type = ElementType::kFp32;
  std::vector<int64_t> shape;
  std::vector<int64_t> strides;

  operator TensorView() const { return {data, type, shape, strides}; }
};

// Elements visited at a time: they stay in the first-level cache.
inline constexpr int64_t kWalkRun = 1024;

struct WalkDim {
  int64_t size = 1;
  int64_t stride = 0;  // elements
};

// A view checked against a block of rows x cols. Row i of the block is number first_row + i of the
// row dimensions, counted row-major; its column j is number first_col + j of the column dimensions,
// likewise.
struct Walk {
  const char* data = nullptr;
  ElementType type = ElementType::kFp32;
  int64_t rows = 0;
  int64_t cols = 0;
  int64_t first_row = 0;
  int64_t first_col = 0;
  std::vector<WalkDim> row_dims;  // neighbours that can be walked as one are one
  std::vector<WalkDim> col_dims;
  bool contiguous = false;

  // A rectangle of the block. REQUIRES: it lies within.
  Walk Part(const Rect& part) const;
};

// Where number `index` of the dimensions lies, in elements.
inline int64_t OffsetIn(const std::vector<WalkDim>& dims, int64_t index) {
  int64_t offset = 0;
  for (auto dim = dims.rbegin(); dim != dims.rend(); ++dim) {
    offset += index % dim->size * dim->stride;
    index /= dim->size;
  }
  return offset;
}

// Calls visit(first, address, stride, count) for all of the block, in order: its elements [first,
// first + count), row-major, lie `stride` elements apart from `address` on. count <= kWalkRun.
template <typename Visit>
void ForEachRun(const Walk& walk, Visit visit) {
  const int64_t size = ElementTypeSize(walk.type);
  const auto line = [&](int64_t first, const char* address, int64_t stride, int64_t count) {
    for (int64_t k = 0; k < count; k += kWalkRun) {
      visit(first + k, address + k * stride * size, stride, std::min(kWalkRun, count - k));
    }
  };
  if (walk.contiguous) return line(0, walk.data, 1, walk.rows * walk.cols);
  const WalkDim& inner = walk.col_dims.back();
  for (int64_t i = 0; i < walk.rows; ++i) {
    const char* row = walk.data + OffsetIn(walk.row_dims, walk.first_row + i) * size;
    for (int64_t j = 0; j < walk.cols;) {
      const int64_t number = walk.first_col + j;
      const char* address = row + OffsetIn(walk.col_dims, number) * size;
      const int64_t count = std::min(inner.size - number % inner.size, walk.cols - j);
      line(i * walk.cols + j, address, inner.stride, count);
      j += count;
    }
  }
}

// Accepts a view of shape [rows * cols] (row-major), and one of any number of dimensions of which
// the first multiply to `rows` and the others to `cols`: [rows, cols], a stack [E, rows / E, cols],
// a convolution [out, in, kh, kw]. INVALID_ARGUMENT with `what` and the numbers: another shape or
// length, sizes below zero, strides of another dimension or that overflow, no data, elements that
// are neither floating-point nor real.
absl::StatusOr<Walk> CheckView(const TensorView& view, int64_t rows, int64_t cols,
                               const std::string& what);

// Writes the view row-major, as `dtype`, to `target`, which holds rows x cols elements. Rounds to
// nearest even; fp64 goes through fp32.
void CopyAs(const Walk& view, DType dtype, void* target);

}  // namespace stiefel

#endif  // STIEFEL_CLIENT_TENSOR_H_
