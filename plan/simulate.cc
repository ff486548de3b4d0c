#include "plan/simulate.h"

#include <algorithm>

#include "common/status.h"
#include "plan/cost.h"
#include "plan/placement_problem.h"

namespace stiefel {
namespace {

WayTimes OfServers(const Explanation& loads) {
  WayTimes way;
  for (const StepLoad& step : loads.cycle) {
    way.compute_seconds += step.compute_seconds / static_cast<double>(loads.cycle.size());
  }
  way.balance = loads.balance;
  way.link_bytes = loads.busiest_link_bytes;
  way.exposed_seconds = loads.exposed_seconds;
  return way;
}

Plan RoundRobin(const PlanRequest& request, const ModelCosts& costs) {
  Plan plan;
  plan.phases = costs.phases;
  plan.cuts.resize(request.matrices.size());
  for (size_t i = 0; i < request.matrices.size(); ++i) {
    plan.owners.push_back(static_cast<int32_t>(i % request.servers.size()));
  }
  return plan;
}

// Bytes of the gradients that are orthogonalised in a step, mean over the cycle: of all matrices,
// and by owner where there are owners.
double RefreshedBytes(const PlanMatrix& matrix) {
  if (matrix.rule.family != RuleFamily::kSpectral && matrix.rule.family != RuleFamily::kPolora) {
    return 0;
  }
  return static_cast<double>(matrix.rows) * static_cast<double>(matrix.cols) *
         static_cast<double>(DTypeSize(matrix.push_dtype)) /
         static_cast<double>(matrix.rule.period);
}

WayTimes AllGather(const PlanRequest& request, const Machine& machine, double ranks) {
  WayTimes way;
  way.compute_seconds = SecondsOfModel(request, machine.trainer_flops_per_second,
                                       machine.trainer_memory_bytes_per_second);
  double gathered = 0;
  for (const PlanMatrix& matrix : request.matrices) gathered += RefreshedBytes(matrix);
  // A rank receives what it lacks, and sends its part of everything to all others.
  const double received = (ranks - 1) / ranks * gathered;
  way.link_bytes = 2 * received;
  way.exposed_seconds = way.compute_seconds + received / machine.network_bytes_per_second;
  return way;
}

// `loads` are those of the owners, at the trainers' speed.
WayTimes Owners(const PlanRequest& request, const Plan& plan, const Explanation& loads,
                const Machine& machine, double ranks) {
  WayTimes way = OfServers(loads);
  std::vector<double> owned(request.servers.size(), 0);
  double all = 0;
  for (size_t i = 0; i < request.matrices.size(); ++i) {
    owned[plan.owners[i]] += RefreshedBytes(request.matrices[i]);
    all += RefreshedBytes(request.matrices[i]);
  }
  // Received: the other ranks' parts of the gradients that it owns, and its part of the updates
  // that others own; sent: as much of the other kind.
  const double most = *std::max_element(owned.begin(), owned.end());
  const double received = (ranks - 1) / ranks * most + (all - most) / ranks;
  way.link_bytes = 2 * received;
  way.exposed_seconds = way.compute_seconds + received / machine.network_bytes_per_second;
  return way;
}

}  // namespace

absl::StatusOr<std::vector<SimulatedCount>> Simulate(const PlanRequest& asked,
                                                     const Machine& machine,
                                                     const std::vector<int64_t>& counts) {
  PlanRequest request = asked;
  PlanRequest uncut = asked;
  uncut.forced_shards.assign(asked.matrices.size(), 1);
  Machine trainer = machine;
  trainer.flops_per_second = machine.trainer_flops_per_second;
  trainer.memory_bytes_per_second = machine.trainer_memory_bytes_per_second;
  STIEFEL_ASSIGN_OR_RETURN(const ModelCosts costs, CostsOfModel(request));
  std::vector<SimulatedCount> simulated;
  for (const int64_t count : counts) {
    request.servers.assign(count, ServerSpec());
    uncut.servers = request.servers;
    SimulatedCount result;
    result.machines = count;
    STIEFEL_ASSIGN_OR_RETURN(const Plan plan, MakePlanWith(request, costs));
    const Explanation loads = LoadsOfPlan(request, plan, machine);
    result.cut_matrices = loads.cut_matrices;
    result.overlapped_seconds = loads.overlapped_seconds;
    result.planned = OfServers(loads);
    result.round_robin = OfServers(LoadsOfPlan(request, RoundRobin(request, costs), machine));
    const auto ranks = static_cast<double>(count);
    result.all_gather = AllGather(request, machine, ranks);
    STIEFEL_ASSIGN_OR_RETURN(const Plan whole, MakePlanWith(uncut, costs));
    result.owners = Owners(request, whole, LoadsOfPlan(uncut, whole, trainer), trainer, ranks);
    simulated.push_back(result);
  }
  return simulated;
}

}  // namespace stiefel
