#include "plan/explain.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "common/checked_math.h"
#include "plan/cost.h"
#include "plan/placement_problem.h"
#include "plan/step_timeline.h"

namespace stiefel {
namespace {

double Seconds(const Cost& cost, double flops_per_second, double bytes_per_second) {
  return cost.flops / flops_per_second + cost.bytes / bytes_per_second;
}

double Elements(const PlanMatrix& matrix) {
  return static_cast<double>(matrix.rows) * static_cast<double>(matrix.cols);
}

double PayloadBytes(const PlanMatrix& matrix) {
  return Elements(matrix) * static_cast<double>(DTypeSize(matrix.pull_dtype));
}

// What a shard costs at each kind of step, on its server.
struct ShardLoad {
  Cost refresh, off;
  int32_t server = 0;
  bool orthogonalises = false;
  double speed = 1;
  double push_bytes = 0, pull_bytes = 0;
  double ready_seconds = 0;
  int64_t period = 1, phase = 0;

  bool RefreshesAt(int64_t residue) const { return residue % period == phase; }
  const Cost& At(int64_t residue) const { return RefreshesAt(residue) ? refresh : off; }
  double ComputeSeconds(const Machine& machine, int64_t residue) const {
    return Seconds(At(residue), machine.flops_per_second, machine.memory_bytes_per_second) / speed;
  }
  double ExchangeSeconds(const Machine& machine, int64_t residue) const {
    return At(residue).peer_bytes / machine.network_bytes_per_second +
           2 * machine.latency_seconds * At(residue).collectives;
  }
};

// Backward passes give the last matrix first.
std::vector<double> ReadyTimes(const PlanRequest& request, const Machine& machine) {
  double total = 0, after = 0;
  for (const PlanMatrix& matrix : request.matrices) total += Elements(matrix);
  std::vector<double> ready(request.matrices.size());
  for (size_t i = request.matrices.size(); i-- > 0;) {
    after += Elements(request.matrices[i]);
    ready[i] = machine.backward_seconds * after / total;
  }
  return ready;
}

class Loads {
 public:
  Loads(const PlanRequest& request, const Plan& plan, const Machine& machine)
      : request_(request), machine_(machine), cycle_(CycleSteps(request.matrices)) {
    explanation_.servers.resize(request.servers.size());
    for (ServerLoad& server : explanation_.servers) {
      for (auto* by_step : {&server.flops, &server.compute_seconds, &server.refresh_seconds,
                            &server.exchange_seconds}) {
        by_step->assign(cycle_, 0);
      }
    }
    AddShards(plan);
    for (int64_t r = 0; r < cycle_; ++r) explanation_.cycle.push_back(LoadStep(r));
    Sum();
  }

  Explanation Take() { return std::move(explanation_); }

 private:
  void AddShards(const Plan& plan) {
    const std::vector<double> ready = ReadyTimes(request_, machine_);
    std::vector<MemoryTally> tallies(request_.servers.size(), MemoryTally(request_.memory));
    size_t index = 0;
    for (const PlanShard& shard : ShardsOfPlan(request_.matrices, plan.cuts)) {
      const auto count = static_cast<int64_t>(plan.cuts[shard.matrix].size()) + 1;
      const PlanMatrix matrix = ShardOfMatrix(request_.matrices[shard.matrix], shard.rect, count);
      ShardLoad load;
      load.server = plan.owners[index++];
      load.speed = request_.servers[load.server].speed;
      load.refresh = StepCost(matrix, StepKind::kRefresh);
      load.off = StepCost(matrix, StepKind::kOffRefresh);
      load.orthogonalises =
          matrix.rule.family == RuleFamily::kSpectral || matrix.rule.family == RuleFamily::kPolora;
      load.push_bytes = Elements(matrix) * static_cast<double>(request_.push_copies) *
                        static_cast<double>(DTypeSize(matrix.push_dtype));
      load.pull_bytes = PayloadBytes(matrix) * machine_.PullCopies();
      load.ready_seconds = ready[shard.matrix];
      load.period = matrix.rule.period;
      load.phase = plan.phases[shard.matrix];
      Add(load, &explanation_.servers[load.server]);
      explanation_.servers[load.server].elements += matrix.rows * matrix.cols;
      tallies[load.server].Add(*BytesOfMatrix(
          matrix, matrix.rows * matrix.cols * request_.push_copies, request_.memory));
      explanation_.cut_matrices += count > 1 && shard.shard == 0 ? 1 : 0;
      shards_.push_back(load);
    }
    for (size_t s = 0; s < tallies.size(); ++s) {
      explanation_.servers[s].bytes = tallies[s].Parts();
      explanation_.servers[s].stream_bytes = tallies[s].StreamBytes();
      explanation_.servers[s].total_bytes = tallies[s].Total();
    }
  }

  void Add(const ShardLoad& load, ServerLoad* server) const {
    ++server->shards;
    server->push_bytes_per_step += load.push_bytes;
    server->pull_bytes_per_step += load.pull_bytes;
    for (int64_t r = 0; r < cycle_; ++r) {
      const double compute = load.ComputeSeconds(machine_, r);
      server->flops[r] += load.At(r).flops;
      server->compute_seconds[r] += compute;
      server->exchange_seconds[r] += load.ExchangeSeconds(machine_, r);
      server->peer_bytes_per_step += load.At(r).peer_bytes / static_cast<double>(cycle_);
      if (load.orthogonalises && load.RefreshesAt(r)) server->refresh_seconds[r] += compute;
    }
  }

  StepLoad LoadStep(int64_t residue) const {
    StepLoad step;
    double sum = 0, slowest = 0;
    const double trainer_wire = TrainerBytes() / machine_.network_bytes_per_second;
    for (const ServerLoad& server : explanation_.servers) {
      const double compute = server.compute_seconds[residue];
      const double wire =
          std::max(trainer_wire, (server.push_bytes_per_step + server.pull_bytes_per_step) /
                                     machine_.network_bytes_per_second);
      step.flops += server.flops[residue];
      step.compute_seconds = std::max(step.compute_seconds, compute);
      slowest = std::max(slowest, compute + server.exchange_seconds[residue] + wire);
      sum += compute;
    }
    if (sum > 0) {
      step.balance = step.compute_seconds * static_cast<double>(explanation_.servers.size()) / sum;
    }
    step.exposed_seconds = std::max(0.0, slowest - machine_.backward_seconds);
    step.overlapped_seconds = Overlapped(residue);
    return step;
  }

  // That one trainer pushes and pulls in a step, over all servers.
  double TrainerBytes() const {
    double bytes = 0;
    for (const ServerLoad& server : explanation_.servers) {
      bytes += server.push_bytes_per_step + server.pull_bytes_per_step;
    }
    return bytes / static_cast<double>(machine_.trainers);
  }

  double Overlapped(int64_t residue) const {
    std::vector<TimelineMatrix> shards;
    shards.reserve(shards_.size());
    for (const ShardLoad& load : shards_) {
      shards.push_back(
          {load.ready_seconds, load.push_bytes,
           load.ComputeSeconds(machine_, residue) + load.ExchangeSeconds(machine_, residue),
           load.pull_bytes, load.server});
    }
    // All trainers' links, or all servers', whichever carry less, as one pipe.
    const int64_t links =
        std::min(machine_.trainers, static_cast<int64_t>(request_.servers.size()));
    const double rate = machine_.network_bytes_per_second * static_cast<double>(links);
    return SimulateStep(shards, {rate, rate, machine_.latency_seconds}, /*lanes=*/1).exposed_s;
  }

  // Over servers and steps.
  void Sum() {
    const auto cycle = static_cast<double>(cycle_);
    const auto servers = static_cast<double>(explanation_.servers.size());
    double refresh = 0;
    for (const ServerLoad& server : explanation_.servers) {
      explanation_.elements = SaturatingAdd(explanation_.elements, server.elements);
      explanation_.push_bytes_per_step += server.push_bytes_per_step;
      explanation_.pull_bytes_per_step += server.pull_bytes_per_step;
      explanation_.peer_bytes_per_step += server.peer_bytes_per_step;
      explanation_.total_bytes = SaturatingAdd(explanation_.total_bytes, server.total_bytes);
      explanation_.busiest_link_bytes =
          std::max(explanation_.busiest_link_bytes, LinkBytes(server));
      for (const double seconds : server.refresh_seconds) refresh += seconds / cycle / servers;
    }
    explanation_.shards = static_cast<int64_t>(shards_.size());
    double bytes = 0;
    for (const ServerLoad& server : explanation_.servers) bytes += LinkBytes(server);
    if (bytes > 0) explanation_.link_balance = explanation_.busiest_link_bytes * servers / bytes;
    for (int64_t r = 0; r < cycle_; ++r) {
      StepLoad& step = explanation_.cycle[r];
      for (const ServerLoad& server : explanation_.servers) {
        if (refresh == 0) break;
        step.refresh_balance = std::max(step.refresh_balance, server.refresh_seconds[r] / refresh);
      }
      explanation_.balance = std::max(explanation_.balance, step.balance);
      explanation_.exposed_seconds += step.exposed_seconds / cycle;
      explanation_.overlapped_seconds += step.overlapped_seconds / cycle;
    }
  }

  // An owner receives from others what it sends them.
  static double LinkBytes(const ServerLoad& server) {
    return server.push_bytes_per_step + server.pull_bytes_per_step + 2 * server.peer_bytes_per_step;
  }

  const PlanRequest& request_;
  const Machine& machine_;
  const int64_t cycle_;
  std::vector<ShardLoad> shards_;
  Explanation explanation_;
};

// Whether so many servers of speed 1 hide all work.
class ServerCounts {
 public:
  ServerCounts(const PlanRequest& request, const ModelCosts& costs, const Machine& machine)
      : trial_(request), costs_(costs), machine_(machine) {}

  bool Hide(int64_t servers) {
    trial_.servers.assign(servers, ServerSpec());
    const absl::StatusOr<Plan> plan = MakePlanWith(trial_, costs_);
    if (!plan.ok()) return false;
    const Explanation loads = LoadsOfPlan(trial_, *plan, machine_);
    return std::all_of(loads.cycle.begin(), loads.cycle.end(),
                       [](const StepLoad& step) { return step.exposed_seconds == 0; });
  }

 private:
  PlanRequest trial_;
  const ModelCosts& costs_;
  const Machine& machine_;
};

// Servers between which the work of the dearest step, perfectly level, would just be hidden.
double LeastServers(const PlanRequest& request, const ModelCosts& costs, const Machine& machine) {
  const int64_t cycle = CycleSteps(request.matrices);
  std::vector<double> seconds(cycle, 0);
  for (size_t i = 0; i < request.matrices.size(); ++i) {
    const PlanMatrix& matrix = request.matrices[i];
    const double wire = Elements(matrix) * static_cast<double>(request.push_copies) *
                            static_cast<double>(DTypeSize(matrix.push_dtype)) +
                        PayloadBytes(matrix) * machine.PullCopies();
    for (int64_t r = 0; r < cycle; ++r) {
      const Cost cost = StepCost(matrix, KindAtStep(matrix.rule, costs.phases[i], r + 1));
      seconds[r] += wire / machine.network_bytes_per_second +
                    Seconds(cost, machine.flops_per_second, machine.memory_bytes_per_second);
    }
  }
  const double most = seconds.empty() ? 0 : *std::max_element(seconds.begin(), seconds.end());
  return most == 0 ? 1 : std::ceil(most / machine.backward_seconds);
}

// Doubles until the work is hidden, then halves the interval: more servers never need longer, but
// for small irregularities of the levelling, which may make the answer one or two too large.
std::optional<int64_t> ServersToHide(const PlanRequest& request, const ModelCosts& costs,
                                     const Machine& machine) {
  // A shard's Gram form may be cheaper than the whole's standard form, so that a half is safe.
  const double least = 0.5 * LeastServers(request, costs, machine);
  if (!(least <= static_cast<double>(kMaxServersTried))) return std::nullopt;
  ServerCounts counts(request, costs, machine);
  int64_t enough = std::max<int64_t>(1, static_cast<int64_t>(least));
  int64_t too_few = enough - 1;
  while (!counts.Hide(enough)) {
    if (enough == kMaxServersTried) return std::nullopt;
    too_few = enough;
    enough = std::min(2 * enough, kMaxServersTried);
  }
  while (enough - too_few > 1) {
    const int64_t middle = too_few + (enough - too_few) / 2;
    (counts.Hide(middle) ? enough : too_few) = middle;
  }
  return enough;
}

}  // namespace

double ServerLoad::BytesPerParameter() const {
  return elements == 0 ? 0 : static_cast<double>(bytes.Resident()) / static_cast<double>(elements);
}

Explanation LoadsOfPlan(const PlanRequest& request, const Plan& plan, const Machine& machine) {
  return Loads(request, plan, machine).Take();
}

double SecondsOfModel(const PlanRequest& request, double flops_per_second,
                      double bytes_per_second) {
  double seconds = 0;
  for (const PlanMatrix& matrix : request.matrices) {
    const auto period = static_cast<double>(matrix.rule.period);
    seconds +=
        Seconds(StepCost(matrix, StepKind::kRefresh), flops_per_second, bytes_per_second) / period;
    seconds +=
        Seconds(StepCost(matrix, StepKind::kOffRefresh), flops_per_second, bytes_per_second) *
        (period - 1) / period;
  }
  return seconds;
}

Explanation ExplainPlan(const PlanRequest& request, const Plan& plan, const Machine& machine) {
  Explanation explanation = LoadsOfPlan(request, plan, machine);
  double payload = 0;
  for (size_t i = 0; i < request.matrices.size(); ++i) {
    const double seconds = Seconds(StepCost(request.matrices[i], StepKind::kRefresh),
                                   machine.flops_per_second, machine.memory_bytes_per_second);
    if (explanation.largest_matrix < 0 || seconds > explanation.largest_matrix_seconds) {
      explanation.largest_matrix = static_cast<int32_t>(i);
      explanation.largest_matrix_seconds = seconds;
    }
    payload += PayloadBytes(request.matrices[i]);
  }
  const absl::StatusOr<ModelCosts> costs = CostsOfModel(request);
  if (costs.ok()) explanation.servers_to_hide = ServersToHide(request, *costs, machine);
  explanation.trainer_seconds = SecondsOfModel(request, machine.trainer_flops_per_second,
                                               machine.trainer_memory_bytes_per_second);
  const auto trainers = static_cast<double>(machine.trainers);
  explanation.trainer_sharded_seconds =
      explanation.trainer_seconds / trainers +
      (trainers - 1) / trainers * payload / machine.network_bytes_per_second;
  return explanation;
}

}  // namespace stiefel
