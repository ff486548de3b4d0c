#ifndef STIEFEL_CLI_PLAN_COMMAND_H_
#define STIEFEL_CLI_PLAN_COMMAND_H_

#include <CLI/CLI.hpp>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "plan/explain.h"

namespace stiefel {

// What `stiefelctl plan` was asked. Sizes in bytes, times in seconds.
struct PlanCommandOptions {
  std::string model_path;
  int64_t servers = 1;
  std::vector<double> speeds;          // One for each server, or none: all 1.
  std::vector<uint64_t> memory_bytes;  // One for each server, or one for all; none or 0: no limit.
  std::string preset;                  // Instead of the model's default.
  std::vector<std::string> set;        // key=value, on top of it.
  std::vector<std::string> shards;     // matrix=number: into how many shards it is cut.
  std::string staging = "double";
  bool weights_mode = false;
  int64_t push_copies = 1;
  int64_t matrices_in_flight = 8;
  uint64_t window_bytes = uint64_t{32} << 20;
  Machine machine;
  std::vector<int64_t> simulate;  // Also what these numbers of machines would give.
  bool json = false;
};

// The whole answer as text: tables, or one JSON object. Errors of ReadModel and MakePlan;
// INVALID_ARGUMENT for options that contradict each other or are out of range.
absl::StatusOr<std::string> PlanReport(const PlanCommandOptions& options);

// Adds the sub-command. When it is chosen it prints the report to standard output and sets *result.
// REQUIRES: `result` outlives the parsing of `app`.
void AddPlanCommand(CLI::App* app, absl::Status* result);

}  // namespace stiefel

#endif  // STIEFEL_CLI_PLAN_COMMAND_H_
