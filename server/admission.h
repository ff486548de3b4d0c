#ifndef STIEFEL_SERVER_ADMISSION_H_
#define STIEFEL_SERVER_ADMISSION_H_

#include <cstdint>
#include <optional>
#include <vector>

#include "absl/status/statusor.h"
#include "plan/memory.h"
#include "server/run_machine.h"
#include "server/run_spec.h"

namespace stiefel {

// Whether a run fits, by the formula that `stiefelctl plan` prints. Nothing is allocated before.

struct AdmissionLimits {
  int64_t memory_limit_bytes = 0;
  int64_t credit_window_bytes = 0;  // of each rank
  int64_t matrices_in_flight = 1;
  std::optional<Staging> staging;  // unset: double where it fits, else lazy
};

struct Admitted {
  Staging staging = Staging::kLazy;
  int64_t bytes = 0;
};

// `ranks`: with the declared push blocks; empty before they are known, when every element counts as
// pushed once. INVALID_ARGUMENT: sizes that overflow; RESOURCE_EXHAUSTED: the parts, the sum and
// the limit.
absl::StatusOr<Admitted> AdmitRun(const RunSpec& spec, const std::vector<RankState>& ranks,
                                  const AdmissionLimits& limits);

}  // namespace stiefel

#endif  // STIEFEL_SERVER_ADMISSION_H_
