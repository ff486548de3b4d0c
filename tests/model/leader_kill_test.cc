// The leader is killed at random moments of a step: its successor finishes the step or redoes it,
// never both.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdio>

#include "tests/model/explorer.h"
#include "tests/model/scale.h"

namespace stiefel::model {
namespace {

uint64_t Next(uint64_t* state) {
  *state = *state * 6364136223846793005u + 1442695040888963407u;
  return *state >> 33;
}

TEST(LeaderKill, TheSuccessorFinishesOrRedoesTheStep) {
  const int moments = FullScale() ? 50 : 15;
  int finished = 0;
  int redone = 0;
  for (int moment = 0; moment < moments; ++moment) {
    Config config;
    config.steps = 3;
    config.restarts = 1;
    config.weights = moment % 2 == 1;
    config.clip_step = moment % 3 == 0 ? 1 : 0;
    config.compute_at_once = config.settle_at_once = config.credit_at_once = false;
    const Setting setting(config);
    uint64_t random = static_cast<uint64_t>(moment) * 7919 + 17;
    World world(&setting);
    // A step takes some 60 events.
    for (uint64_t events = Next(&random) % 75; events > 0; --events) {
      std::vector<Event> enabled = world.Enabled();
      enabled.erase(std::remove_if(enabled.begin(), enabled.end(),
                                   [](const Event& event) { return event.fault(); }),
                    enabled.end());
      ASSERT_FALSE(enabled.empty());
      ASSERT_TRUE(world.Apply(enabled[Next(&random) % enabled.size()]));
    }
    const auto [step, attempt] = world.OldestOpen();
    Event kill;
    kill.kind = Event::Kind::kRestart;
    kill.process = world.Current(0);
    ASSERT_TRUE(world.Apply(kill));
    world.CloseFairly(moment);
    ASSERT_EQ(world.violation(), "") << "moment " << moment;
    ASSERT_TRUE(world.Done()) << "moment " << moment;
    ASSERT_GE(world.ConsumedAttempt(step), attempt);
    (world.ConsumedAttempt(step) == attempt ? finished : redone) += 1;
  }
  std::printf("leader killed at %d moments: step finished %d times, redone %d times\n", moments,
              finished, redone);
  EXPECT_GT(finished, 0);
  EXPECT_GT(redone, 0);
}

}  // namespace
}  // namespace stiefel::model
