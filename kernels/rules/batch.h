// Many matrices at once.
#ifndef STIEFEL_KERNELS_RULES_BATCH_H_
#define STIEFEL_KERNELS_RULES_BATCH_H_

#include <vector>

#include "absl/status/status.h"
#include "kernels/rules/matrix_rule.h"

namespace stiefel {

// One step of one matrix: the arguments of MatrixRule::Compute.
struct StepJob {
  MatrixRule* rule = nullptr;
  const GradientView* gradient = nullptr;
  const StepArgs* args = nullptr;
  const StepBuffers* buffers = nullptr;
  StepResult* result = nullptr;
};

// Enqueues all jobs. Matrices that are a small part of the work run one on a thread, as many at
// once as there are workspaces, which costs one dispatch for all of them; the others one after the
// other on all threads. Results have the bits of MatrixRule::Compute. Each workspace must suffice
// for every job, and there must be at least one. Returns the first error of Compute in job order;
// then some jobs may have run, and their outputs mean nothing.
absl::Status ComputeBatch(Stream* stream, const std::vector<StepJob>& jobs,
                          std::vector<DeviceBuffer>* workspaces);

}  // namespace stiefel

#endif  // STIEFEL_KERNELS_RULES_BATCH_H_
