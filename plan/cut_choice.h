#ifndef STIEFEL_PLAN_CUT_CHOICE_H_
#define STIEFEL_PLAN_CUT_CHOICE_H_

#include <cstdint>
#include <vector>

#include "plan/placement_problem.h"

// Into how many shards matrices are cut. Numbers of shards come from the ladder 1, 2, 3, 4, 6, 8,
// 12, 16, 24 ... Internal to the planner.

namespace stiefel {

// A cut for balance must make each shard cheaper by this share per step of the ladder: small
// products are done for every shard anew, so that cutting squares soon costs more than it brings.
inline constexpr double kMinCutGain = 0.1;
// Smallest shard of an element-wise matrix that is cut for balance, in elements: below it the
// messages cost more than the bytes.
inline constexpr int64_t kMinElementwiseShard = int64_t{1} << 20;

// By matrix: cut so far that no shard takes more than `share` of a server's fair part of what
// refreshes together, as far as every cut brings kMinCutGain and there are servers for the shards.
// The fair part is that of a server of mean speed. Spectral matrices only where cut_spectral is
// set. 1 for pairs and for what ValidateSharding refuses; forced numbers are left as they are.
std::vector<int64_t> CutsForBalance(const PlanRequest& request, const ModelCosts& costs,
                                    double share, bool cut_spectral);

// Cuts matrix `lacking`, of which a shard of `bytes` found no room, and all others whose shards are
// as large, so that a shard fits into `room` bytes; further by one step of the ladder where none
// does. Returns false, with *shards as it was, where the matrix cannot be cut or smaller shards
// would not need less memory.
bool CutForMemory(const PlacementProblem& problem, int32_t lacking, int64_t room,
                  std::vector<int64_t>* shards);

}  // namespace stiefel

#endif  // STIEFEL_PLAN_CUT_CHOICE_H_
