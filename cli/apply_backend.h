// What runs the steps of `stiefelctl apply`: the path of the servers on a CPU, or the fp64
// reference.
#ifndef STIEFEL_CLI_APPLY_BACKEND_H_
#define STIEFEL_CLI_APPLY_BACKEND_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "cli/apply_rules.h"
#include "kernels/rules/matrix_rule.h"

namespace stiefel {

// One matrix of a parameter; parameter p's are consecutive, in the order of its bytes.
struct ApplyMatrix {
  const ApplyParameter* parameter = nullptr;
  int64_t index = 0;     // among the parameter's matrices
  int64_t partner = -1;  // polora: which matrix is the other factor

  int64_t elements() const { return parameter->rows * parameter->cols; }
};

// All matrices of the parameters, which must outlive them.
std::vector<ApplyMatrix> MatricesOf(const std::vector<ApplyParameter>& parameters);

// Elements in a file's dtype, row-major, aligned to it.
struct FileElements {
  const void* data = nullptr;
  std::string_view dtype;  // F64, F32, F16 or BF16; F64 holds what fp32 can where fp32 computes
};

// Figures of one matrix in one step. Unset: not measured.
struct ApplyFigures {
  std::optional<double> residual;    // |O O^T - I|_F / sqrt(short side) of a polar map
  std::optional<double> update_rms;  // of the update, before lr
  int64_t nonfinite_update = 0;
};

// Holds state and weights of all matrices. Results do not depend on the number of threads.
class ApplyBackend {
 public:
  virtual ~ApplyBackend() = default;

  // Of everything that it gives out: "F32" or "F64".
  virtual std::string_view dtype() const = 0;
  // For people: device and instruction set.
  virtual std::string Description() const = 0;
  // What a parameter's matrices are computed by, and why; lines of text.
  virtual std::string Explain(int64_t matrix) const = 0;

  // Of all matrices, in their order, before the first step. REQUIRES: created with_weights.
  virtual void SetWeights(const std::vector<FileElements>& weights) = 0;
  // One step of all matrices. RESOURCE_EXHAUSTED and the like; then nothing is of use any more.
  virtual absl::Status Step(int64_t step, const std::vector<FileElements>& gradients,
                            std::vector<ApplyFigures>* figures) = 0;

  // After a step: rows x cols elements; a buffer of RuleState(); rows x cols elements, or null
  // without weights.
  virtual const void* Delta(int64_t matrix) const = 0;
  virtual const void* State(int64_t matrix, int64_t buffer) const = 0;
  virtual const void* Weights(int64_t matrix) const = 0;
};

// The parameters must outlive the backend. Errors of MatrixRule::Create and of memory. REQUIRES:
// with_weights where a rule NeedsWeights().
absl::StatusOr<std::unique_ptr<ApplyBackend>> CreateCpuApply(
    const std::vector<ApplyParameter>& parameters, bool with_weights, int threads);
std::unique_ptr<ApplyBackend> CreateReferenceApply(const std::vector<ApplyParameter>& parameters,
                                                   bool with_weights, int threads);

// The arguments of a step in which nothing was skipped before.
StepArgs ArgsOfStep(const ApplyParameter& parameter, int64_t step);

// Calls body(i) for every i in [0, count) on up to `threads` threads.
void OnThreads(int threads, int64_t count, const std::function<void(int64_t)>& body);

}  // namespace stiefel

#endif  // STIEFEL_CLI_APPLY_BACKEND_H_
