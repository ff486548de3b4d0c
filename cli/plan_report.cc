#include "cli/plan_report.h"

#include <algorithm>
#include <nlohmann/json.hpp>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "cli/table.h"

namespace stiefel {
namespace {

// Rows of a table beyond which the middle is left out.
constexpr size_t kMaxRows = 32;

std::string ServerTable(const Explanation& explanation) {
  Table table({"server", "shards", "parameters", "memory", "bytes/param", "push/step", "pull/step",
               "slowest step"});
  for (size_t s = 0; s < explanation.servers.size() && s < kMaxRows; ++s) {
    const ServerLoad& server = explanation.servers[s];
    table.AddRow({absl::StrCat(s), absl::StrCat(server.shards), Count(server.elements),
                  Bytes(static_cast<double>(server.total_bytes)),
                  absl::StrFormat("%.2f", server.BytesPerParameter()),
                  Bytes(server.push_bytes_per_step), Bytes(server.pull_bytes_per_step),
                  Duration(*std::max_element(server.compute_seconds.begin(),
                                             server.compute_seconds.end()))});
  }
  std::string text = table.Text();
  if (explanation.servers.size() > kMaxRows) {
    absl::StrAppend(&text, "... ", explanation.servers.size() - kMaxRows, " more servers\n");
  }
  return text;
}

std::string StepTable(const Explanation& explanation) {
  Table table({"step", "Gflop", "slowest server", "max/mean", "refresh max/mean", "exposed",
               "with overlap"});
  for (size_t r = 0; r < explanation.cycle.size() && r < kMaxRows; ++r) {
    const StepLoad& step = explanation.cycle[r];
    table.AddRow({absl::StrCat(r + 1), absl::StrFormat("%.4g", step.flops / 1e9),
                  Duration(step.compute_seconds), absl::StrFormat("%.3f", step.balance),
                  absl::StrFormat("%.3f", step.refresh_balance), Duration(step.exposed_seconds),
                  Duration(step.overlapped_seconds)});
  }
  std::string text = table.Text();
  if (explanation.cycle.size() > kMaxRows) {
    absl::StrAppend(&text, "... ", explanation.cycle.size() - kMaxRows, " more steps\n");
  }
  return text;
}

std::string MemoryLine(const Explanation& explanation) {
  MatrixBytes sum;
  int64_t streams = 0;
  for (const ServerLoad& server : explanation.servers) {
    sum.state += server.bytes.state;
    sum.staged += server.bytes.staged;
    sum.weights += server.bytes.weights;
    sum.push += server.bytes.push;
    sum.pull += server.bytes.pull;
    sum.workspace += server.bytes.workspace;
    sum.held += server.bytes.held;
    streams += server.stream_bytes;
  }
  const auto show = [](int64_t bytes) { return Bytes(static_cast<double>(bytes)); };
  return absl::StrCat("memory of all servers: state ", show(sum.state), ", staging ",
                      show(sum.staged), ", weights ", show(sum.weights), ", push ", show(sum.push),
                      ", payload ", show(sum.pull), ", workspace ", show(sum.workspace),
                      ", held by shards ", show(sum.held), ", streams ", show(streams), "\n");
}

std::string Verdict(const PlanRequest& request, const Machine& machine,
                    const Explanation& explanation) {
  std::string text;
  if (explanation.largest_matrix >= 0) {
    const PlanMatrix& largest = request.matrices[explanation.largest_matrix];
    absl::StrAppend(&text, "dearest matrix: ", largest.name, " (", largest.rows, " x ",
                    largest.cols, ", ", DescribeRule(largest.rule), "), a refresh takes ",
                    Duration(explanation.largest_matrix_seconds), "\n");
  }
  absl::StrAppend(&text, "exposed time per step: ", Duration(explanation.exposed_seconds),
                  " on average, behind a backward pass of ", Duration(machine.backward_seconds),
                  "; ", Duration(explanation.overlapped_seconds),
                  " after the last gradient where transfers and work overlap\n");
  absl::StrAppend(&text, "servers that hide all of it: ",
                  explanation.servers_to_hide.has_value()
                      ? absl::StrCat(*explanation.servers_to_hide)
                      : absl::StrCat("none up to ", kMaxServersTried),
                  "\n");
  absl::StrAppend(&text,
                  "the same rules inside each trainer: ", Duration(explanation.trainer_seconds),
                  " per step; shared out among all ", machine.trainers, ": ",
                  Duration(explanation.trainer_sharded_seconds), "\n");
  const double in_trainer =
      std::min(explanation.trainer_seconds, explanation.trainer_sharded_seconds);
  absl::StrAppend(&text,
                  explanation.exposed_seconds < in_trainer
                      ? "servers pay: they leave less time exposed than the trainers would need\n"
                      : "servers do not pay here: the trainers would be as fast alone\n");
  return text;
}

// Every constant that times depend on.
std::string Assumed(const Machine& machine) {
  return absl::StrFormat(
      "assumed: server %.4g flop/s and %.4g B/s of memory; trainer %.4g flop/s and %.4g B/s; "
      "network "
      "%.4g B/s each way, latency %s; backward %s\n",
      machine.flops_per_second, machine.memory_bytes_per_second, machine.trainer_flops_per_second,
      machine.trainer_memory_bytes_per_second, machine.network_bytes_per_second,
      Duration(machine.latency_seconds), Duration(machine.backward_seconds));
}

std::string SimulationText(const std::vector<SimulatedCount>& simulated) {
  if (simulated.empty()) return "";
  Table table({"machines", "max/mean", "cut", "link/step", "exposed", "with overlap",
               "in turn: max/mean", "exposed", "all-gather: link", "exposed", "owners: max/mean",
               "link", "exposed"});
  const auto ratio = [](double value) { return absl::StrFormat("%.3f", value); };
  for (const SimulatedCount& count : simulated) {
    table.AddRow({absl::StrCat(count.machines), ratio(count.planned.balance),
                  absl::StrCat(count.cut_matrices), Bytes(count.planned.link_bytes),
                  Duration(count.planned.exposed_seconds), Duration(count.overlapped_seconds),
                  ratio(count.round_robin.balance), Duration(count.round_robin.exposed_seconds),
                  Bytes(count.all_gather.link_bytes), Duration(count.all_gather.exposed_seconds),
                  ratio(count.owners.balance), Bytes(count.owners.link_bytes),
                  Duration(count.owners.exposed_seconds)});
  }
  return absl::StrCat(
      "\nas many servers as planned here; in turn (whole matrices, round robin); the same rules in "
      "as "
      "many trainers: all-gather (each does all of it), owners (one for each matrix)\n",
      table.Text());
}

nlohmann::json WayJson(const WayTimes& way) {
  return {{"compute_seconds", way.compute_seconds},
          {"balance", way.balance},
          {"link_bytes", way.link_bytes},
          {"exposed_seconds", way.exposed_seconds}};
}

nlohmann::json SimulationJson(const std::vector<SimulatedCount>& simulated) {
  nlohmann::json counts = nlohmann::json::array();
  for (const SimulatedCount& count : simulated) {
    counts.push_back({{"machines", count.machines},
                      {"cut_matrices", count.cut_matrices},
                      {"overlapped_seconds", count.overlapped_seconds},
                      {"planned", WayJson(count.planned)},
                      {"round_robin", WayJson(count.round_robin)},
                      {"all_gather", WayJson(count.all_gather)},
                      {"owners", WayJson(count.owners)}});
  }
  return counts;
}

nlohmann::json RefreshBalanceJson(const Explanation& explanation) {
  nlohmann::json phases = nlohmann::json::array();
  for (const StepLoad& step : explanation.cycle) phases.push_back(step.refresh_balance);
  return phases;
}

nlohmann::json ServersJson(const Explanation& explanation) {
  nlohmann::json servers = nlohmann::json::array();
  for (const ServerLoad& server : explanation.servers) {
    servers.push_back({{"shards", server.shards},
                       {"parameters", server.elements},
                       {"total_bytes", server.total_bytes},
                       {"state_bytes", server.bytes.state},
                       {"staged_bytes", server.bytes.staged},
                       {"weights_bytes", server.bytes.weights},
                       {"push_bytes", server.bytes.push},
                       {"payload_bytes", server.bytes.pull},
                       {"workspace_bytes", server.bytes.workspace},
                       {"held_bytes", server.bytes.held},
                       {"stream_bytes", server.stream_bytes},
                       {"bytes_per_parameter", server.BytesPerParameter()},
                       {"push_bytes_per_step", server.push_bytes_per_step},
                       {"pull_bytes_per_step", server.pull_bytes_per_step},
                       {"peer_bytes_per_step", server.peer_bytes_per_step},
                       {"flops", server.flops},
                       {"compute_seconds", server.compute_seconds},
                       {"refresh_seconds", server.refresh_seconds},
                       {"exchange_seconds", server.exchange_seconds}});
  }
  return servers;
}

nlohmann::json CycleJson(const Explanation& explanation) {
  nlohmann::json cycle = nlohmann::json::array();
  for (const StepLoad& step : explanation.cycle) {
    cycle.push_back({{"flops", step.flops},
                     {"compute_seconds", step.compute_seconds},
                     {"balance", step.balance},
                     {"refresh_balance", step.refresh_balance},
                     {"exposed_seconds", step.exposed_seconds},
                     {"overlapped_seconds", step.overlapped_seconds}});
  }
  return cycle;
}

nlohmann::json MatricesJson(const PlanRequest& request, const Plan& plan) {
  nlohmann::json matrices = nlohmann::json::array();
  for (size_t i = 0; i < request.matrices.size(); ++i) {
    const PlanMatrix& matrix = request.matrices[i];
    matrices.push_back({{"name", matrix.name},
                        {"rows", matrix.rows},
                        {"cols", matrix.cols},
                        {"rule", DescribeRule(matrix.rule)},
                        {"period", matrix.rule.period},
                        {"phase", plan.phases[i]}});
  }
  return matrices;
}

// In the order in which a run numbers them.
nlohmann::json ShardsJson(const PlanRequest& request, const Plan& plan) {
  nlohmann::json shards = nlohmann::json::array();
  for (const PlanShard& shard : ShardsOfPlan(request.matrices, plan.cuts)) {
    const Rect& rect = shard.rect;
    shards.push_back({{"matrix", request.matrices[shard.matrix].name},
                      {"shard", shard.shard},
                      {"rows", {rect.row_begin, rect.row_end}},
                      {"cols", {rect.col_begin, rect.col_end}},
                      {"owner", plan.owners[shards.size()]}});
  }
  return shards;
}

nlohmann::json MachineJson(const Machine& machine) {
  return {{"flops_per_second", machine.flops_per_second},
          {"memory_bytes_per_second", machine.memory_bytes_per_second},
          {"network_bytes_per_second", machine.network_bytes_per_second},
          {"latency_seconds", machine.latency_seconds},
          {"trainer_flops_per_second", machine.trainer_flops_per_second},
          {"trainer_memory_bytes_per_second", machine.trainer_memory_bytes_per_second},
          {"backward_seconds", machine.backward_seconds},
          {"trainers", machine.trainers},
          {"pull_copies", machine.PullCopies()}};
}

}  // namespace

std::string PlanText(const std::string& model, const PlanRequest& request, const Machine& machine,
                     const Explanation& explanation, const std::vector<SimulatedCount>& simulated) {
  return absl::StrCat(
      model, ": ", request.matrices.size(), " matrices, ", Count(explanation.elements),
      " parameters on ", request.servers.size(),
      " servers, staging=", StagingName(request.memory.staging), ", ", explanation.cut_matrices,
      " matrices cut, ", explanation.shards, " shards\n\n", ServerTable(explanation), "\n",
      StepTable(explanation), "\n", MemoryLine(explanation), "on the wire per step: push ",
      Bytes(explanation.push_bytes_per_step), ", pull ", Bytes(explanation.pull_bytes_per_step),
      ", between servers ", Bytes(explanation.peer_bytes_per_step),
      ", trainers: ", machine.trainers, "; busiest link ", Bytes(explanation.busiest_link_bytes),
      absl::StrFormat(" (%.3f of the mean)\n", explanation.link_balance),
      Verdict(request, machine, explanation), Assumed(machine), SimulationText(simulated));
}

std::string PlanJson(const std::string& model, const PlanRequest& request, const Plan& plan,
                     const Machine& machine, const Explanation& explanation,
                     const std::vector<SimulatedCount>& simulated) {
  nlohmann::json json = {{"model", model},
                         {"parameters", explanation.elements},
                         {"staging", std::string(StagingName(request.memory.staging))},
                         {"weights_mode", request.memory.weights_mode},
                         {"total_bytes", explanation.total_bytes},
                         {"push_bytes_per_step", explanation.push_bytes_per_step},
                         {"pull_bytes_per_step", explanation.pull_bytes_per_step},
                         {"peer_bytes_per_step", explanation.peer_bytes_per_step},
                         {"bytes_per_step", explanation.BytesPerStep()},
                         {"busiest_link_bytes", explanation.busiest_link_bytes},
                         {"link_balance", explanation.link_balance},
                         {"balance", explanation.balance},
                         {"refresh_balance_by_phase", RefreshBalanceJson(explanation)},
                         {"exposed_seconds", explanation.exposed_seconds},
                         {"overlapped_seconds", explanation.overlapped_seconds},
                         {"largest_matrix", nullptr},
                         {"largest_matrix_seconds", explanation.largest_matrix_seconds},
                         {"servers_to_hide", nullptr},
                         {"trainer_seconds", explanation.trainer_seconds},
                         {"trainer_sharded_seconds", explanation.trainer_sharded_seconds},
                         {"assumed", MachineJson(machine)},
                         {"servers", ServersJson(explanation)},
                         {"cycle", CycleJson(explanation)},
                         {"matrices", MatricesJson(request, plan)},
                         {"shards", ShardsJson(request, plan)}};
  if (!simulated.empty()) json["simulated"] = SimulationJson(simulated);
  if (explanation.largest_matrix >= 0) {
    json["largest_matrix"] = request.matrices[explanation.largest_matrix].name;
  }
  if (explanation.servers_to_hide.has_value()) {
    json["servers_to_hide"] = *explanation.servers_to_hide;
  }
  // Names may hold bytes that are not UTF-8; they are shown, not refused.
  return json.dump(2, ' ', false, nlohmann::json::error_handler_t::replace) + "\n";
}

}  // namespace stiefel
