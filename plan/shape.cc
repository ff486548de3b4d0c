#include "plan/shape.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "common/checked_math.h"
#include "common/status.h"
#include "plan/nearest.h"

namespace stiefel {
namespace {

constexpr int64_t kMaxElements = int64_t{1} << 58;
constexpr size_t kMaxDimensions = 16;

class Refusal {
 public:
  Refusal(absl::string_view name, const std::vector<int64_t>& shape) {
    const size_t shown = std::min(shape.size(), kMaxDimensions);
    text_ = absl::StrCat(PrintableName({name.data(), name.size()}), " of shape [",
                         absl::StrJoin(shape.begin(), shape.begin() + shown, ", "),
                         shown < shape.size() ? ", ...]" : "]");
  }
  template <typename... Parts>
  absl::Status operator()(const Parts&... parts) const {
    return absl::InvalidArgumentError(absl::StrCat(text_, ": ", parts...));
  }

 private:
  std::string text_;
};

bool Orthogonalises(const Rule& rule) {
  return rule.family == RuleFamily::kSpectral || rule.family == RuleFamily::kPolora;
}

absl::Status CheckSizes(const std::vector<int64_t>& shape, const Refusal& refuse) {
  if (shape.size() > kMaxDimensions) {
    return refuse(shape.size(), " dimensions; at most ", kMaxDimensions, " make sense");
  }
  int64_t elements = 1;
  for (int64_t size : shape) {
    if (size <= 0) return refuse("a size of ", size, " leaves no elements");
    if (!CheckedMul(elements, size, &elements) || elements > kMaxElements) {
      return refuse("the number of elements overflows");
    }
  }
  return absl::OkStatus();
}

// Whether the axes after the stack make a matrix that can be orthogonalised.
absl::Status CheckMatrixAxes(const std::vector<int64_t>& shape, std::optional<int64_t> stack_dims,
                             const Rule& rule, const Refusal& refuse) {
  const size_t stack = static_cast<size_t>(stack_dims.value_or(0));
  if (shape.size() < stack + 2) {
    return refuse("preset ", rule.preset, " orthogonalises matrices, but ",
                  stack > 0 ? absl::StrCat("stack_dims=", stack, " leaves ") : "this has ",
                  shape.size() - stack, " dimension; use adamw, lion or sgd for it");
  }
  if (shape.size() > 2 && !stack_dims.has_value()) {
    return refuse("preset ", rule.preset,
                  " orthogonalises matrices; say which axes they are with stack_dims (stiefelctl "
                  "apply: --stack-dims): "
                  "stack_dims=0 for one matrix of ",
                  shape[0], " rows (a convolution [out, in, kh, kw]), stack_dims=1 for a stack of ",
                  shape[0], " matrices of ", shape[1], " rows ([experts, out, in])");
  }
  if (shape.size() > stack + 2 && shape[stack + 1] == 1) {
    return refuse("a depthwise convolution: each of its ", shape[stack],
                  " rows has an input of its own, so there is no matrix to orthogonalise; use "
                  "adamw, lion or sgd for it");
  }
  return absl::OkStatus();
}

std::string NameOf(absl::string_view name, const std::vector<int64_t>& index) {
  if (index.empty()) return std::string(name);
  return absl::StrCat(name, "[", absl::StrJoin(index, ","), "]");
}

// Counts up in the axes of the stack, the last one fastest.
void Advance(const std::vector<int64_t>& shape, std::vector<int64_t>* index) {
  for (size_t axis = index->size(); axis-- > 0;) {
    if (++(*index)[axis] < shape[axis]) return;
    (*index)[axis] = 0;
  }
}

}  // namespace

absl::StatusOr<ParameterShape> ShapeOfParameter(absl::string_view name,
                                                const std::vector<int64_t>& shape,
                                                std::optional<int64_t> stack_dims,
                                                const Rule& rule) {
  const Refusal refuse(name, shape);
  STIEFEL_RETURN_IF_ERROR(CheckSizes(shape, refuse));
  const int64_t dimensions = std::max<int64_t>(1, static_cast<int64_t>(shape.size()));
  const int64_t stack = stack_dims.value_or(0);
  if (stack < 0 || stack >= dimensions) {
    return refuse("stack_dims=", stack, " is not from 0 to ", dimensions - 1);
  }
  if (Orthogonalises(rule)) {
    STIEFEL_RETURN_IF_ERROR(CheckMatrixAxes(shape, stack_dims, rule, refuse));
  }
  ParameterShape result;
  result.dimensions = static_cast<int>(dimensions - stack);
  int64_t count = 1, rows = 1, cols = 1;
  for (size_t axis = 0; axis < shape.size(); ++axis) {
    const auto at = static_cast<int64_t>(axis);
    (at < stack ? count : at == stack && result.dimensions > 1 ? rows : cols) *= shape[axis];
  }
  if (count > kMaxStackedMatrices) {
    return refuse(count, " matrices; at most ", kMaxStackedMatrices, " to a parameter");
  }
  if (absl::Status valid = ValidateRule(rule, rows, cols, result.dimensions); !valid.ok()) {
    return refuse(std::string(valid.message()));
  }
  result.rows = count * rows;
  result.cols = cols;
  std::vector<int64_t> index(static_cast<size_t>(stack), 0);
  for (int64_t i = 0; i < count; ++i) {
    result.matrices.push_back({NameOf(name, index), rows, cols, i * rows, rule});
    if (!rule.pair.empty()) result.matrices.back().rule.pair = NameOf(rule.pair, index);
    Advance(shape, &index);
  }
  return result;
}

}  // namespace stiefel
