#include "cli/plan_command.h"

#include <algorithm>
#include <cstdio>
#include <memory>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "cli/plan_report.h"
#include "common/status.h"
#include "plan/model.h"
#include "plan/nearest.h"
#include "plan/simulate.h"

namespace stiefel {
namespace {

constexpr int64_t kMaxServers = 100000;
constexpr int64_t kMaxSimulated = 4096;

absl::Status Check(const PlanCommandOptions& options) {
  if (options.servers < 1 || options.servers > kMaxServers) {
    return absl::InvalidArgumentError(
        absl::StrCat("--servers=", options.servers, " is outside 1..", kMaxServers));
  }
  if (!options.speeds.empty() && static_cast<int64_t>(options.speeds.size()) != options.servers) {
    return absl::InvalidArgumentError(absl::StrCat("--speeds gives ", options.speeds.size(),
                                                   " values for ", options.servers, " servers"));
  }
  if (options.memory_bytes.size() > 1 &&
      static_cast<int64_t>(options.memory_bytes.size()) != options.servers) {
    return absl::InvalidArgumentError(absl::StrCat("--memory gives ", options.memory_bytes.size(),
                                                   " values for ", options.servers, " servers"));
  }
  if (options.machine.pull_copies > options.machine.trainers) {
    return absl::InvalidArgumentError(absl::StrCat("--pull-copies=", options.machine.pull_copies,
                                                   " with ", options.machine.trainers,
                                                   " trainers"));
  }
  for (const int64_t count : options.simulate) {
    if (count >= 1 && count <= kMaxSimulated) continue;
    return absl::InvalidArgumentError(
        absl::StrCat("--simulate=", count, " is outside 1..", kMaxSimulated));
  }
  return absl::OkStatus();
}

// "key=value" in two.
absl::StatusOr<std::pair<std::string, std::string>> Assignment(const char* flag,
                                                               const std::string& text) {
  const size_t equals = text.rfind('=');
  if (equals == std::string::npos || equals == 0) {
    return absl::InvalidArgumentError(
        absl::StrCat(flag, " ", text, " is not of the form key=value"));
  }
  return std::make_pair(text.substr(0, equals), text.substr(equals + 1));
}

absl::StatusOr<ModelOverrides> Overrides(const PlanCommandOptions& options) {
  ModelOverrides overrides;
  overrides.preset = options.preset;
  for (const std::string& text : options.set) {
    STIEFEL_ASSIGN_OR_RETURN(overrides.options.emplace_back(), Assignment("--set", text));
  }
  return overrides;
}

// By matrix, as PlanRequest takes them.
absl::StatusOr<std::vector<int64_t>> ForcedShards(const PlanCommandOptions& options,
                                                  const std::vector<PlanMatrix>& matrices) {
  std::vector<int64_t> forced(options.shards.empty() ? 0 : matrices.size(), 0);
  for (const std::string& text : options.shards) {
    STIEFEL_ASSIGN_OR_RETURN(const auto assignment, Assignment("--shards", text));
    const auto matrix = std::find_if(matrices.begin(), matrices.end(), [&](const PlanMatrix& m) {
      return m.name == assignment.first;
    });
    int64_t number = 0;
    if (matrix == matrices.end() || !absl::SimpleAtoi(assignment.second, &number) || number < 1) {
      return absl::InvalidArgumentError(absl::StrCat(
          "--shards ", text, ": ", matrix == matrices.end() ? "no matrix of this name" : "",
          matrix == matrices.end() ? "" : "not a positive number"));
    }
    forced[matrix - matrices.begin()] = number;
  }
  return forced;
}

// Servers would not open such a run.
absl::Status CheckMode(const PlanCommandOptions& options, const std::vector<PlanMatrix>& matrices) {
  for (const PlanMatrix& matrix : matrices) {
    if (options.weights_mode || !NeedsWeights(matrix.rule)) continue;
    return absl::InvalidArgumentError(absl::StrCat(
        PrintableName(matrix.name), ": ", matrix.rule.preset,
        " reads the weights, which servers hold in update mode WEIGHTS only; give --weights"));
  }
  return absl::OkStatus();
}

absl::StatusOr<PlanRequest> Request(const PlanCommandOptions& options, const ModelSpec& model) {
  PlanRequest request;
  request.matrices = Matrices(model);
  STIEFEL_RETURN_IF_ERROR(CheckMode(options, request.matrices));
  STIEFEL_ASSIGN_OR_RETURN(request.forced_shards, ForcedShards(options, request.matrices));
  request.push_copies = options.push_copies;
  STIEFEL_ASSIGN_OR_RETURN(request.memory.staging, ParseStaging(options.staging));
  request.memory.weights_mode = options.weights_mode;
  request.memory.matrices_in_flight = options.matrices_in_flight;
  request.memory.ranks = options.machine.trainers;
  request.memory.window_bytes = static_cast<int64_t>(options.window_bytes);
  for (int64_t s = 0; s < options.servers; ++s) {
    ServerSpec server;
    if (!options.speeds.empty()) server.speed = options.speeds[s];
    if (!options.memory_bytes.empty()) {
      const uint64_t bytes = options.memory_bytes[options.memory_bytes.size() > 1 ? s : 0];
      if (bytes != 0) server.memory_bytes = static_cast<int64_t>(bytes);
    }
    request.servers.push_back(server);
  }
  return request;
}

void AddModelOptions(CLI::App* command, PlanCommandOptions* options) {
  command
      ->add_option(
          "model", options->model_path,
          "JSON file of names, shapes and rules: {\"parameters\": [...]} (docs/planner.md)")
      ->required();
  command->add_option("--preset", options->preset,
                      "rule of the parameters that name none, instead of the model's default");
  command->add_option("--set", options->set, "key=value: an option of that rule; may be repeated")
      ->take_all();
  command
      ->add_option("--shards", options->shards,
                   "matrix=number: cut it into so many shards; 1: never; may be repeated")
      ->take_all();
  command
      ->add_option("--simulate", options->simulate,
                   "numbers of machines, 1,8,64: what they would give, and other ways beside")
      ->delimiter(',');
  command->add_flag("--json", options->json, "one JSON object instead of tables");
}

void AddServerOptions(CLI::App* command, PlanCommandOptions* options) {
  command->add_option("--servers", options->servers, "number of servers")->capture_default_str();
  command->add_option("--speeds", options->speeds, "relative speed of each server")->delimiter(',');
  command
      ->add_option("--memory", options->memory_bytes,
                   "memory of each server, e.g. 64g, or one for each, 64g,64g,32g")
      ->delimiter(',')
      ->transform(CLI::AsSizeValue(/*kb_is_1000=*/false));
  command->add_option("--staging", options->staging, "double or lazy")->capture_default_str();
  command->add_flag("--weights", options->weights_mode,
                    "WEIGHTS mode: the server keeps fp32 weights");
  command->add_option("--in-flight", options->matrices_in_flight, "matrices computed at once")
      ->check(CLI::Range(0, 1 << 20))
      ->capture_default_str();
}

void AddTrainerOptions(CLI::App* command, PlanCommandOptions* options) {
  command->add_option("--trainers", options->machine.trainers, "number of trainers")
      ->check(CLI::Range(1, 1 << 20))
      ->capture_default_str();
  command->add_option("--copies", options->push_copies, "how many trainers push each element")
      ->check(CLI::Range(1, 1 << 20))
      ->capture_default_str();
  command
      ->add_option("--pull-copies", options->machine.pull_copies,
                   "how many trainers pull each element; 0: all")
      ->check(CLI::Range(0, 1 << 20))
      ->capture_default_str();
  command
      ->add_option("--window", options->window_bytes,
                   "credit window of each trainer at a server (its --credit-window), e.g. 32m")
      ->transform(CLI::AsSizeValue(/*kb_is_1000=*/false))
      ->check(CLI::Range(uint64_t{0}, uint64_t{1} << 32))
      ->capture_default_str();
}

void AddMachineOptions(CLI::App* command, Machine* machine) {
  const auto positive = CLI::Range(1e-6, 1e30);
  command->add_option("--flops", machine->flops_per_second, "operations/s of a server")
      ->check(positive)
      ->capture_default_str();
  command->add_option("--memory-rate", machine->memory_bytes_per_second, "its memory, bytes/s")
      ->check(positive)
      ->capture_default_str();
  command
      ->add_option("--network-rate", machine->network_bytes_per_second,
                   "network of a server and of a trainer, bytes/s each way")
      ->check(positive)
      ->capture_default_str();
  command->add_option("--latency", machine->latency_seconds, "seconds of a message, one way")
      ->check(CLI::Range(0.0, 1e3))
      ->capture_default_str();
  command
      ->add_option("--trainer-flops", machine->trainer_flops_per_second,
                   "operations/s of a trainer")
      ->check(positive)
      ->capture_default_str();
  command
      ->add_option("--trainer-memory-rate", machine->trainer_memory_bytes_per_second,
                   "its memory, bytes/s")
      ->check(positive)
      ->capture_default_str();
  command->add_option("--backward", machine->backward_seconds, "seconds of a backward pass")
      ->check(CLI::Range(0.0, 1e9))
      ->capture_default_str();
}

}  // namespace

absl::StatusOr<std::string> PlanReport(const PlanCommandOptions& options) {
  STIEFEL_RETURN_IF_ERROR(Check(options));
  STIEFEL_ASSIGN_OR_RETURN(const ModelOverrides overrides, Overrides(options));
  STIEFEL_ASSIGN_OR_RETURN(const ModelSpec model, ReadModel(options.model_path, overrides));
  STIEFEL_ASSIGN_OR_RETURN(const PlanRequest request, Request(options, model));
  STIEFEL_ASSIGN_OR_RETURN(const Plan plan, MakePlan(request));
  const Explanation explanation = ExplainPlan(request, plan, options.machine);
  STIEFEL_ASSIGN_OR_RETURN(const std::vector<SimulatedCount> simulated,
                           Simulate(request, options.machine, options.simulate));
  const std::string name = model.name.empty() ? options.model_path : model.name;
  return options.json ? PlanJson(name, request, plan, options.machine, explanation, simulated)
                      : PlanText(name, request, options.machine, explanation, simulated);
}

void AddPlanCommand(CLI::App* app, absl::Status* result) {
  CLI::App* command =
      app->add_subcommand("plan", "who would own what, what it costs, whether it pays");
  auto options = std::make_shared<PlanCommandOptions>();
  AddModelOptions(command, options.get());
  AddServerOptions(command, options.get());
  AddTrainerOptions(command, options.get());
  AddMachineOptions(command, &options->machine);
  command->callback([options, result] {
    const absl::StatusOr<std::string> report = PlanReport(*options);
    *result = report.status();
    if (report.ok()) std::fputs(report->c_str(), stdout);
  });
}

}  // namespace stiefel
