#include "plan/step_timeline.h"

#include <random>

#include "gtest/gtest.h"

namespace stiefel {
namespace {

// 100 bytes take a second up and half a second down.
constexpr TimelineLink kLink{100, 200, 0.25};

TEST(StepTimelineTest, AloneAMatrixTakesItsThreeLegs) {
  const StepTimeline timeline = SimulateStep({{2, 100, 3, 100, 0}}, kLink, 1);
  EXPECT_DOUBLE_EQ(timeline.pushed_s[0], 2 + 1 + .25);
  EXPECT_DOUBLE_EQ(timeline.computed_s[0], 6.25);
  EXPECT_DOUBLE_EQ(timeline.pulled_s[0], 6.25 + .5 + .25);
  EXPECT_DOUBLE_EQ(timeline.decided_s, 6.25 + 3 * .25);
  EXPECT_DOUBLE_EQ(timeline.end_s, 7);
  EXPECT_DOUBLE_EQ(timeline.exposed_s, 5);
}

TEST(StepTimelineTest, TheDecisionIsExposedWhereThePullIsShort) {
  const StepTimeline timeline = SimulateStep({{2, 100, 3, 0, 0}}, kLink, 1);
  EXPECT_DOUBLE_EQ(timeline.end_s, timeline.decided_s);
  EXPECT_GT(timeline.end_s, timeline.pulled_s[0]);
}

TEST(StepTimelineTest, EarlierWorkHidesBehindBackward) {
  // The second layer is long done when the first one's gradient comes.
  const StepTimeline timeline = SimulateStep({{10, 100, 1, 100, 0}, {0, 100, 1, 100, 0}}, kLink, 1);
  EXPECT_LT(timeline.pulled_s[1], 10);
  EXPECT_DOUBLE_EQ(timeline.exposed_s, 1 + .25 + 1 + .5 + .25);
}

TEST(StepTimelineTest, OfTheArrivedTheOneNeededFirstIsComputedAndSentFirst) {
  // All ready at once, without latency. Pushed 2, 1, 0 at 1, 2, 3; the lane takes 2 at 1 s and is
  // free at 11 s, when both others have come: 0 goes before 1.
  const StepTimeline timeline =
      SimulateStep({{0, 100, 1, 0, 0}, {0, 100, 1, 0, 0}, {0, 100, 10, 0, 0}}, {100, 100, 0}, 1);
  EXPECT_DOUBLE_EQ(timeline.computed_s[2], 11);
  EXPECT_DOUBLE_EQ(timeline.computed_s[0], 12);
  EXPECT_DOUBLE_EQ(timeline.computed_s[1], 13);
}

TEST(StepTimelineTest, LanesAndServersWorkSideBySide) {
  const std::vector<TimelineMatrix> one_server = {{0, 0, 4, 0, 0}, {0, 0, 4, 0, 0}};
  const std::vector<TimelineMatrix> two_servers = {{0, 0, 4, 0, 0}, {0, 0, 4, 0, 7}};
  const TimelineLink link{1, 1, 0};
  EXPECT_DOUBLE_EQ(SimulateStep(one_server, link, 1).end_s, 8);
  EXPECT_DOUBLE_EQ(SimulateStep(one_server, link, 2).end_s, 4);
  EXPECT_DOUBLE_EQ(SimulateStep(two_servers, link, 1).end_s, 4);
}

// What holds of any schedule: each leg's work after its first arrival, and each matrix's own legs.
TEST(StepTimelineTest, IsNeverQuickerThanAnyOfItsPipes) {
  std::mt19937 random(5);
  for (int trial = 0; trial < 300; ++trial) {
    std::vector<TimelineMatrix> matrices(1 + random() % 12);
    double last = 0, pushes = 0, pulls = 0, longest = 0;
    std::vector<double> computes(3, 0);
    for (TimelineMatrix& m : matrices) {
      m = {static_cast<double>(random() % 50), static_cast<double>(random() % 400),
           static_cast<double>(random() % 9), static_cast<double>(random() % 400),
           static_cast<int32_t>(random() % 3)};
      last = std::max(last, m.ready_s);
      pushes += m.push_bytes / kLink.push_bytes_per_s;
      pulls += m.pull_bytes / kLink.pull_bytes_per_s;
      computes[m.server] += m.compute_s;
      longest = std::max(longest, m.ready_s + m.push_bytes / kLink.push_bytes_per_s + m.compute_s +
                                      m.pull_bytes / kLink.pull_bytes_per_s + 2 * kLink.latency_s);
    }
    const StepTimeline timeline = SimulateStep(matrices, kLink, 1);
    const double slack = 1e-9;
    EXPECT_GE(timeline.end_s + slack, longest);
    EXPECT_GE(timeline.end_s + slack, pushes + 2 * kLink.latency_s);
    EXPECT_GE(timeline.end_s + slack, pulls + 2 * kLink.latency_s);
    for (const double compute : computes) EXPECT_GE(timeline.end_s + slack, compute);
    EXPECT_GE(timeline.exposed_s, kDecisionLatencies * kLink.latency_s - slack);
    EXPECT_LE(timeline.end_s, last + pushes + pulls + computes[0] + computes[1] + computes[2] +
                                  5 * kLink.latency_s + slack);
    EXPECT_GE(SimulateStep(matrices, kLink, 1).end_s + slack,
              SimulateStep(
                  matrices,
                  {kLink.push_bytes_per_s * 2, kLink.pull_bytes_per_s * 1e9, kLink.latency_s}, 1000)
                  .end_s);
  }
}

TEST(StepTimelineTest, NothingToDoTakesNoTime) {
  EXPECT_DOUBLE_EQ(SimulateStep({}, {1, 1, 0}, 1).exposed_s, 0);
}

}  // namespace
}  // namespace stiefel
