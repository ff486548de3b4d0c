#ifndef STIEFEL_CLI_STATUS_COMMAND_H_
#define STIEFEL_CLI_STATUS_COMMAND_H_

#include <CLI/CLI.hpp>
#include <functional>
#include <string>
#include <vector>

#include "absl/status/status.h"

namespace stiefel {

// What `stiefelctl status` was asked.
struct StatusCommandOptions {
  std::vector<std::string> servers;  // host:port
  bool watch = false;
  bool json = false;
  bool state_hash = false;        // not with watch: it reads all of the state
  double timeout_seconds = 5;     // for a server to answer
  double interval_seconds = 0.5;  // watch: at most one report in so long
};

// Writes a report of all servers, or with `watch` one after every change, until a server ends its
// stream. UNAVAILABLE names the servers that did not answer; what the others said is written first.
// INVALID_ARGUMENT: no servers, options that contradict each other or are out of range. `write` is
// called on this thread.
absl::Status RunStatusCommand(const StatusCommandOptions& options,
                              const std::function<void(const std::string&)>& write);

// Adds the sub-command. When it is chosen it writes to standard output and sets *result.
// REQUIRES: `result` outlives the parsing of `app`.
void AddStatusCommand(CLI::App* app, absl::Status* result);

}  // namespace stiefel

#endif  // STIEFEL_CLI_STATUS_COMMAND_H_
