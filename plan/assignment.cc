#include "plan/assignment.h"

#include <algorithm>
#include <tuple>

namespace stiefel {

Assignment::Assignment(const PlacementProblem& problem)
    : problem_(&problem),
      owners_(problem.item_count(), -1),
      set_loads_(problem.sets.size(), std::vector<double>(problem.server_count(), 0)),
      totals_(problem.server_count(), 0),
      tallies_(problem.server_count(), MemoryTally(problem.request.memory)) {}

void Assignment::Give(int32_t item, int32_t server) {
  const StepUnits& units = problem_->units[item];
  owners_[item] = server;
  set_loads_[problem_->set_of[item]][server] += units.refresh;
  totals_[server] += units.refresh + units.off;
  tallies_[server].Add(problem_->bytes[item]);
}

void Assignment::Take(int32_t item) {
  const StepUnits& units = problem_->units[item];
  const int32_t server = owners_[item];
  owners_[item] = -1;
  set_loads_[problem_->set_of[item]][server] -= units.refresh;
  totals_[server] -= units.refresh + units.off;
  tallies_[server].Remove(problem_->bytes[item]);
}

int32_t Assignment::Soonest(int32_t item) const {
  const std::vector<double>& loads = set_loads_[problem_->set_of[item]];
  const double units = problem_->units[item].refresh;
  int32_t best = -1;
  std::tuple<double, double, int64_t> best_key;
  for (int32_t server = 0; server < problem_->server_count(); ++server) {
    const double speed = problem_->servers()[server].speed;
    const std::tuple<double, double, int64_t> key(
        (loads[server] + units) / speed, totals_[server] / speed, tallies_[server].Resident());
    if ((best < 0 || key < best_key) && Fits(item, server)) {
      best = server;
      best_key = key;
    }
  }
  return best;
}

int32_t Assignment::Roomiest(int32_t item) const {
  int32_t best = -1;
  for (int32_t server = 0; server < problem_->server_count(); ++server) {
    if ((best < 0 || FreeBytes(server) > FreeBytes(best)) && Fits(item, server)) best = server;
  }
  return best;
}

int32_t Assignment::MostRoom() const {
  int32_t roomiest = 0;
  for (int32_t s = 1; s < problem_->server_count(); ++s) {
    if (FreeBytes(s) > FreeBytes(roomiest)) roomiest = s;
  }
  return roomiest;
}

double Assignment::CycleTime() const {
  std::vector<std::vector<double>> loads(problem_->cycle(),
                                         std::vector<double>(problem_->server_count(), 0));
  for (int32_t item = 0; item < problem_->item_count(); ++item) {
    for (int64_t r = 0; r < problem_->cycle(); ++r) {
      loads[r][owners_[item]] += problem_->CostAt(item, r);
    }
  }
  double time = 0;
  for (const std::vector<double>& step : loads) {
    double slowest = 0;
    for (int32_t server = 0; server < problem_->server_count(); ++server) {
      slowest = std::max(slowest, step[server] / problem_->servers()[server].speed);
    }
    time += slowest;
  }
  return time;
}

double Assignment::LevelTime() const {
  double work = 0, speed = 0;
  for (int32_t item = 0; item < problem_->item_count(); ++item) {
    for (int64_t r = 0; r < problem_->cycle(); ++r) work += problem_->CostAt(item, r);
  }
  for (const ServerSpec& server : problem_->servers()) speed += server.speed;
  return work / speed;
}

}  // namespace stiefel
