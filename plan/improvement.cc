#include "plan/improvement.h"

#include <algorithm>
#include <array>
#include <numeric>
#include <utility>
#include <vector>

namespace stiefel {
namespace {

class Improvement {
 public:
  Improvement(const PlacementProblem& problem, Assignment* assignment, int64_t budget)
      : problem_(problem), assignment_(*assignment), slowest_(problem.cycle()), budget_(budget) {
    loads_.assign(problem.cycle(), std::vector<double>(problem.server_count(), 0));
    owned_.resize(problem.server_count());
    for (int32_t item = 0; item < problem.item_count(); ++item) {
      const int32_t owner = assignment_.owners()[item];
      owned_[owner].push_back(item);
      for (int64_t r = 0; r < problem.cycle(); ++r) loads_[r][owner] += problem.CostAt(item, r);
    }
    for (size_t set = 0; set < problem.sets.size(); ++set) set_limits_.push_back(SetLimit(set));
    for (int64_t r = 0; r < problem.cycle(); ++r) FindSlowest(r);
  }

  void Run() {
    if (problem_.server_count() < 2) return;
    for (bool better = true; better && budget_ > 0;) {
      better = false;
      for (int64_t r = 0; r < problem_.cycle() && !better; ++r) {
        const int32_t slowest = slowest_[r][0];
        better = TryMoves(slowest) || TrySwaps(slowest);
      }
    }
  }

 private:
  double Time(double load, int32_t server) const { return load / problem_.servers()[server].speed; }

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
    budget_ -= problem_.cycle();
    double before = 0, after = 0;
    for (int64_t r = 0; r < problem_.cycle(); ++r) {
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
    for (int32_t item : problem_.sets[set])
      dearest = std::max(dearest, problem_.units[item].refresh);
    const auto p = static_cast<double>(problem_.server_count());
    const double mean = std::accumulate(now.begin(), now.end(), 0.0) / p;
    return std::max(mean + (1 - 1 / p) * dearest, *std::max_element(now.begin(), now.end()));
  }

  // Whether `server` stays within the bound of the set of `gets` when it gets it and gives `gives`
  // (-1: nothing).
  bool WithinSetLimit(int32_t server, int32_t gets, int32_t gives) const {
    const int32_t set = problem_.set_of[gets];
    double load = assignment_.set_loads(set)[server] + problem_.units[gets].refresh;
    if (gives >= 0 && problem_.set_of[gives] == set) load -= problem_.units[gives].refresh;
    return load <= set_limits_[set];
  }

  void Shift(int32_t item, int32_t from, int32_t to) {
    budget_ -= problem_.cycle() * problem_.server_count();
    assignment_.Take(item);
    assignment_.Give(item, to);
    for (int64_t r = 0; r < problem_.cycle(); ++r) {
      loads_[r][from] -= problem_.CostAt(item, r);
      loads_[r][to] += problem_.CostAt(item, r);
      FindSlowest(r);
    }
  }

  bool TryMoves(int32_t from) {
    for (size_t k = 0; k < owned_[from].size(); ++k) {
      const int32_t item = owned_[from][k];
      for (int32_t to = 0; to < problem_.server_count() && budget_ > 0; ++to) {
        --budget_;
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
  int64_t budget_;
};

}  // namespace

void Improve(const PlacementProblem& problem, Assignment* assignment, int64_t budget) {
  Improvement(problem, assignment, budget).Run();
}

}  // namespace stiefel
