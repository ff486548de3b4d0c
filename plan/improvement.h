#ifndef STIEFEL_PLAN_IMPROVEMENT_H_
#define STIEFEL_PLAN_IMPROVEMENT_H_

#include <cstdint>

#include "plan/assignment.h"
#include "plan/placement_problem.h"

namespace stiefel {

// Work that Improve may do, in loads looked at. A count, not a time: the answer must not depend on
// the machine.
inline constexpr int64_t kImprovementBudget = 10000000;

// Moves and swaps items while the cycle gets shorter: the sum over its steps of the time of the
// slowest server. Keeps the bound of every set that had it, and memory. Internal to the planner.
void Improve(const PlacementProblem& problem, Assignment* assignment,
             int64_t budget = kImprovementBudget);

}  // namespace stiefel

#endif  // STIEFEL_PLAN_IMPROVEMENT_H_
