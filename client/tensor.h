// Views of memory that belongs to the caller: gradients to push, weights to apply an update to.
#ifndef STIEFEL_CLIENT_TENSOR_H_
#define STIEFEL_CLIENT_TENSOR_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/dtype.h"

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

// Read-only. `shape` has one or two dimensions. Strides are in elements and may be zero or
// negative; none: row-major and contiguous.
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

// A view checked against a block of rows x cols, as a 2-D walk.
struct Walk2d {
  const char* data = nullptr;
  ElementType type = ElementType::kFp32;
  int64_t rows = 0;
  int64_t cols = 0;
  int64_t row_stride = 0;  // elements
  int64_t col_stride = 0;
  bool contiguous = false;
};

// Accepts a view of shape [rows, cols], or [rows * cols] (row-major). INVALID_ARGUMENT with `what`
// and the numbers: another shape or length, sizes below zero, strides of another dimension, no
// data, elements that are neither floating-point nor real.
absl::StatusOr<Walk2d> CheckView(const TensorView& view, int64_t rows, int64_t cols,
                                 const std::string& what);

// Writes the view row-major, as `dtype`, to `target`, which holds rows x cols elements. Rounds to
// nearest even; fp64 goes through fp32.
void CopyAs(const Walk2d& view, DType dtype, void* target);

}  // namespace stiefel

#endif  // STIEFEL_CLIENT_TENSOR_H_
