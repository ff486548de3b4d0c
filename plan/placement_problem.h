#ifndef STIEFEL_PLAN_PLACEMENT_PROBLEM_H_
#define STIEFEL_PLAN_PLACEMENT_PROBLEM_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "plan/placement.h"

// The request of MakePlan in the form that its algorithm works on. Internal to the planner.

namespace stiefel {

// What a step costs, in units.
struct StepUnits {
  double refresh = 0;
  double off = 0;
};

// What follows from the model alone, whoever owns what: made once for many placements.
struct ModelCosts {
  std::vector<int64_t> phases;     // By matrix.
  std::vector<int32_t> partners;   // By matrix; see FindPairs.
  std::vector<MatrixBytes> bytes;  // Of whole matrices; of both factors with the first of a pair.
  std::vector<StepUnits> units;    // Likewise.
  int64_t cycle = 1;
};

// Of request.matrices with request.memory and request.push_copies. Errors: those of AssignPhases,
// FindPairs and BytesOfMatrix.
absl::StatusOr<ModelCosts> CostsOfModel(const PlanRequest& request);

// MakePlan with the costs that CostsOfModel gave for the same model.
absl::StatusOr<Plan> MakePlanWith(const PlanRequest& request, const ModelCosts& costs);

// What is placed is an item: one matrix, one shard of it, or the two factors of a polora product
// together.
struct PlacementProblem {
  PlacementProblem(const PlanRequest& request, const ModelCosts& costs)
      : request(request), costs(costs) {}

  const PlanRequest& request;
  const ModelCosts& costs;
  std::vector<std::vector<int64_t>> cuts;  // By matrix.
  std::vector<int32_t> first_shard;        // By matrix: index of its first shard over the model.

  // By item, in the order of matrices and, within one, of shards.
  std::vector<int32_t> matrix_of;  // Of a pair the first factor.
  std::vector<int32_t> shard_of;   // Within the matrix.
  std::vector<MatrixBytes> bytes;
  std::vector<StepUnits> units;
  std::vector<int32_t> set_of;  // Index of the set that refreshes together.

  std::vector<std::vector<int32_t>> sets;  // Of items; longest period first.

  const std::vector<ServerSpec>& servers() const { return request.servers; }
  int32_t server_count() const { return static_cast<int32_t>(request.servers.size()); }
  int32_t item_count() const { return static_cast<int32_t>(matrix_of.size()); }
  int64_t cycle() const { return costs.cycle; }
  double CostAt(int32_t item, int64_t residue) const {
    const int32_t matrix = matrix_of[item];
    const bool refreshes = residue % request.matrices[matrix].rule.period == costs.phases[matrix];
    return refreshes ? units[item].refresh : units[item].off;
  }
  // "a (4 x 20) and b (30 x 4)", "shard 1 of 3 of w (30 x 4)"
  std::string Describe(int32_t item) const;
  // Owners by shard of the model, from owners by item.
  std::vector<int32_t> OwnersByShard(const std::vector<int32_t>& owners) const;
};

// With matrix i in `shards[i]` even shards. INVALID_ARGUMENT, with the name: a number that is not
// within 1 and the long side, a matrix that ValidateSharding refuses; errors of BytesOfMatrix.
// `request` and `costs` must outlive the problem.
absl::StatusOr<PlacementProblem> MakePlacementProblem(const PlanRequest& request,
                                                      const ModelCosts& costs,
                                                      const std::vector<int64_t>& shards);

}  // namespace stiefel

#endif  // STIEFEL_PLAN_PLACEMENT_PROBLEM_H_
