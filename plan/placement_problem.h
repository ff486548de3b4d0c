#ifndef STIEFEL_PLAN_PLACEMENT_PROBLEM_H_
#define STIEFEL_PLAN_PLACEMENT_PROBLEM_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "plan/placement.h"

// The request of MakePlan in the form that its algorithm works on. Internal to placement.cc.

namespace stiefel {

// What is placed is an item: one matrix, or the two factors of a polora product together.
struct PlacementProblem {
  explicit PlacementProblem(const PlanRequest& request)
      : matrices(request.matrices), servers(request.servers), memory(request.memory) {}

  const std::vector<PlanMatrix>& matrices;
  const std::vector<ServerSpec>& servers;
  const MemoryOptions& memory;
  std::vector<int64_t> phases;              // By matrix.
  std::vector<std::vector<int32_t>> items;  // Matrices of each, in the order of the first of them.

  // By item.
  std::vector<MatrixBytes> bytes;
  std::vector<double> refresh;  // Units at a refresh.
  std::vector<double> off;      // Units at another step.
  std::vector<int32_t> set_of;  // Index of the set that refreshes together.

  std::vector<std::vector<int32_t>> sets;  // Of items; longest period first.
  int64_t cycle = 1;

  int32_t server_count() const { return static_cast<int32_t>(servers.size()); }
  int32_t item_count() const { return static_cast<int32_t>(items.size()); }
  // The matrices of an item have one period and one phase.
  double CostAt(int32_t item, int64_t residue) const {
    const int32_t matrix = items[item][0];
    return residue % matrices[matrix].rule.period == phases[matrix] ? refresh[item] : off[item];
  }
  std::string Describe(int32_t item) const;  // "a (4 x 20) and b (30 x 4)"
};

// Errors: those of MakePlan. `request` must outlive the problem.
absl::StatusOr<PlacementProblem> MakePlacementProblem(const PlanRequest& request);

}  // namespace stiefel

#endif  // STIEFEL_PLAN_PLACEMENT_PROBLEM_H_
