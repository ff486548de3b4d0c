#ifndef STIEFEL_PLAN_PLACEMENT_H_
#define STIEFEL_PLAN_PLACEMENT_H_

#include <cstdint>
#include <limits>
#include <vector>

#include "absl/status/statusor.h"
#include "common/rect.h"
#include "plan/matrix.h"
#include "plan/memory.h"

// Which matrix is cut into which shards, and which server owns which of them. A pure function of
// the model and the servers: the same on every machine, and the same whatever the parameters are
// called. What is placed is one whole matrix, one shard of a matrix, or the two factors of a polora
// product, which belong on one server.

namespace stiefel {

struct ServerSpec {
  double speed = 1;                                            // Relative to the other servers.
  int64_t memory_bytes = std::numeric_limits<int64_t>::max();  // What the server may use in all.
};

struct PlanRequest {
  std::vector<PlanMatrix> matrices;
  std::vector<ServerSpec> servers;
  MemoryOptions memory;
  int64_t push_copies =
      1;  // How many trainers push each element (replicated gradients: all of them).
  // By matrix: into how many even shards it is cut; 0: as MakePlan finds best. Empty: all 0.
  std::vector<int64_t> forced_shards;
};

struct Plan {
  std::vector<int64_t> phases;             // By matrix; see AssignPhases.
  std::vector<std::vector<int64_t>> cuts;  // By matrix, as ShardRects takes them; empty: whole.
  std::vector<int32_t> owners;             // By shard, those of matrix 0 in order, then those of
                                           // matrix 1 ...: index into servers.
};

// Phases first, then cuts, then each residue levelled over the servers: of what refreshes together
// (one period, one phase; the rules without a period are one such set), dearest first, each goes
// where it is done soonest. Then single items move, or change places, while the whole cycle of
// steps gets shorter. A server may get nothing.
//
// Cuts: element-wise matrices that take more than a server's fair part of their set are cut to it;
// spectral ones where that, with the small products that every owner does anew and the traffic
// between owners counted, makes the whole cycle at least 2 % shorter; and any matrix that is too
// large for the memory of one server. Only what ValidateSharding allows is cut.
//
// Bound (equal speeds, memory not binding), for every such set over p servers, in
// StepCost(kRefresh).Units():
//   most of one server <= mean + (1 - 1/p) x the dearest matrix, shard or pair of the set.
// Memory binds: where the above does not fit, items are placed by size instead, largest first, and
// cut smaller where they still do not.
//
// INVALID_ARGUMENT: no server, more than 2^20 of them, speeds or memory that are not positive,
// push_copies < 1, forced shards that the matrix cannot be cut into, and what AssignPhases,
// FindPairs and BytesOfMatrix refuse. RESOURCE_EXHAUSTED, with the numbers: it does not fit.
absl::StatusOr<Plan> MakePlan(const PlanRequest& request);

struct PlanShard {
  int32_t matrix = 0;
  int32_t shard = 0;  // within the matrix
  Rect rect;          // of the matrix
};

// Every shard of the model, in the order of Plan::owners. REQUIRES: valid cuts, one list a matrix.
std::vector<PlanShard> ShardsOfPlan(const std::vector<PlanMatrix>& matrices,
                                    const std::vector<std::vector<int64_t>>& cuts);

}  // namespace stiefel

#endif  // STIEFEL_PLAN_PLACEMENT_H_
