#ifndef STIEFEL_PLAN_STEP_TIMELINE_H_
#define STIEFEL_PLAN_STEP_TIMELINE_H_

#include <cstdint>
#include <vector>

// A step as a timeline: gradients become ready during backward, travel over the trainer's link, are
// computed on the servers, and the updates travel back. A simulation of ideal pipes from constants
// that somebody measured or assumed: nothing costs but bytes over the link's rate, its latency, and
// the computation.

namespace stiefel {

// Times in seconds from the beginning of the step.
struct TimelineMatrix {
  double ready_s = 0;  // when backward has its gradient
  double push_bytes = 0;
  double compute_s = 0;
  double pull_bytes = 0;
  int32_t server = 0;
};

struct TimelineLink {
  // Of the trainer's side, each direction on its own.
  double push_bytes_per_s = 0;
  double pull_bytes_per_s = 0;
  double latency_s = 0;  // one way
};

// What a decision costs after the last matrix of the last server is computed, in latencies: votes
// to the leader, its decision to the servers, their word of it to the trainers.
inline constexpr int kDecisionLatencies = 3;

// By matrix, in the order given, when it has arrived, is computed, and its update is here.
struct StepTimeline {
  std::vector<double> pushed_s, computed_s, pulled_s;
  double decided_s = 0;
  double end_s = 0;      // the outcome and all updates are here
  double exposed_s = 0;  // from the last gradient until then
};

// `matrices` in the order in which trainers need them. Gradients are sent in the order in which
// they become ready (of equal ones the last needed first, as backward makes them); a server
// computes `lanes` matrices at once, of those that have arrived the one needed first; of the
// computed ones the one needed first is sent back. No pipe is idle while it has work, so for one
// server with one lane only a schedule that knows the future could be quicker. REQUIRES: positive
// rates and lanes, times and bytes >= 0 and finite, servers within [0, 2^20).
StepTimeline SimulateStep(const std::vector<TimelineMatrix>& matrices, const TimelineLink& link,
                          int lanes);

}  // namespace stiefel

#endif  // STIEFEL_PLAN_STEP_TIMELINE_H_
