#ifndef STIEFEL_PLAN_ASSIGNMENT_H_
#define STIEFEL_PLAN_ASSIGNMENT_H_

#include <cstdint>
#include <vector>

#include "plan/memory.h"
#include "plan/placement_problem.h"

namespace stiefel {

// Who owns what so far, and the loads that follow from it. Internal to the planner.
class Assignment {
 public:
  // `problem` must outlive it.
  explicit Assignment(const PlacementProblem& problem);

  void Give(int32_t item, int32_t server);
  // REQUIRES: the item has an owner.
  void Take(int32_t item);

  bool Fits(int32_t item, int32_t server) const {
    return tallies_[server].Fits(problem_->bytes[item], problem_->servers()[server].memory_bytes);
  }

  // Where the item fits and its set is done soonest; where equal, the server with less to do in
  // all, then with less in memory, then the first. -1 if it fits nowhere.
  int32_t Soonest(int32_t item) const;

  // Where the item fits and the most memory stays free. -1 if it fits nowhere.
  int32_t Roomiest(int32_t item) const;

  // The server with the most free memory, and how much that is.
  int32_t MostRoom() const;
  int64_t FreeBytes(int32_t server) const {
    return problem_->servers()[server].memory_bytes - tallies_[server].Total();
  }

  const std::vector<int32_t>& owners() const { return owners_; }  // By item; -1: none yet.
  // By server, units at the refresh of the set.
  const std::vector<double>& set_loads(int32_t set) const { return set_loads_[set]; }
  // Sum over the steps of the cycle of the time of the slowest server, in units at speed 1.
  double CycleTime() const;
  // The same if every step's work were perfectly level.
  double LevelTime() const;

 private:
  const PlacementProblem* problem_;
  std::vector<int32_t> owners_;
  std::vector<std::vector<double>> set_loads_;
  std::vector<double> totals_;
  std::vector<MemoryTally> tallies_;
};

}  // namespace stiefel

#endif  // STIEFEL_PLAN_ASSIGNMENT_H_
