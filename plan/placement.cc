#include "plan/placement.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/status.h"
#include "plan/assignment.h"
#include "plan/cut_choice.h"
#include "plan/improvement.h"
#include "plan/placement_problem.h"
#include "plan/shards.h"

namespace stiefel {
namespace {

// Share of the cycle that more cuts must save.
constexpr double kMinCycleGain = 0.02;

constexpr size_t kMaxServers = size_t{1} << 20;

absl::Status CheckRequest(const PlanRequest& request) {
  if (request.servers.empty() || request.servers.size() > kMaxServers) {
    return absl::InvalidArgumentError(
        absl::StrCat("a plan needs 1 to ", kMaxServers, " servers, got ", request.servers.size()));
  }
  for (size_t s = 0; s < request.servers.size(); ++s) {
    const ServerSpec& server = request.servers[s];
    if (!std::isfinite(server.speed) || server.speed <= 0) {
      return absl::InvalidArgumentError(
          absl::StrCat("server ", s, ": speed ", server.speed, " is not positive"));
    }
    if (server.memory_bytes <= 0) {
      return absl::InvalidArgumentError(
          absl::StrCat("server ", s, ": memory of ", server.memory_bytes, " bytes"));
    }
  }
  if (request.push_copies < 1) {
    return absl::InvalidArgumentError(absl::StrCat("push_copies is ", request.push_copies,
                                                   ": each element is pushed by someone"));
  }
  if (!request.forced_shards.empty() && request.forced_shards.size() != request.matrices.size()) {
    return absl::InvalidArgumentError(absl::StrCat("forced_shards has ",
                                                   request.forced_shards.size(), " numbers for ",
                                                   request.matrices.size(), " matrices"));
  }
  return absl::OkStatus();
}

// The item that has no place in `assignment`, as an error for the user.
absl::Status NoPlace(const PlacementProblem& problem, const Assignment& assignment, int32_t item) {
  const int32_t roomiest = assignment.MostRoom();
  MemoryTally all(problem.request.memory);
  for (const MatrixBytes& bytes : problem.bytes) all.Add(bytes);
  double offered = 0;
  for (const ServerSpec& server : problem.servers()) {
    offered += static_cast<double>(server.memory_bytes);
  }
  const MatrixBytes& bytes = problem.bytes[item];
  return absl::ResourceExhaustedError(absl::StrCat(
      "no server has room for ", problem.Describe(item), ": it needs ", bytes.Resident(),
      " bytes and ", bytes.workspace, " of workspace; server ", roomiest, " has the most room, ",
      std::max<int64_t>(0, assignment.FreeBytes(roomiest)), " of ",
      problem.servers()[roomiest].memory_bytes, " bytes; the whole model needs about ", all.Total(),
      " bytes of the ", static_cast<int64_t>(std::min(offered, 9e18)), " on ",
      problem.server_count(), " servers. Add servers or memory, ",
      problem.request.memory.staging == Staging::kDouble ? "use staging=lazy, " : "",
      "or a narrower dtype on the wire"));
}

// Each set dearest first to the server that is done soonest; nothing if an item does not fit.
std::optional<Assignment> PlaceByCost(const PlacementProblem& problem) {
  Assignment assignment(problem);
  for (std::vector<int32_t> set : problem.sets) {
    std::stable_sort(set.begin(), set.end(), [&problem](int32_t a, int32_t b) {
      return problem.units[a].refresh > problem.units[b].refresh;
    });
    for (int32_t item : set) {
      const int32_t server = assignment.Soonest(item);
      if (server < 0) return std::nullopt;
      assignment.Give(item, server);
    }
  }
  return assignment;
}

// Largest first to where the most memory stays free. -1, or the item that has no place.
int32_t PlaceBySize(const PlacementProblem& problem, Assignment* assignment) {
  std::vector<int32_t> order(problem.item_count());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&problem](int32_t a, int32_t b) {
    return problem.bytes[a].Resident() > problem.bytes[b].Resident();
  });
  for (int32_t item : order) {
    const int32_t server = assignment->Roomiest(item);
    if (server < 0) return item;
    assignment->Give(item, server);
  }
  return -1;
}

struct Placed {
  std::vector<std::vector<int64_t>> cuts;
  std::vector<int32_t> owners;  // By shard.
  double cycle_time = 0;
  double level_time = 0;

  bool IsLevel() const { return cycle_time <= (1 + kMinCycleGain) * level_time; }
};

// Places the model in so many shards, and in more where it does not fit otherwise.
absl::StatusOr<Placed> PlaceShards(const PlanRequest& request, const ModelCosts& costs,
                                   std::vector<int64_t> shards) {
  for (;;) {
    STIEFEL_ASSIGN_OR_RETURN(const PlacementProblem problem,
                             MakePlacementProblem(request, costs, shards));
    std::optional<Assignment> assignment = PlaceByCost(problem);
    if (!assignment.has_value()) {
      assignment.emplace(problem);
      const int32_t lacking = PlaceBySize(problem, &*assignment);
      if (lacking >= 0) {
        // Each round makes shards smaller, so the rounds end.
        const int64_t room = assignment->FreeBytes(assignment->MostRoom());
        if (CutForMemory(problem, problem.matrix_of[lacking], room, &shards)) continue;
        return NoPlace(problem, *assignment, lacking);
      }
    }
    Improve(problem, &*assignment);
    return Placed{problem.cuts, problem.OwnersByShard(assignment->owners()),
                  assignment->CycleTime(), assignment->LevelTime()};
  }
}

}  // namespace

// First with as few cuts as memory allows, then with spectral matrices cut to a server's fair part
// and below until the steps are level to within kMinCycleGain: more cuts are taken only where they
// shorten the cycle by more than that.
absl::StatusOr<Plan> MakePlanWith(const PlanRequest& request, const ModelCosts& costs) {
  STIEFEL_RETURN_IF_ERROR(CheckRequest(request));
  std::vector<int64_t> shards = CutsForBalance(request, costs, 1, /*cut_spectral=*/false);
  STIEFEL_ASSIGN_OR_RETURN(Placed best, PlaceShards(request, costs, shards));
  for (const double share : {1.0, 0.5, 0.25}) {
    if (best.IsLevel()) break;
    std::vector<int64_t> more = CutsForBalance(request, costs, share, /*cut_spectral=*/true);
    if (more == shards) continue;
    shards = std::move(more);
    absl::StatusOr<Placed> placed = PlaceShards(request, costs, shards);
    if (!placed.ok()) break;  // Shards of spectral matrices take more memory.
    if (placed->cycle_time < (1 - kMinCycleGain) * best.cycle_time) best = *std::move(placed);
  }
  return Plan{costs.phases, std::move(best.cuts), std::move(best.owners)};
}

absl::StatusOr<Plan> MakePlan(const PlanRequest& request) {
  STIEFEL_RETURN_IF_ERROR(CheckRequest(request));
  STIEFEL_ASSIGN_OR_RETURN(const ModelCosts costs, CostsOfModel(request));
  return MakePlanWith(request, costs);
}

std::vector<PlanShard> ShardsOfPlan(const std::vector<PlanMatrix>& matrices,
                                    const std::vector<std::vector<int64_t>>& cuts) {
  std::vector<PlanShard> shards;
  for (size_t i = 0; i < matrices.size(); ++i) {
    int32_t shard = 0;
    for (const Rect& rect : ShardRects(matrices[i].rows, matrices[i].cols, cuts[i])) {
      shards.push_back({static_cast<int32_t>(i), shard++, rect});
    }
  }
  return shards;
}

}  // namespace stiefel
