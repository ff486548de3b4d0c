// With all rules in force no promise of docs/PROTOCOL.md is ever broken: all interleavings of small
// configurations, and random ones of larger.
#include <gtest/gtest.h>

#include <cstdio>
#include <functional>
#include <string>

#include "tests/model/explorer.h"
#include "tests/model/scale.h"

namespace stiefel::model {
namespace {

struct Small {
  const char* name;
  std::function<void(Config*)> change;
  int64_t max_states;       // 0: all of them
  int64_t full_max_states;  // at full scale
};

// Two servers, two trainers, one step, unless said otherwise.
const Small kSmall[] = {
    {"no fault, every chunk on its own", [](Config* c) { c->chunks_at_once = false; }, 0, 0},
    {"no fault, two steps", [](Config* c) { c->steps = 2; }, 0, 0},
    {"one repeated message", [](Config* c) { c->duplicates = 1; }, 0, 0},
    {"one lost message", [](Config* c) { c->losses = 1; }, 0, 0},
    {"clipped", [](Config* c) { c->clip_step = 1; }, 0, 0},
    {"one server, two steps, a restart",
     [](Config* c) {
       c->servers = 1;
       c->steps = 2;
       c->restarts = 1;
     },
     0, 0},
    {"one trainer, a restart of the leader, clipped",
     [](Config* c) {
       c->trainers = 1;
       c->restarts = 1;
       c->clip_step = 1;
     },
     0, 0},
    {"one trainer, two steps, two restarts",
     [](Config* c) {
       c->trainers = 1;
       c->steps = 2;
       c->restarts = 2;
     },
     60000, 1000000},
    {"a step deadline", [](Config* c) { c->deadlines = 1; }, 60000, 1000000},
    {"a restart", [](Config* c) { c->restarts = 1; }, 200000, 1000000},
    {"a restart of the leader, which lives on",
     [](Config* c) {
       c->zombies = 1;
       c->restart_rank = 0;
     },
     60000, 1000000},
    {"WEIGHTS, a restart with nothing or less, two steps",
     [](Config* c) {
       c->weights = c->without_weights = c->old_snapshots = true;
       c->restarts = 1;
       c->steps = 2;
     },
     60000, 1000000},
    {"shards of one matrix meet in a collective, a deadline",
     [](Config* c) {
       c->coupled = true;
       c->deadlines = 1;
       c->trainers = 1;
     },
     0, 0},
    {"one trainer, a server is replaced before the first step",
     [](Config* c) {
       c->trainers = 1;
       c->moves = 1;
       c->move_step = 0;
     },
     0, 0},
    {"two trainers, owners go round after the first of two steps",
     [](Config* c) {
       c->steps = 2;
       c->moves = 1;
       c->move_step = 1;
       c->move_kind = MoveKind::kRotate;
     },
     12000, 1000000},
    {"a server is replaced, a restart",
     [](Config* c) {
       c->trainers = 1;
       c->moves = 1;
       c->move_step = 0;
       c->restarts = 1;
     },
     25000, 1000000},
    {"a server is replaced, the leader is taken for dead and lives on",
     [](Config* c) {
       c->trainers = 1;
       c->moves = 1;
       c->move_step = 0;
       c->zombies = 1;
     },
     12000, 1000000},
    {"the last server leaves or one comes in, a deadline",
     [](Config* c) {
       c->trainers = 1;
       c->moves = 2;
       c->move_step = 0;
       c->move_kind = MoveKind::kShrink;
       c->deadlines = 1;
     },
     12000, 1000000},
};

TEST(Exploration, SmallConfigurationsKeepEveryPromise) {
  int64_t states = 0;
  int64_t complete = 0;
  std::printf("%-52s %9s %11s %8s %9s\n", "configuration", "states", "transitions", "closed",
              "complete");
  for (const Small& small : kSmall) {
    Config config;
    config.steps = 1;
    config.stale_at_once = config.chunks_at_once = true;
    small.change(&config);
    const Setting setting(config);
    ExploreLimits limits;
    limits.max_states = Scaled(small.max_states, small.full_max_states);
    if (limits.max_states == 0) limits.max_states = INT64_MAX;
    limits.close_every = FullScale() ? 16 : 64;
    const Exploration result = Explore(setting, limits);
    std::printf("%-52s %9ld %11ld %8ld %9s\n", small.name, static_cast<long>(result.states),
                static_cast<long>(result.transitions), static_cast<long>(result.closed),
                result.complete ? "yes" : "no");
    std::fflush(stdout);
    states += result.states;
    complete += result.complete;
    EXPECT_TRUE(result.complete || small.max_states > 0) << small.name;
    if (result.trace) FAIL() << small.name << "\n" << Print(setting, *result.trace);
  }
  std::printf("%ld states in all, %ld configurations complete\n", static_cast<long>(states),
              static_cast<long>(complete));
  EXPECT_GE(complete, 7);
}

// Up to three servers, three trainers, three steps, every fault, every feature.
Config Large(uint64_t seed) {
  Config config;
  config.servers = 1 + seed % 3;
  config.trainers = 1 + (seed / 3) % 3;
  config.steps = 3;
  config.weights = (seed & 8) != 0;
  config.pieces = (seed & 16) != 0 ? 2 : 1;
  config.idle_server = config.servers > 1 && (seed & 32) != 0;
  config.absent_matrix = seed % 5 == 0;
  config.clip_step = seed % 4;
  config.skip_step = (seed / 4) % 5;
  config.local_step = (seed / 7) % 7;
  config.fail_step = seed % 3 == 0 ? config.clip_step : 0;
  config.small_window = seed % 2 == 1;
  config.join_at_once = seed % 7 != 0;
  config.credit_at_once = seed % 3 != 0;
  config.compute_at_once = seed % 4 < 2;
  config.settle_at_once = seed % 5 < 3;
  config.connect_at_once = seed % 6 != 1;
  config.restarts = seed % 4;
  config.zombies = seed % 3 == 2 ? 1 : 0;
  config.losses = seed % 5;
  config.duplicates = 4;
  config.deadlines = seed % 3;
  config.old_snapshots = seed % 2 == 1;
  config.without_weights = seed % 3 != 0;
  config.coupled = seed % 4 == 3 && config.servers - config.idle_server > 1;
  config.moves = (seed / 11) % 4;
  config.move_step = (seed / 2) % 3;
  config.move_kind = static_cast<MoveKind>((seed / 5) % 4);
  config.fetch_fails = config.moves > 1 && seed % 13 == 0;
  return config;
}

TEST(Exploration, RandomWalksOfLargeConfigurationsKeepEveryPromise) {
  const uint64_t walks = Scaled(10000, 100000);
  int64_t events = 0;
  int64_t drops = 0;
  int64_t restored = 0;
  int64_t moved = 0;
  for (uint64_t seed = 0; seed < walks; ++seed) {
    const Setting setting(Large(seed));
    const Walk walk = RandomWalk(setting, seed, 400, 8);
    events += walk.events;
    drops += walk.drops;
    restored += walk.restored;
    moved += walk.moved;
    if (walk.trace)
      FAIL() << "seed " << seed << "\n" << Print(setting, Shorten(setting, *walk.trace));
  }
  std::printf(
      "%ld walks, %ld events, %ld attempts dropped, %ld runs moved, %ld ended with \"restore\"\n",
      static_cast<long>(walks), static_cast<long>(events), static_cast<long>(drops),
      static_cast<long>(moved), static_cast<long>(restored));
  EXPECT_GT(drops, static_cast<int64_t>(walks / 2)) << "the walks meet too few faults";
  EXPECT_GT(moved, static_cast<int64_t>(walks / 4)) << "too few moves come to their end";
  EXPECT_LT(restored, static_cast<int64_t>(walks / 10)) << "too many runs end by a refusal";
}

}  // namespace
}  // namespace stiefel::model
