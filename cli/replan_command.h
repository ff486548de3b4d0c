#ifndef STIEFEL_CLI_REPLAN_COMMAND_H_
#define STIEFEL_CLI_REPLAN_COMMAND_H_

#include <CLI/CLI.hpp>
#include <functional>
#include <string>
#include <vector>

#include "absl/status/status.h"

namespace stiefel {

// What `stiefelctl replan` or `drain` was asked.
struct ReplanCommandOptions {
  std::string server;              // host:port of any server of the run
  std::string run;                 // its name; empty: the one that the server holds
  std::vector<std::string> add;    // servers to take in, as trainers reach them
  std::vector<std::string> drain;  // servers to empty, as the run names them
  bool drain_server = false;       // also `server` itself, whatever the run calls it
  double wait_seconds = 120;       // for the change; 0: it is only asked for
};

// Asks the run's leader, through one of its servers, and writes the placement in force afterwards.
// INVALID_ARGUMENT: nothing to do, or options out of range; NOT_FOUND: the server holds no such
// run; else what Optimizer.Replan answers, with the server's address.
absl::Status RunReplanCommand(const ReplanCommandOptions& options,
                              const std::function<void(const std::string&)>& write);

// Adds `replan` and `drain`. When one is chosen it writes to standard output and sets *result.
// REQUIRES: `result` outlives the parsing of `app`.
void AddReplanCommands(CLI::App* app, absl::Status* result);

}  // namespace stiefel

#endif  // STIEFEL_CLI_REPLAN_COMMAND_H_
