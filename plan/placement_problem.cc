#include "plan/placement_problem.h"

#include <limits>
#include <map>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/checked_math.h"
#include "common/status.h"
#include "plan/cost.h"
#include "plan/pairs.h"
#include "plan/phases.h"
#include "plan/shards.h"

namespace stiefel {
namespace {

absl::StatusOr<MatrixBytes> Bytes(const PlanRequest& request, const PlanMatrix& matrix) {
  int64_t pushed = 0;
  if (!CheckedMul(matrix.rows, matrix.cols, &pushed) ||
      !CheckedMul(pushed, request.push_copies, &pushed)) {
    pushed = std::numeric_limits<int64_t>::max();  // BytesOfMatrix refuses it, with the shape.
  }
  return BytesOfMatrix(matrix, pushed, request.memory);
}

StepUnits Units(const PlanMatrix& matrix) {
  return {StepCost(matrix, StepKind::kRefresh).Units(),
          StepCost(matrix, StepKind::kOffRefresh).Units()};
}

// Both factors of a pair may be in flight at once, so that their workspaces add up too.
void Add(const MatrixBytes& bytes, MatrixBytes* sum) {
  sum->state = SaturatingAdd(sum->state, bytes.state);
  sum->staged = SaturatingAdd(sum->staged, bytes.staged);
  sum->weights = SaturatingAdd(sum->weights, bytes.weights);
  sum->push = SaturatingAdd(sum->push, bytes.push);
  sum->pull = SaturatingAdd(sum->pull, bytes.pull);
  sum->workspace = SaturatingAdd(sum->workspace, bytes.workspace);
  sum->held = SaturatingAdd(sum->held, bytes.held);
}

// The factor `matrix` of a pair, counted with the first of the two.
absl::Status AddFactor(const PlanRequest& request, int32_t matrix, ModelCosts* costs) {
  const int32_t partner = costs->partners[matrix];
  const PlanMatrix& other = request.matrices[partner];
  PlanMatrix sized = request.matrices[matrix];
  sized.partner_elements = SaturatingMul(other.rows, other.cols);
  STIEFEL_ASSIGN_OR_RETURN(const MatrixBytes bytes, Bytes(request, sized));
  const StepUnits units = Units(sized);
  const int32_t first = std::min(matrix, partner);
  Add(bytes, &costs->bytes[first]);
  costs->units[first].refresh += units.refresh;
  costs->units[first].off += units.off;
  return absl::OkStatus();
}

// Checks the number of shards of a matrix and cuts it.
absl::StatusOr<std::vector<int64_t>> CutMatrix(const PlanMatrix& matrix, int64_t shards) {
  if (shards < 1 || shards > LongSide(matrix.rows, matrix.cols)) {
    return absl::InvalidArgumentError(absl::StrCat(matrix.name, ": a ", matrix.rows, " x ",
                                                   matrix.cols, " matrix cannot be cut into ",
                                                   shards, " shards"));
  }
  if (shards == 1) return std::vector<int64_t>();
  const absl::Status status = ValidateSharding(matrix.rule, matrix.rows, matrix.cols);
  if (!status.ok()) {
    return absl::Status(status.code(), absl::StrCat(matrix.name, ": ", status.message()));
  }
  return EvenCuts(matrix.rows, matrix.cols, shards);
}

void AddItem(int32_t matrix, int32_t shard, const MatrixBytes& bytes, const StepUnits& units,
             PlacementProblem* problem) {
  problem->matrix_of.push_back(matrix);
  problem->shard_of.push_back(shard);
  problem->bytes.push_back(bytes);
  problem->units.push_back(units);
}

absl::Status AddShards(int32_t index, PlacementProblem* problem) {
  const PlanMatrix& matrix = problem->request.matrices[index];
  const std::vector<Rect> rects = ShardRects(matrix.rows, matrix.cols, problem->cuts[index]);
  PlanMatrix shard;
  MatrixBytes bytes;
  StepUnits units;
  for (size_t i = 0; i < rects.size(); ++i) {
    // Even shards have one of two sizes, so most are as dear as the one before.
    if (i == 0 || rects[i].Area() != rects[i - 1].Area()) {
      shard = ShardOfMatrix(matrix, rects[i], static_cast<int64_t>(rects.size()));
      STIEFEL_ASSIGN_OR_RETURN(bytes, Bytes(problem->request, shard));
      units = Units(shard);
    }
    AddItem(index, static_cast<int32_t>(i), bytes, units, problem);
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<ModelCosts> CostsOfModel(const PlanRequest& request) {
  ModelCosts costs;
  STIEFEL_ASSIGN_OR_RETURN(costs.phases, AssignPhases(request.matrices));
  STIEFEL_ASSIGN_OR_RETURN(costs.partners, FindPairs(request.matrices));
  costs.bytes.resize(request.matrices.size());
  costs.units.resize(request.matrices.size());
  for (size_t i = 0; i < request.matrices.size(); ++i) {
    if (costs.partners[i] >= 0) {
      STIEFEL_RETURN_IF_ERROR(AddFactor(request, static_cast<int32_t>(i), &costs));
    } else {
      STIEFEL_ASSIGN_OR_RETURN(costs.bytes[i], Bytes(request, request.matrices[i]));
      costs.units[i] = Units(request.matrices[i]);
    }
  }
  costs.cycle = CycleSteps(request.matrices);
  return costs;
}

std::string PlacementProblem::Describe(int32_t item) const {
  const int32_t index = matrix_of[item];
  const auto describe = [this](int32_t matrix) {
    const PlanMatrix& m = request.matrices[matrix];
    return absl::StrCat(m.name, " (", m.rows, " x ", m.cols, ")");
  };
  if (costs.partners[index] >= 0) {
    return absl::StrCat(describe(index), " and ", describe(costs.partners[index]));
  }
  if (cuts[index].empty()) return describe(index);
  return absl::StrCat("shard ", shard_of[item], " of ", cuts[index].size() + 1, " of ",
                      describe(index));
}

std::vector<int32_t> PlacementProblem::OwnersByShard(const std::vector<int32_t>& owners) const {
  const size_t count =
      cuts.empty() ? 0 : static_cast<size_t>(first_shard.back()) + cuts.back().size() + 1;
  std::vector<int32_t> by_shard(count, -1);
  for (int32_t item = 0; item < item_count(); ++item) {
    const int32_t matrix = matrix_of[item];
    by_shard[first_shard[matrix] + shard_of[item]] = owners[item];
    if (costs.partners[matrix] >= 0) by_shard[first_shard[costs.partners[matrix]]] = owners[item];
  }
  return by_shard;
}

absl::StatusOr<PlacementProblem> MakePlacementProblem(const PlanRequest& request,
                                                      const ModelCosts& costs,
                                                      const std::vector<int64_t>& shards) {
  PlacementProblem problem(request, costs);
  std::map<std::pair<int64_t, int64_t>, std::vector<int32_t>> sets;  // By (-period, phase).
  int32_t next_shard = 0;
  for (int32_t i = 0; i < static_cast<int32_t>(request.matrices.size()); ++i) {
    STIEFEL_ASSIGN_OR_RETURN(problem.cuts.emplace_back(),
                             CutMatrix(request.matrices[i], shards[i]));
    problem.first_shard.push_back(next_shard);
    next_shard += static_cast<int32_t>(shards[i]);
    if (costs.partners[i] >= 0 && costs.partners[i] < i) continue;  // Came with the other factor.
    const int32_t first_item = problem.item_count();
    if (shards[i] == 1) {
      AddItem(i, 0, costs.bytes[i], costs.units[i], &problem);
    } else {
      STIEFEL_RETURN_IF_ERROR(AddShards(i, &problem));
    }
    std::vector<int32_t>& set = sets[{-request.matrices[i].rule.period, costs.phases[i]}];
    for (int32_t item = first_item; item < problem.item_count(); ++item) set.push_back(item);
  }
  problem.set_of.resize(problem.item_count());
  for (auto& [key, members] : sets) {
    for (int32_t member : members) {
      problem.set_of[member] = static_cast<int32_t>(problem.sets.size());
    }
    problem.sets.push_back(std::move(members));
  }
  return problem;
}

}  // namespace stiefel
