#include "plan/cut_choice.h"

#include <algorithm>
#include <limits>
#include <map>
#include <utility>

#include "common/checked_math.h"
#include "plan/cost.h"
#include "plan/shards.h"

namespace stiefel {
namespace {

// For memory a matrix may have more shards than there are servers, because several may share one.
constexpr int64_t kMemoryShardsPerServer = 4;

int64_t NextOfLadder(int64_t shards) {
  if (shards < 3) return shards + 1;
  // 3 4 6 8 12 16: the larger factor of a power of two first.
  int64_t power = 4;
  while (power <= shards) power *= 2;
  return shards >= power / 4 * 3 ? power : power / 4 * 3;
}

bool MayCut(const PlanRequest& request, const ModelCosts& costs, int32_t matrix) {
  const PlanMatrix& m = request.matrices[matrix];
  const bool forced = !request.forced_shards.empty() && request.forced_shards[matrix] != 0;
  return !forced && costs.partners[matrix] < 0 && ValidateSharding(m.rule, m.rows, m.cols).ok();
}

// The largest of `shards` even shards.
PlanMatrix LargestShard(const PlanMatrix& matrix, int64_t shards) {
  const std::vector<int64_t> cuts = EvenCuts(matrix.rows, matrix.cols, shards);
  return ShardOfMatrix(matrix, ShardRects(matrix.rows, matrix.cols, cuts).front(), shards);
}

double RefreshUnits(const PlanMatrix& matrix) {
  return StepCost(matrix, StepKind::kRefresh).Units();
}

int64_t MostShards(const PlanRequest& request, const PlanMatrix& matrix) {
  int64_t most =
      std::min(static_cast<int64_t>(request.servers.size()), LongSide(matrix.rows, matrix.cols));
  if (matrix.rule.family != RuleFamily::kSpectral) {
    most = std::min(most, matrix.rows * matrix.cols / kMinElementwiseShard);
  }
  return most;
}

// The first number of the ladder whose shards cost no more than `limit`, or the last that pays.
int64_t CutTo(const PlanRequest& request, const PlanMatrix& matrix, double whole, double limit) {
  const int64_t most = MostShards(request, matrix);
  int64_t shards = 1;
  double units = whole;
  while (units > limit) {
    const int64_t next = NextOfLadder(shards);
    if (next > most) break;
    const double next_units = RefreshUnits(LargestShard(matrix, next));
    if (next_units > (1 - kMinCutGain) * units) break;
    shards = next;
    units = next_units;
  }
  return shards;
}

// Memory that a shard needs where it is the only one in flight.
int64_t Needs(const PlacementProblem& problem, const PlanMatrix& matrix, int64_t shards) {
  const PlanMatrix shard = LargestShard(matrix, shards);
  const int64_t pushed = SaturatingMul(shard.rows * shard.cols, problem.request.push_copies);
  const absl::StatusOr<MatrixBytes> bytes = BytesOfMatrix(shard, pushed, problem.request.memory);
  if (!bytes.ok()) return std::numeric_limits<int64_t>::max();
  return SaturatingAdd(bytes->Resident(), bytes->workspace);
}

// The next number of shards that needs less memory each: the first that fits, else the next of the
// ladder. The present number where none does.
int64_t CutUntilFits(const PlacementProblem& problem, const PlanMatrix& matrix, int64_t shards,
                     int64_t room) {
  const int64_t most =
      std::min(kMemoryShardsPerServer * static_cast<int64_t>(problem.server_count()),
               LongSide(matrix.rows, matrix.cols));
  const int64_t needs = Needs(problem, matrix, shards);
  int64_t first_smaller = shards;
  for (int64_t next = NextOfLadder(shards); next <= most; next = NextOfLadder(next)) {
    const int64_t next_needs = Needs(problem, matrix, next);
    if (next_needs >= needs) continue;
    if (first_smaller == shards) first_smaller = next;
    if (next_needs <= room) return next;
  }
  return first_smaller;
}

}  // namespace

std::vector<int64_t> CutsForBalance(const PlanRequest& request, const ModelCosts& costs,
                                    double share, bool cut_spectral) {
  std::vector<int64_t> shards(request.matrices.size(), 1);
  for (size_t i = 0; i < request.forced_shards.size(); ++i) {
    if (request.forced_shards[i] != 0) shards[i] = request.forced_shards[i];
  }
  std::map<std::pair<int64_t, int64_t>, double> sets;  // Units, by period and phase.
  const auto set_of = [&](size_t i) {
    return std::make_pair(request.matrices[i].rule.period, costs.phases[i]);
  };
  for (size_t i = 0; i < request.matrices.size(); ++i) {
    sets[set_of(i)] += costs.units[i].refresh;
  }
  for (size_t i = 0; i < request.matrices.size(); ++i) {
    const PlanMatrix& matrix = request.matrices[i];
    const double limit = share * sets[set_of(i)] / static_cast<double>(request.servers.size());
    if (costs.units[i].refresh <= limit) continue;
    if (matrix.rule.family == RuleFamily::kSpectral && !cut_spectral) continue;
    if (!MayCut(request, costs, static_cast<int32_t>(i))) continue;
    shards[i] = CutTo(request, matrix, costs.units[i].refresh, limit);
  }
  return shards;
}

bool CutForMemory(const PlacementProblem& problem, int32_t lacking, int64_t room,
                  std::vector<int64_t>* shards) {
  const PlanRequest& request = problem.request;
  if (!MayCut(request, problem.costs, lacking)) return false;
  const int64_t more = CutUntilFits(problem, request.matrices[lacking], (*shards)[lacking], room);
  if (more == (*shards)[lacking]) return false;
  const int64_t needed = Needs(problem, request.matrices[lacking], (*shards)[lacking]);
  for (size_t i = 0; i < request.matrices.size(); ++i) {
    const auto matrix = static_cast<int32_t>(i);
    if (matrix == lacking || !MayCut(request, problem.costs, matrix) ||
        Needs(problem, request.matrices[i], (*shards)[i]) < needed) {
      continue;
    }
    (*shards)[i] = CutUntilFits(problem, request.matrices[i], (*shards)[i], room);
  }
  (*shards)[lacking] = more;
  return true;
}

}  // namespace stiefel
