#include "cli/apply_inputs.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <map>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "common/dtype.h"
#include "common/status.h"
#include "plan/nearest.h"

namespace stiefel {
namespace {

constexpr char kStepSuffix[] = "/step";

// The tensors of one parameter.
struct Found {
  const TensorInfo* plain = nullptr;             // NAME
  std::map<int64_t, const TensorInfo*> stepped;  // NAME/stepI
};

// Whether it ends almost as the gradient of a step does: "w.step1", "w/Step1".
bool LooksLikeAStep(const std::string& name) {
  const size_t end = name.find_last_not_of("0123456789");
  if (end == std::string::npos || end + 1 == name.size() || end < std::strlen(kStepSuffix) - 1) {
    return false;
  }
  const std::string suffix =
      name.substr(end + 1 - std::strlen(kStepSuffix), std::strlen(kStepSuffix));
  return absl::EqualsIgnoreCase(suffix.substr(1), &kStepSuffix[1]) &&
         std::strchr("/._:", suffix[0]) != nullptr && suffix != kStepSuffix;
}

// Splits "NAME/step12" into NAME and 12; 0 for a name without such an end.
absl::StatusOr<std::pair<std::string, int64_t>> ParseName(const std::string& name) {
  const size_t slash = name.rfind('/');
  if (slash == std::string::npos || !absl::StartsWith(name.substr(slash), kStepSuffix)) {
    return std::pair<std::string, int64_t>(name, 0);
  }
  const std::string digits = name.substr(slash + std::strlen(kStepSuffix));
  if (digits.empty() || digits.find_first_not_of("0123456789") != std::string::npos) {
    return std::pair<std::string, int64_t>(name, 0);
  }
  int64_t step = 0;
  if (digits[0] == '0' || !absl::SimpleAtoi(digits, &step)) {
    return absl::InvalidArgumentError(absl::StrCat(
        "tensor ", PrintableName(name), ": steps are numbered step1, step2 ... without zeros"));
  }
  return std::pair<std::string, int64_t>(name.substr(0, slash), step);
}

absl::Status CheckName(const std::string& name) {
  if (LooksLikeAStep(name)) {
    return absl::InvalidArgumentError(
        absl::StrCat("tensor ", PrintableName(name),
                     ": gradients of steps are named NAME/step1, NAME/step2 ...; rename it"));
  }
  for (const char* prefix : {kStatePrefix, kWeightsPrefix}) {
    if (absl::StartsWith(name, prefix)) {
      return absl::InvalidArgumentError(absl::StrCat("tensor ", PrintableName(name),
                                                     ": names that begin with ", prefix,
                                                     " are those of the output; rename it"));
    }
  }
  return absl::OkStatus();
}

// That the steps are 1, 2 ... without a hole.
absl::Status CheckSteps(const std::string& name, const Found& found) {
  if (found.plain != nullptr && !found.stepped.empty()) {
    return absl::InvalidArgumentError(absl::StrCat(
        PrintableName(name), " is there both plain and as ",
        PrintableName(found.stepped.begin()->second->name), "; one of them has to be renamed"));
  }
  int64_t expected = 1;
  for (const auto& [step, tensor] : found.stepped) {
    if (step != expected) {
      return absl::InvalidArgumentError(
          absl::StrCat(PrintableName(name), " has step ", step, " but not step ", expected));
    }
    ++expected;
  }
  return absl::OkStatus();
}

// How many steps to run.
absl::StatusOr<int64_t> StepCount(const std::map<std::string, Found>& parameters,
                                  std::optional<int64_t> wanted) {
  int64_t most = 1;
  std::string whose;
  for (const auto& [name, found] : parameters) {
    const int64_t has = static_cast<int64_t>(found.stepped.size());
    if (has <= most) continue;
    most = has;
    whose = name;
  }
  for (const auto& [name, found] : parameters) {
    const int64_t has = static_cast<int64_t>(found.stepped.size());
    const bool repeated = found.plain != nullptr && wanted.has_value();
    if (repeated || (wanted.has_value() && has >= *wanted)) continue;
    if (wanted.has_value()) {
      return absl::InvalidArgumentError(
          absl::StrCat(PrintableName(name), " has ", has, " steps, but --steps=", *wanted));
    }
    if (std::max<int64_t>(has, 1) != most) {
      return absl::InvalidArgumentError(
          absl::StrCat(PrintableName(name), " has ", std::max<int64_t>(has, 1), " steps and ",
                       PrintableName(whose), " has ", most,
                       found.plain != nullptr ? "; with --steps=N one gradient serves for all steps"
                                              : "; with --steps=N no more than N are read"));
    }
  }
  return wanted.value_or(most);
}

absl::StatusOr<GradientSeries> SeriesOf(const std::string& name, const Found& found,
                                        int64_t steps) {
  GradientSeries series;
  series.name = name;
  for (int64_t step = 1; step <= steps; ++step) {
    const TensorInfo* tensor = found.plain != nullptr ? found.plain : found.stepped.at(step);
    if (step == 1) series.shape = tensor->shape;
    if (tensor->shape != series.shape) {
      return absl::InvalidArgumentError(absl::StrCat(PrintableName(name), " is ",
                                                     ShapeText(series.shape), " in step 1 and ",
                                                     ShapeText(tensor->shape), " in step ", step));
    }
    series.steps.push_back(tensor);
    const bool plain = found.plain != nullptr && steps == 1;
    series.deltas.push_back(plain ? name : absl::StrCat(name, kStepSuffix, step));
  }
  return series;
}

// An element as a double.
double ElementAt(const char* data, const std::string& dtype, int64_t i) {
  if (dtype == "F64") {
    double value = 0;
    std::memcpy(&value, data + 8 * i, 8);
    return value;
  }
  if (dtype == "F32") {
    float value = 0;
    std::memcpy(&value, data + 4 * i, 4);
    return value;
  }
  uint16_t bits = 0;
  std::memcpy(&bits, data + 2 * i, 2);
  return dtype == "F16" ? Fp16ToFloat(bits) : Bf16ToFloat(bits);
}

// "[1, 7]" of element i of a tensor.
std::string Place(const std::vector<int64_t>& shape, int64_t i) {
  std::vector<int64_t> place(shape.size());
  for (size_t d = shape.size(); d-- > 0;) {
    place[d] = i % shape[d];
    i /= shape[d];
  }
  return ShapeText(place);
}

}  // namespace

absl::Status CheckFloating(const TensorInfo& tensor) {
  for (const char* known : {"F64", "F32", "F16", "BF16"}) {
    if (tensor.dtype == known) return absl::OkStatus();
  }
  return absl::InvalidArgumentError(absl::StrCat("tensor ", PrintableName(tensor.name), " is ",
                                                 PrintableName(tensor.dtype),
                                                 "; F64, F32, F16 and BF16 are read"));
}

absl::Status CheckValues(const TensorInfo& tensor, const void* data, bool as_fp32) {
  const int64_t elements = (tensor.end - tensor.begin) / *TensorDTypeBytes(tensor.dtype);
  int64_t bad = 0, first = 0;
  bool any = false, any_in_fp32 = false;  // that is not zero
  bool too_large = true;                  // all that are bad are finite, but not in fp32
  for (int64_t i = 0; i < elements; ++i) {
    const double value = ElementAt(static_cast<const char*>(data), tensor.dtype, i);
    any = any || value != 0;
    any_in_fp32 = any_in_fp32 || static_cast<float>(value) != 0;
    if (std::isfinite(as_fp32 ? static_cast<float>(value) : value)) continue;
    if (bad++ == 0) first = i;
    too_large = too_large && std::isfinite(value);
  }
  if (as_fp32 && any && !any_in_fp32) {
    return absl::InvalidArgumentError(absl::StrCat(
        PrintableName(tensor.name), ": all ", elements,
        " elements are zero in fp32, in which the cpu backend computes, though not in the file; "
        "scale them, or use --backend=reference"));
  }
  if (bad == 0) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(
      PrintableName(tensor.name), ": ", bad, " of ", elements, " elements are not finite",
      too_large ? " in fp32, in which the cpu backend computes" : "", ", first at ",
      Place(tensor.shape, first), too_large ? "; use --backend=reference" : ""));
}

absl::StatusOr<std::vector<GradientSeries>> ListGradients(const SafetensorsIndex& index,
                                                          std::optional<int64_t> steps) {
  if (index.tensors().empty()) return absl::InvalidArgumentError("there are no tensors in it");
  std::map<std::string, Found> parameters;
  for (const TensorInfo& tensor : index.tensors()) {
    STIEFEL_RETURN_IF_ERROR(CheckName(tensor.name));
    STIEFEL_RETURN_IF_ERROR(CheckFloating(tensor));
    STIEFEL_ASSIGN_OR_RETURN(const auto parsed, ParseName(tensor.name));
    const auto& [name, step] = parsed;
    if (step == 0) {
      parameters[name].plain = &tensor;
    } else {
      parameters[name].stepped[step] = &tensor;
    }
  }
  for (const auto& [name, found] : parameters) STIEFEL_RETURN_IF_ERROR(CheckSteps(name, found));
  STIEFEL_ASSIGN_OR_RETURN(const int64_t count, StepCount(parameters, steps));
  std::vector<GradientSeries> all;
  for (const auto& [name, found] : parameters) {
    STIEFEL_ASSIGN_OR_RETURN(GradientSeries series, SeriesOf(name, found, count));
    all.push_back(std::move(series));
  }
  return all;
}

}  // namespace stiefel
