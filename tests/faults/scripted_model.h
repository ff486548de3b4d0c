// The model of a scripted trainer: no mathematics, only tensors that anyone can make again.
#ifndef STIEFEL_TESTS_FAULTS_SCRIPTED_MODEL_H_
#define STIEFEL_TESTS_FAULTS_SCRIPTED_MODEL_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/trainer.h"

namespace stiefel {

// Parameters from "64x96*3,17": three matrices with `preset` and a vector on adamw, named p0, p1
// ... INVALID_ARGUMENT for anything else, and PresetRule's errors.
absl::StatusOr<std::vector<ParameterSpec>> ParseShapes(const std::string& shapes,
                                                       const std::string& preset, DType wire);

// A whole parameter, row-major in one dtype.
struct Tensor {
  DType dtype = DType::kFp32;
  int64_t cols = 0;
  std::vector<uint16_t> words;  // Two for an fp32 element.

  // Rows [rect.row_begin, rect.row_end) and all columns, or columns of a single row.
  TensorView View(const Rect& rect) const;
};

// Elements in [-1, 1), a function of (seed, step, rank, index of the parameter) and the position
// alone, so that an attempt that is redone, by whatever process, pushes the same bytes.
Tensor MakeGradient(const ParameterSpec& spec, uint64_t seed, int64_t step, int32_t rank,
                    int32_t index);

// fp32 weights of all parameters, from the seed.
class Weights {
 public:
  Weights(const std::vector<ParameterSpec>& specs, uint64_t seed);

  std::vector<MutableTensorView> Views();
  // XXH3 of all bytes.
  uint64_t Hash() const;

  // A snapshot: the step and all bytes, replaced by rename, so that a kill leaves the old or the
  // new one. UNKNOWN: what the file system said.
  absl::Status Save(const std::string& path, int64_t step) const;
  // The step of the snapshot; NOT_FOUND without one; DATA_LOSS for a file of another size.
  absl::StatusOr<int64_t> Load(const std::string& path);

 private:
  std::vector<std::vector<int64_t>> shapes_;
  std::vector<std::vector<float>> values_;
};

}  // namespace stiefel

#endif  // STIEFEL_TESTS_FAULTS_SCRIPTED_MODEL_H_
