#include "plan/explain.h"

#include <algorithm>

#include "common/checked_math.h"
#include "plan/cost.h"

namespace stiefel {
namespace {

double Seconds(const Cost& cost, double flops_per_second, double bytes_per_second) {
  return cost.flops / flops_per_second + cost.bytes / bytes_per_second;
}

double Elements(const PlanMatrix& matrix) {
  return static_cast<double>(matrix.rows) * static_cast<double>(matrix.cols);
}

double PushBytes(const PlanRequest& request, const PlanMatrix& matrix) {
  return Elements(matrix) * static_cast<double>(request.push_copies) *
         static_cast<double>(DTypeSize(matrix.push_dtype));
}

double PayloadBytes(const PlanMatrix& matrix) {
  return Elements(matrix) * static_cast<double>(DTypeSize(matrix.pull_dtype));
}

std::vector<ServerLoad> LoadServers(const PlanRequest& request, const Plan& plan,
                                    const Machine& machine, int64_t cycle) {
  std::vector<ServerLoad> servers(request.servers.size());
  std::vector<MemoryTally> tallies(servers.size(), MemoryTally(request.memory));
  for (ServerLoad& server : servers) {
    server.flops.assign(cycle, 0);
    server.compute_seconds.assign(cycle, 0);
  }
  const std::vector<PlanShard> shards = ShardsOfPlan(request.matrices, plan.cuts);
  for (size_t i = 0; i < shards.size(); ++i) {
    const int32_t index = shards[i].matrix;
    const PlanMatrix matrix = ShardOfMatrix(request.matrices[index], shards[i].rect,
                                            static_cast<int64_t>(plan.cuts[index].size()) + 1);
    ServerLoad& server = servers[plan.owners[i]];
    const double speed = request.servers[plan.owners[i]].speed;
    const int64_t elements = matrix.rows * matrix.cols;
    ++server.shards;
    server.elements += elements;
    server.push_bytes_per_step += PushBytes(request, matrix);
    server.pull_bytes_per_step += PayloadBytes(matrix) * static_cast<double>(machine.trainers);
    tallies[plan.owners[i]].Add(
        *BytesOfMatrix(matrix, elements * request.push_copies, request.memory));
    for (int64_t r = 0; r < cycle; ++r) {
      const Cost cost = StepCost(matrix, KindAtStep(matrix.rule, plan.phases[index], r + 1));
      server.flops[r] += cost.flops;
      server.compute_seconds[r] +=
          Seconds(cost, machine.flops_per_second, machine.memory_bytes_per_second) / speed;
    }
  }
  for (size_t s = 0; s < servers.size(); ++s) {
    servers[s].bytes = tallies[s].Parts();
    servers[s].stream_bytes = tallies[s].StreamBytes();
    servers[s].total_bytes = tallies[s].Total();
  }
  return servers;
}

StepLoad LoadStep(const std::vector<ServerLoad>& servers, const Machine& machine, int64_t residue) {
  StepLoad step;
  double sum = 0, slowest = 0;
  for (const ServerLoad& server : servers) {
    const double compute = server.compute_seconds[residue];
    const double wire = (server.push_bytes_per_step + server.pull_bytes_per_step) /
                        machine.network_bytes_per_second;
    step.flops += server.flops[residue];
    step.compute_seconds = std::max(step.compute_seconds, compute);
    slowest = std::max(slowest, compute + wire);
    sum += compute;
  }
  if (sum > 0) step.balance = step.compute_seconds * static_cast<double>(servers.size()) / sum;
  step.exposed_seconds = std::max(0.0, slowest - machine.backward_seconds);
  return step;
}

bool HiddenBy(const PlanRequest& request, const Machine& machine, int64_t servers) {
  PlanRequest trial = request;
  trial.servers.assign(servers, ServerSpec());
  const absl::StatusOr<Plan> plan = MakePlan(trial);
  if (!plan.ok()) return false;
  const int64_t cycle = CycleSteps(request.matrices);
  const std::vector<ServerLoad> loads = LoadServers(trial, *plan, machine, cycle);
  for (int64_t r = 0; r < cycle; ++r) {
    if (LoadStep(loads, machine, r).exposed_seconds > 0) return false;
  }
  return true;
}

// Doubles until the work is hidden, then halves the interval: more servers never need longer, but
// for small irregularities of the levelling, which may make the answer one or two too large.
std::optional<int64_t> ServersToHide(const PlanRequest& request, const Machine& machine) {
  const auto useful = static_cast<int64_t>(std::max<size_t>(1, request.matrices.size()));
  const int64_t most = std::min(kMaxServersTried, useful);
  int64_t enough = 1;
  while (!HiddenBy(request, machine, enough)) {
    if (enough == most) return std::nullopt;
    enough = std::min(2 * enough, most);
  }
  int64_t too_few = enough / 2;
  while (enough - too_few > 1) {
    const int64_t middle = too_few + (enough - too_few) / 2;
    (HiddenBy(request, machine, middle) ? enough : too_few) = middle;
  }
  return enough;
}

void CompareWithTrainers(const PlanRequest& request, const Plan& plan, const Machine& machine,
                         Explanation* explanation) {
  const auto cycle = static_cast<double>(explanation->cycle.size());
  double payload = 0;
  for (size_t i = 0; i < request.matrices.size(); ++i) {
    const PlanMatrix& matrix = request.matrices[i];
    payload += PayloadBytes(matrix);
    for (size_t r = 0; r < explanation->cycle.size(); ++r) {
      const StepKind kind = KindAtStep(matrix.rule, plan.phases[i], static_cast<int64_t>(r) + 1);
      explanation->trainer_seconds +=
          Seconds(StepCost(matrix, kind), machine.trainer_flops_per_second,
                  machine.trainer_memory_bytes_per_second) /
          cycle;
    }
  }
  const auto trainers = static_cast<double>(machine.trainers);
  explanation->trainer_sharded_seconds =
      explanation->trainer_seconds / trainers +
      (trainers - 1) / trainers * payload / machine.network_bytes_per_second;
}

}  // namespace

double ServerLoad::BytesPerParameter() const {
  return elements == 0 ? 0 : static_cast<double>(bytes.Resident()) / static_cast<double>(elements);
}

Explanation ExplainPlan(const PlanRequest& request, const Plan& plan, const Machine& machine) {
  Explanation explanation;
  const int64_t cycle = CycleSteps(request.matrices);
  explanation.servers = LoadServers(request, plan, machine, cycle);
  for (int64_t r = 0; r < cycle; ++r) {
    explanation.cycle.push_back(LoadStep(explanation.servers, machine, r));
    explanation.balance = std::max(explanation.balance, explanation.cycle.back().balance);
    explanation.exposed_seconds +=
        explanation.cycle.back().exposed_seconds / static_cast<double>(cycle);
  }
  for (const ServerLoad& server : explanation.servers) {
    explanation.elements = SaturatingAdd(explanation.elements, server.elements);
    explanation.push_bytes_per_step += server.push_bytes_per_step;
    explanation.pull_bytes_per_step += server.pull_bytes_per_step;
    explanation.total_bytes = SaturatingAdd(explanation.total_bytes, server.total_bytes);
  }
  for (size_t i = 0; i < request.matrices.size(); ++i) {
    const double seconds = Seconds(StepCost(request.matrices[i], StepKind::kRefresh),
                                   machine.flops_per_second, machine.memory_bytes_per_second);
    if (explanation.largest_matrix < 0 || seconds > explanation.largest_matrix_seconds) {
      explanation.largest_matrix = static_cast<int32_t>(i);
      explanation.largest_matrix_seconds = seconds;
    }
  }
  explanation.servers_to_hide = ServersToHide(request, machine);
  CompareWithTrainers(request, plan, machine, &explanation);
  return explanation;
}

}  // namespace stiefel
