// stiefelctl: plans, watches and moves runs, and tries rules on gradients.
#include <CLI/CLI.hpp>
#include <cstdio>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "cli/apply_command.h"
#include "cli/plan_command.h"
#include "cli/replan_command.h"
#include "cli/status_command.h"
#include "cli/trace_command.h"
#include "plan/nearest.h"

namespace {

// What CLI11 says of it names no word: "A subcommand is required".
absl::Status CheckCommand(const CLI::App& app, const std::string& word) {
  std::vector<std::string> names;
  for (const CLI::App* command : app.get_subcommands([](const CLI::App*) { return true; })) {
    if (command->get_name() == word) return absl::OkStatus();
    names.push_back(command->get_name());
  }
  const std::vector<std::string_view> known(names.begin(), names.end());
  const std::string nearest(stiefel::NearestName(word, known));
  return absl::InvalidArgumentError(
      absl::StrCat("unknown command \"", stiefel::PrintableName(word), "\"",
                   nearest.empty() ? "" : absl::StrCat("; did you mean \"", nearest, "\"?"),
                   " Known: ", absl::StrJoin(names, ", ")));
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app("Plans, watches and moves Stiefel runs, and tries rules on gradients.",
               "stiefelctl");
  app.require_subcommand(1);
  absl::Status result;
  stiefel::AddPlanCommand(&app, &result);
  stiefel::AddStatusCommand(&app, &result);
  stiefel::AddReplanCommands(&app, &result);
  stiefel::AddApplyCommand(&app, &result);
  stiefel::AddTraceCommand(&app, &result);
  if (argc > 1 && argv[1][0] != '-') result = CheckCommand(app, argv[1]);
  if (result.ok()) {
    CLI11_PARSE(app, argc, argv);
  }
  if (result.ok()) return 0;
  std::fprintf(stderr, "stiefelctl: %s\n", result.ToString().c_str());
  return 1;
}
