// Every rule of docs/PROTOCOL.md that the machines implement is needed: with it switched off,
// random walks of a small world break a promise or get stuck. Prints the table of docs/PROTOCOL.md.
#include <gtest/gtest.h>

#include <cstdio>
#include <optional>
#include <string>
#include <utility>

#include "tests/model/explorer.h"
#include "tests/model/scale.h"

namespace stiefel::model {
namespace {

struct Rule {
  int number;
  const char* name;
  bool ProtocolPolicy::*flag;
  bool moves = false;  // it is about changes of placement
};

// Rule 14 only bounds time: RunMachineTime.ARunWithoutLeasesIsKeptForTheTakeoverTimeout.
const Rule kRules[] = {
    {1, "match_names", &ProtocolPolicy::match_names},
    {2, "fence_leader", &ProtocolPolicy::fence_leader},
    {3, "check_applied", &ProtocolPolicy::check_applied},
    {3, "cancel_on_join", &ProtocolPolicy::cancel_on_join},
    {4, "drop_on_rejoin", &ProtocolPolicy::drop_on_rejoin},
    {5, "resend_deltas", &ProtocolPolicy::resend_deltas},
    {6, "vote_after_all", &ProtocolPolicy::vote_after_all},
    {6, "seal_on_vote", &ProtocolPolicy::seal_on_vote},
    {6, "compare_incarnations", &ProtocolPolicy::compare_incarnations},
    {7, "all_votes", &ProtocolPolicy::all_votes},
    {7, "one_decision", &ProtocolPolicy::one_decision},
    {8, "first_decision", &ProtocolPolicy::first_decision},
    {9, "match_round", &ProtocolPolicy::match_round},
    {9, "complete_deltas", &ProtocolPolicy::complete_deltas},
    {10, "resend_votes", &ProtocolPolicy::resend_votes},
    {11, "hold_ahead", &ProtocolPolicy::hold_ahead},
    {11, "keep_deltas", &ProtocolPolicy::keep_deltas},
    {12, "take_over_all", &ProtocolPolicy::take_over_all},
    {13, "complete_found", &ProtocolPolicy::complete_found},
    {13, "complete_switch", &ProtocolPolicy::complete_switch, true},
    {13, "cancel_found", &ProtocolPolicy::cancel_found, true},
    {15, "decide_first", &ProtocolPolicy::decide_first, true},
    {15, "fresh_epochs", &ProtocolPolicy::fresh_epochs, true},
    {16, "withhold_begin", &ProtocolPolicy::withhold_begin, true},
    {16, "prepare_all", &ProtocolPolicy::prepare_all, true},
    {16, "applied_first", &ProtocolPolicy::applied_first, true},
};

// Two servers, two trainers, one or two steps, and the faults that the seed allows.
Config Small(uint64_t seed) {
  Config config;
  config.steps = 1 + (seed / 2) % 2;
  config.weights = seed % 2 == 1;
  config.pieces = seed % 3 == 0 ? 2 : 1;
  config.clip_step = seed % 5 == 0 ? 1 : 0;
  config.local_step = seed % 7 == 0 ? 1 : 0;
  config.restarts = seed % 4;
  config.zombies = seed % 2;
  config.losses = seed % 3;
  config.duplicates = seed % 4 == 0 ? 4 : 0;
  config.deadlines = seed % 2;
  config.old_snapshots = seed % 2 == 1;
  config.without_weights = seed % 4 == 1;
  return config;
}

// The same with a move, that is tried three times if it is cancelled.
Config Moving(uint64_t seed) {
  Config config = Small(seed);
  config.trainers = 1 + (seed / 5) % 2;
  config.moves = 3;
  config.move_step = config.steps - 1;
  config.move_kind = static_cast<MoveKind>((seed / 3) % 4);
  config.fetch_fails = seed % 5 == 1;
  config.settle_at_once = seed % 3 != 1;
  return config;
}

struct Failure {
  Config config;
  Trace trace;
};

// A wrong result or a stuck run says more than a refusal that nobody expects.
std::pair<bool, size_t> Weight(const Trace& trace) {
  return {trace.violation.find("refused") != std::string::npos, trace.events.size()};
}

// The shortest of the first failures that the walks meet.
std::optional<Failure> Search(const Rule& rule, uint64_t max_walks, int max_failures) {
  std::optional<Failure> shortest;
  int failures = 0;
  for (uint64_t seed = 0; seed < max_walks && failures < max_failures; ++seed) {
    Config config = rule.moves ? Moving(seed) : Small(seed);
    config.policy.*rule.flag = false;
    const Setting setting(config);
    const Walk walk = RandomWalk(setting, seed, 200, 15);
    if (!walk.trace) continue;
    ++failures;
    const Trace trace = Shorten(setting, *walk.trace);
    if (!shortest || Weight(trace) < Weight(shortest->trace)) shortest = Failure{config, trace};
  }
  return shortest;
}

TEST(Rules, EachSwitchedOffBreaksAPromise) {
  std::string traces;
  std::printf("%-5s %-21s %6s  %s\n", "rule", "switched off", "events", "what happens");
  for (const Rule& rule : kRules) {
    const auto failure = Search(rule, FullScale() ? 20000 : 5000, static_cast<int>(Scaled(8, 40)));
    if (!failure) {
      ADD_FAILURE() << "rule " << rule.number << " (" << rule.name << ") is not needed by anything";
      continue;
    }
    const Trace& trace = failure->trace;
    std::printf("%-5d %-21s %6zu  %s%s\n", rule.number, rule.name, trace.events.size(),
                trace.stuck ? "then, with fair delivery: " : "",
                trace.violation.substr(0, 110).c_str());
    std::fflush(stdout);
    traces += std::string(rule.name) + "\n" + Print(Setting(failure->config), trace);
  }
  if (FullScale()) std::printf("%s", traces.c_str());
}

// The same walks with all rules in force.
TEST(Rules, AllInForceBreakNone) {
  for (uint64_t seed = 0; seed < static_cast<uint64_t>(Scaled(3000, 20000)); ++seed) {
    const Setting setting(seed % 3 == 0 ? Moving(seed) : Small(seed));
    const Walk walk = RandomWalk(setting, seed, 200, 15);
    if (walk.trace)
      FAIL() << "seed " << seed << "\n" << Print(setting, Shorten(setting, *walk.trace));
  }
}

}  // namespace
}  // namespace stiefel::model
