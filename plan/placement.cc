#include "plan/placement.h"

#include <algorithm>
#include <array>
#include <numeric>
#include <optional>
#include <tuple>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/checked_math.h"
#include "common/status.h"
#include "plan/placement_problem.h"

namespace stiefel {
namespace {

// Work that local improvement may do, in loads looked at. A count, not a time: the answer must not
// depend on the machine.
constexpr int64_t kImprovementBudget = 40000000;

// Who owns what so far, and the loads that follow from it.
class Assignment {
 public:
  explicit Assignment(const PlacementProblem& problem)
      : problem_(problem),
        owners_(problem.item_count(), -1),
        set_loads_(problem.sets.size(), std::vector<double>(problem.server_count(), 0)),
        totals_(problem.server_count(), 0),
        tallies_(problem.server_count(), MemoryTally(problem.memory)) {}

  void Give(int32_t item, int32_t server) {
    owners_[item] = server;
    set_loads_[problem_.set_of[item]][server] += problem_.refresh[item];
    totals_[server] += problem_.refresh[item] + problem_.off[item];
    tallies_[server].Add(problem_.bytes[item]);
  }

  void Take(int32_t item) {
    const int32_t server = owners_[item];
    owners_[item] = -1;
    set_loads_[problem_.set_of[item]][server] -= problem_.refresh[item];
    totals_[server] -= problem_.refresh[item] + problem_.off[item];
    tallies_[server].Remove(problem_.bytes[item]);
  }

  bool Fits(int32_t item, int32_t server) const {
    return tallies_[server].Fits(problem_.bytes[item], problem_.servers[server].memory_bytes);
  }

  // Where the item fits and its set is done soonest; where equal, the server with less to do in
  // all, then with less in memory, then the first. -1 if it fits nowhere.
  int32_t Soonest(int32_t item) const {
    const std::vector<double>& loads = set_loads_[problem_.set_of[item]];
    int32_t best = -1;
    std::tuple<double, double, int64_t> best_key;
    for (int32_t server = 0; server < problem_.server_count(); ++server) {
      const double speed = problem_.servers[server].speed;
      const std::tuple<double, double, int64_t> key(
          (loads[server] + problem_.refresh[item]) / speed, totals_[server] / speed,
          tallies_[server].Parts().Resident());
      if ((best < 0 || key < best_key) && Fits(item, server)) {
        best = server;
        best_key = key;
      }
    }
    return best;
  }

  // Where the item fits and the most memory stays free. -1 if it fits nowhere.
  int32_t Roomiest(int32_t item) const {
    int32_t best = -1;
    for (int32_t server = 0; server < problem_.server_count(); ++server) {
      if ((best < 0 || FreeBytes(server) > FreeBytes(best)) && Fits(item, server)) best = server;
    }
    return best;
  }

  int64_t FreeBytes(int32_t server) const {
    return problem_.servers[server].memory_bytes - tallies_[server].Total();
  }

  const std::vector<int32_t>& owners() const { return owners_; }
  const std::vector<double>& set_loads(int32_t set) const { return set_loads_[set]; }

 private:
  const PlacementProblem& problem_;
  std::vector<int32_t> owners_;
  std::vector<std::vector<double>> set_loads_;  // By set and server, units at the set's refresh.
  std::vector<double> totals_;
  std::vector<MemoryTally> tallies_;
};

// Moves and swaps items while the cycle gets shorter: the sum over its steps of the time of the
// slowest server. Keeps the bound of every set that had it.
class Improvement {
 public:
  Improvement(const PlacementProblem& problem, Assignment* assignment)
      : problem_(problem), assignment_(*assignment), slowest_(problem.cycle) {
    loads_.assign(problem.cycle, std::vector<double>(problem.server_count(), 0));
    owned_.resize(problem.server_count());
    for (int32_t item = 0; item < problem.item_count(); ++item) {
      const int32_t owner = assignment_.owners()[item];
      owned_[owner].push_back(item);
      for (int64_t r = 0; r < problem.cycle; ++r) loads_[r][owner] += problem.CostAt(item, r);
    }
    for (size_t set = 0; set < problem.sets.size(); ++set) set_limits_.push_back(SetLimit(set));
    for (int64_t r = 0; r < problem.cycle; ++r) FindSlowest(r);
  }

  void Run() {
    if (problem_.server_count() < 2) return;
    for (bool better = true; better && budget_ > 0;) {
      better = false;
      for (int64_t r = 0; r < problem_.cycle && !better; ++r) {
        const int32_t slowest = slowest_[r][0];
        better = TryMoves(slowest) || TrySwaps(slowest);
      }
    }
  }

 private:
  double Time(double load, int32_t server) const { return load / problem_.servers[server].speed; }

  // The three slowest servers at a step: a trial changes two, so one of the three is the slowest of
  // the others.
  void FindSlowest(int64_t r) {
    std::array<int32_t, 3>& slowest = slowest_[r];
    slowest = {-1, -1, -1};
    for (int32_t server = 0; server < problem_.server_count(); ++server) {
      int32_t next = server;
      for (int32_t& place : slowest) {
        if (place < 0 || Time(loads_[r][next], next) > Time(loads_[r][place], place)) {
          std::swap(place, next);
        }
        if (next < 0) break;
      }
    }
  }

  // How much shorter the cycle gets when `from` gives `mine` to `to` and gets `other` (or nothing:
  // -1) back.
  bool Shortens(int32_t mine, int32_t from, int32_t other, int32_t to) {
    budget_ -= problem_.cycle;
    double before = 0, after = 0;
    for (int64_t r = 0; r < problem_.cycle; ++r) {
      const double shifted = problem_.CostAt(mine, r) - (other < 0 ? 0 : problem_.CostAt(other, r));
      before += Time(loads_[r][slowest_[r][0]], slowest_[r][0]);
      double longest =
          std::max(Time(loads_[r][from] - shifted, from), Time(loads_[r][to] + shifted, to));
      for (int32_t server : slowest_[r]) {
        if (server < 0 || server == from || server == to) continue;
        longest = std::max(longest, Time(loads_[r][server], server));
        break;
      }
      after += longest;
    }
    // Not for a gain that is only rounding.
    return after < before * (1 - 1e-9);
  }

  // The most that one server may have of a set: Graham's bound, or what is there now if memory
  // forced more.
  double SetLimit(size_t set) const {
    const std::vector<double>& now = assignment_.set_loads(static_cast<int32_t>(set));
    double dearest = 0;
    for (int32_t item : problem_.sets[set]) dearest = std::max(dearest, problem_.refresh[item]);
    const auto p = static_cast<double>(problem_.server_count());
    const double mean = std::accumulate(now.begin(), now.end(), 0.0) / p;
    return std::max(mean + (1 - 1 / p) * dearest, *std::max_element(now.begin(), now.end()));
  }

  // Whether `server` stays within the bound of the set of `gets` when it gets it and gives `gives`
  // (-1: nothing).
  bool WithinSetLimit(int32_t server, int32_t gets, int32_t gives) const {
    const int32_t set = problem_.set_of[gets];
    double load = assignment_.set_loads(set)[server] + problem_.refresh[gets];
    if (gives >= 0 && problem_.set_of[gives] == set) load -= problem_.refresh[gives];
    return load <= set_limits_[set];
  }

  void Shift(int32_t item, int32_t from, int32_t to) {
    assignment_.Take(item);
    assignment_.Give(item, to);
    for (int64_t r = 0; r < problem_.cycle; ++r) {
      loads_[r][from] -= problem_.CostAt(item, r);
      loads_[r][to] += problem_.CostAt(item, r);
      FindSlowest(r);
    }
  }

  bool TryMoves(int32_t from) {
    for (size_t k = 0; k < owned_[from].size(); ++k) {
      const int32_t item = owned_[from][k];
      for (int32_t to = 0; to < problem_.server_count() && budget_ > 0; ++to) {
        if (to == from || !WithinSetLimit(to, item, -1) || !Shortens(item, from, -1, to) ||
            !assignment_.Fits(item, to)) {
          continue;
        }
        Shift(item, from, to);
        owned_[from].erase(owned_[from].begin() + static_cast<int64_t>(k));
        owned_[to].push_back(item);
        return true;
      }
    }
    return false;
  }

  bool TrySwaps(int32_t from) {
    for (int32_t& mine : owned_[from]) {
      for (int32_t to = 0; to < problem_.server_count(); ++to) {
        if (to == from) continue;
        for (int32_t& other : owned_[to]) {
          if (budget_ <= 0) return false;
          if (Shortens(mine, from, other, to) && WithinSetLimit(to, mine, other) &&
              WithinSetLimit(from, other, mine) && SwapFits(mine, from, other, to)) {
            std::swap(mine, other);
            return true;
          }
        }
      }
    }
    return false;
  }

  // Swaps, and swaps back if memory does not allow it.
  bool SwapFits(int32_t mine, int32_t from, int32_t other, int32_t to) {
    Shift(mine, from, to);
    Shift(other, to, from);
    if (assignment_.FreeBytes(from) >= 0 && assignment_.FreeBytes(to) >= 0) return true;
    Shift(other, from, to);
    Shift(mine, to, from);
    return false;
  }

  const PlacementProblem& problem_;
  Assignment& assignment_;
  std::vector<std::vector<double>> loads_;  // By step of the cycle and server.
  std::vector<std::array<int32_t, 3>>
      slowest_;  // By step of the cycle; -1 where there are fewer servers.
  std::vector<std::vector<int32_t>> owned_;  // By server.
  std::vector<double> set_limits_;
  int64_t budget_ = kImprovementBudget;
};

// The item that has no place in `assignment`, as an error for the user.
absl::Status NoPlace(const PlacementProblem& problem, const Assignment& assignment, int32_t item) {
  int32_t roomiest = 0;
  for (int32_t s = 1; s < problem.server_count(); ++s) {
    if (assignment.FreeBytes(s) > assignment.FreeBytes(roomiest)) roomiest = s;
  }
  MemoryTally all(problem.memory);
  for (const MatrixBytes& bytes : problem.bytes) all.Add(bytes);
  double offered = 0;
  for (const ServerSpec& server : problem.servers) {
    offered += static_cast<double>(server.memory_bytes);
  }
  const MatrixBytes& bytes = problem.bytes[item];
  return absl::ResourceExhaustedError(
      absl::StrCat("no server has room for ", problem.Describe(item), ": it needs ",
                   bytes.Resident(), " bytes and ", bytes.workspace, " of workspace; server ",
                   roomiest, " has the most room, ", assignment.FreeBytes(roomiest), " of ",
                   problem.servers[roomiest].memory_bytes, " bytes; the whole model needs about ",
                   all.Total(), " bytes of the ", static_cast<int64_t>(std::min(offered, 9e18)),
                   " on ", problem.server_count(), " servers. Add servers or memory, ",
                   problem.memory.staging == Staging::kDouble ? "use staging=lazy, " : "",
                   "or a narrower dtype on the wire"));
}

// Each set dearest first to the server that is done soonest; nothing if a item does not fit.
std::optional<Assignment> PlaceByCost(const PlacementProblem& problem) {
  Assignment assignment(problem);
  for (std::vector<int32_t> set : problem.sets) {
    std::stable_sort(set.begin(), set.end(), [&problem](int32_t a, int32_t b) {
      return problem.refresh[a] > problem.refresh[b];
    });
    for (int32_t item : set) {
      const int32_t server = assignment.Soonest(item);
      if (server < 0) return std::nullopt;
      assignment.Give(item, server);
    }
  }
  return assignment;
}

absl::StatusOr<Assignment> PlaceBySize(const PlacementProblem& problem) {
  Assignment assignment(problem);
  std::vector<int32_t> order(problem.item_count());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&problem](int32_t a, int32_t b) {
    return problem.bytes[a].Resident() > problem.bytes[b].Resident();
  });
  for (int32_t item : order) {
    const int32_t server = assignment.Roomiest(item);
    if (server < 0) return NoPlace(problem, assignment, item);
    assignment.Give(item, server);
  }
  return assignment;
}

}  // namespace

absl::StatusOr<Plan> MakePlan(const PlanRequest& request) {
  STIEFEL_ASSIGN_OR_RETURN(const PlacementProblem problem, MakePlacementProblem(request));
  std::optional<Assignment> assignment = PlaceByCost(problem);
  if (!assignment.has_value()) {
    STIEFEL_ASSIGN_OR_RETURN(Assignment by_size, PlaceBySize(problem));
    assignment.emplace(std::move(by_size));
  }
  Improvement(problem, &*assignment).Run();
  Plan plan{problem.phases, std::vector<int32_t>(request.matrices.size(), -1)};
  for (int32_t item = 0; item < problem.item_count(); ++item) {
    for (int32_t matrix : problem.items[item]) plan.owners[matrix] = assignment->owners()[item];
  }
  return plan;
}

}  // namespace stiefel
