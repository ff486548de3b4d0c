// The file that `stiefelctl apply` writes:
//
//   NAME, NAME/stepI       the delta of that step (-lr s O, weight decay apart), under the name of
//                          its gradient; NAME/step1 ... where one gradient NAME served several
//                          steps
//   state/NAME/BUFFER      the state after the last step, buffers as RuleState() names them:
//                          element-wise ones in the shape of NAME, others rows x cols, or
//                          matrices x rows x cols for a stack
//   weights/NAME           the weights after the last step, where weights were given
//
// F32 from cpu, F64 from reference. Metadata: producer, backend, device, steps, rule/NAME (preset
// and all options) and, of periodic rules, phase/NAME. Equal inputs give equal files.
#ifndef STIEFEL_CLI_APPLY_OUTPUT_H_
#define STIEFEL_CLI_APPLY_OUTPUT_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "cli/apply_backend.h"
#include "cli/apply_rules.h"
#include "common/safetensors/writer.h"

namespace stiefel {

class ApplyOutput {
 public:
  // Opens a temporary beside `path`: errors of SafetensorsWriter::Create. Parameters and backend
  // must outlive the output.
  static absl::StatusOr<std::unique_ptr<ApplyOutput>> Create(
      const std::string& path, ExistingFile existing, const std::string& backend_name,
      const std::vector<ApplyParameter>& parameters, bool with_weights,
      const ApplyBackend* backend);

  // The deltas of the step that the backend has just done.
  absl::Status WriteDeltas(int64_t step);
  // State and weights after the last step; then the file appears under its name.
  absl::Status Finish();

 private:
  // One parameter's tensors in the writer's numbering.
  struct Tensors {
    std::vector<int64_t> deltas, state;
    int64_t weights = -1;
  };

  ApplyOutput(const std::vector<ApplyParameter>& parameters, const ApplyBackend* backend)
      : parameters_(parameters), backend_(backend) {}
  std::vector<TensorSpec> Declare(bool with_weights);

  const std::vector<ApplyParameter>& parameters_;
  const ApplyBackend* const backend_;
  std::vector<Tensors> tensors_;
  std::unique_ptr<SafetensorsWriter> writer_;
};

// "muon lr=0.02 weight_decay=0 ...": the preset and all its options.
std::string RuleText(const Rule& rule);

}  // namespace stiefel

#endif  // STIEFEL_CLI_APPLY_OUTPUT_H_
