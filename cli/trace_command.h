#ifndef STIEFEL_CLI_TRACE_COMMAND_H_
#define STIEFEL_CLI_TRACE_COMMAND_H_

#include <string>
#include <vector>

#include "CLI/CLI.hpp"
#include "absl/status/status.h"
#include "absl/status/statusor.h"

// stiefelctl trace merge A B ... -o C: the traces of several processes (common/trace.h) in one
// file.

namespace stiefel {

// One trace of several, as text. Processes of one host share a clock; those of other hosts than the
// first trace's are moved onto its clock by the machines' times of day, whose disagreement stays
// in. Processes that have one pid get different ones. INVALID_ARGUMENT names the trace (by
// position, from 1) that is none of ours.
absl::StatusOr<std::string> MergeTraces(const std::vector<std::string>& traces);

// Adds the command; when it has run, `result` says how it went.
void AddTraceCommand(CLI::App* app, absl::Status* result);

}  // namespace stiefel

#endif  // STIEFEL_CLI_TRACE_COMMAND_H_
