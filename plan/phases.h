#ifndef STIEFEL_PLAN_PHASES_H_
#define STIEFEL_PLAN_PHASES_H_

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "plan/matrix.h"

namespace stiefel {

// The phase of each matrix: the residue of (step - 1) mod its period at which it refreshes. It
// follows from the model alone (shapes, rules and their order, never names or servers), so that a
// run keeps its schedule when its servers change.
//
//   staggered     dealt over the residues so that every step costs the same: dearest first, each to
//   the residue that has
//                 the least so far (the lowest one where they are equal); matrices of one period
//                 form one deal
//   synchronised  0
//   number        that number
//
// Within a period, for each residue: most <= mean + (1 - 1/period) x the dearest staggered matrix,
// where all of that period are staggered. INVALID_ARGUMENT: a size that is not positive, a period
// below 1, a phase number outside [0, period).
absl::StatusOr<std::vector<int64_t>> AssignPhases(const std::vector<PlanMatrix>& matrices);

}  // namespace stiefel

#endif  // STIEFEL_PLAN_PHASES_H_
