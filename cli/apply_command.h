#ifndef STIEFEL_CLI_APPLY_COMMAND_H_
#define STIEFEL_CLI_APPLY_COMMAND_H_

#include <CLI/CLI.hpp>
#include <cstdint>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "cli/apply_rules.h"

namespace stiefel {

// What `stiefelctl apply` was asked.
struct ApplyCommandOptions {
  RuleArguments rules;
  std::string grads, out;        // paths
  std::string weights;           // path; empty: none
  std::string backend = "cpu";   // or reference
  std::optional<int64_t> steps;  // unset: as many as the gradients have
  int threads = 0;               // 0: one for each processor
  bool overwrite = false;
  bool explain = false;
  bool json = false;
};

// Runs the rules on the gradients, writes the output file (cli/apply_output.h) and returns the
// report as text: tables, or one JSON object. On an error nothing has been written. Errors of the
// files, of ListGradients and AssignRules; INVALID_ARGUMENT: options out of range, weights that are
// missing or of another shape, gradients, weights or updates that are not finite (how many, and
// where); ALREADY_EXISTS unless overwrite.
absl::StatusOr<std::string> ApplyReport(const ApplyCommandOptions& options);

// Adds the sub-command. When it is chosen it prints the report to standard output and sets *result.
// REQUIRES: `result` outlives the parsing of `app`.
void AddApplyCommand(CLI::App* app, absl::Status* result);

}  // namespace stiefel

#endif  // STIEFEL_CLI_APPLY_COMMAND_H_
