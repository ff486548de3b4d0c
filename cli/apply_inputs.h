// Which gradients a file holds, in the naming of `stiefelctl apply`: tensors NAME/step1, NAME/step2
// ... are the gradients of parameter NAME in these steps; a tensor NAME is that of one step.
#ifndef STIEFEL_CLI_APPLY_INPUTS_H_
#define STIEFEL_CLI_APPLY_INPUTS_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "common/safetensors/format.h"

namespace stiefel {

struct GradientSeries {
  std::string name;
  std::vector<int64_t> shape;
  std::vector<const TensorInfo*> steps;  // the gradient of step i + 1; of the index
  std::vector<std::string> deltas;       // what the delta of that step is called
};

// Names that begin so are those of the output: "state/NAME/BUFFER", "weights/NAME".
inline constexpr char kStatePrefix[] = "state/";
inline constexpr char kWeightsPrefix[] = "weights/";

// Ascending by name, all of the same number of steps: `steps`, or as many as the file has. With
// `steps` a tensor NAME is the gradient of every step. INVALID_ARGUMENT, with names and numbers: no
// tensors; dtypes other than F64, F32, F16, BF16; steps that are missing, or not numbered as above;
// names that almost say a step ("w.step1", "w/Step1"); parameters of different numbers of steps;
// shapes that change between steps; reserved names.
absl::StatusOr<std::vector<GradientSeries>> ListGradients(const SafetensorsIndex& index,
                                                          std::optional<int64_t> steps);

// INVALID_ARGUMENT unless the tensor's dtype is F64, F32, F16 or BF16.
absl::Status CheckFloating(const TensorInfo& tensor);

// That all elements at `data`, of such a dtype, are finite, also as fp32 where `as_fp32`; then they
// may not all become zero either. INVALID_ARGUMENT with their number and the place of the first.
absl::Status CheckValues(const TensorInfo& tensor, const void* data, bool as_fp32);

}  // namespace stiefel

#endif  // STIEFEL_CLI_APPLY_INPUTS_H_
