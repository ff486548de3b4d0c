// stiefelctl: plans, watches and moves runs, and tries rules on gradients.
#include <CLI/CLI.hpp>
#include <cstdio>
#include <string>

#include "absl/status/status.h"
#include "cli/apply_command.h"
#include "cli/plan_command.h"
#include "cli/replan_command.h"
#include "cli/status_command.h"
#include "cli/trace_command.h"

int main(int argc, char** argv) {
  CLI::App app("Plans, watches and moves Stiefel runs, and tries rules on gradients.", "stiefelctl");
  app.require_subcommand(1);
  absl::Status result;
  stiefel::AddPlanCommand(&app, &result);
  stiefel::AddStatusCommand(&app, &result);
  stiefel::AddReplanCommands(&app, &result);
  stiefel::AddApplyCommand(&app, &result);
  stiefel::AddTraceCommand(&app, &result);
  CLI11_PARSE(app, argc, argv);
  if (result.ok()) return 0;
  std::fprintf(stderr, "stiefelctl: %s\n", result.ToString().c_str());
  return 1;
}
