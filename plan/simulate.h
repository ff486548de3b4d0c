#ifndef STIEFEL_PLAN_SIMULATE_H_
#define STIEFEL_PLAN_SIMULATE_H_

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "plan/explain.h"
#include "plan/placement.h"

// What any number of machines would give, and what other ways to run the same rules on as many
// would: by the formulas of docs/planner.md, in the cost model of plan/explain.h.

namespace stiefel {

// Of one way, means over the cycle of steps.
struct WayTimes {
  double compute_seconds = 0;  // of the slowest machine
  double balance = 1;          // slowest / mean, at the worst step
  double link_bytes = 0;       // of the busiest machine in a step, all that it receives and sends
                               // for the optimizer's sake
  double exposed_seconds = 0;  // that the backward pass does not hide
};

struct SimulatedCount {
  int64_t machines = 0;
  int64_t cut_matrices = 0;       // of the planned servers
  double overlapped_seconds = 0;  // exposed, of the planned servers with overlap
  WayTimes planned;               // servers, as MakePlan places
  // Servers that get whole matrices in turn, with the same phases.
  WayTimes round_robin;
  // In the trainers: every rank gathers every gradient that refreshes and does all of the work
  // (FSDP).
  WayTimes all_gather;
  // In the trainers: one rank owns each matrix, gathers its gradient, does the work and scatters
  // the update. Placed as well as MakePlan can without cuts.
  WayTimes owners;
};

// For each of `counts`, with equal machines of speed 1 and no limit to their memory;
// request.servers does not matter. Errors of MakePlan.
absl::StatusOr<std::vector<SimulatedCount>> Simulate(const PlanRequest& request,
                                                     const Machine& machine,
                                                     const std::vector<int64_t>& counts);

}  // namespace stiefel

#endif  // STIEFEL_PLAN_SIMULATE_H_
