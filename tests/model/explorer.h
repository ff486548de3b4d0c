// Searches worlds for broken promises: breadth first through all interleavings of a small
// configuration, or along random walks of a larger one. Each search is a function of its arguments.
#ifndef STIEFEL_TESTS_MODEL_EXPLORER_H_
#define STIEFEL_TESTS_MODEL_EXPLORER_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "tests/model/world.h"

namespace stiefel::model {

// A way to a broken promise.
struct Trace {
  std::vector<Event> events;
  std::string violation;
  bool stuck = false;         // it needs fair delivery after the events to show
  uint64_t closing_seed = 0;  // of that delivery
};

// One line per event, the violation last.
std::string Print(const Setting& setting, const Trace& trace);

struct Exploration {
  int64_t states = 0;
  int64_t transitions = 0;
  int64_t closed = 0;     // states from which the end was shown to be reachable
  int64_t restores = 0;   // of these, those that ended with an explicit "restore"
  bool complete = false;  // there are no further states
  std::optional<Trace> trace;
};

struct ExploreLimits {
  int64_t max_states = 100000;
  int64_t close_every = 16;  // one state in so many is closed fairly; 0: none
  bool stop_at_first = true;
};

// All states that are reachable from the start, nearest first.
Exploration Explore(const Setting& setting, const ExploreLimits& limits);

// One random walk of at most `max_events`, closed fairly. Faults are taken with `fault_percent`
// in a hundred while any are left.
struct Walk {
  std::optional<Trace> trace;
  int64_t events = 0;
  int64_t drops = 0;
  bool restored = false;
  bool moved = false;  // to another placement
};
Walk RandomWalk(const Setting& setting, uint64_t seed, int max_events, int fault_percent);

// The same violation in fewer events: events are left out as long as something is still violated.
Trace Shorten(const Setting& setting, const Trace& trace);

}  // namespace stiefel::model

#endif  // STIEFEL_TESTS_MODEL_EXPLORER_H_
