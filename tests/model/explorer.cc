#include "tests/model/explorer.h"

#include <algorithm>
#include <unordered_set>
#include <utility>

#include "absl/strings/str_cat.h"

namespace stiefel::model {
namespace {

struct HashLow {
  size_t operator()(const Hash& hash) const { return hash.second; }
};

uint64_t NextRandom(uint64_t* state) {
  *state = *state * 6364136223846793005u + 1442695040888963407u;
  return *state >> 33;
}

// A state in the order of discovery: how it was first reached.
struct Step {
  int64_t from;
  Event event;
};

std::vector<Event> PathTo(const std::vector<Step>& steps, int64_t state) {
  std::vector<Event> events;
  for (; state > 0; state = steps[state].from) events.push_back(steps[state].event);
  std::reverse(events.begin(), events.end());
  return events;
}

bool IsStuck(const std::string& violation) { return violation.rfind("stuck", 0) == 0; }

// Closes the run after the events of the trace, which gains those that led to a broken promise.
void Close(World* world, Trace* trace) {
  if (world->violation().empty()) {
    const std::vector<Event> closing = world->CloseFairly(trace->closing_seed);
    if (!IsStuck(world->violation()))
      trace->events.insert(trace->events.end(), closing.begin(), closing.end());
  }
  trace->violation = world->violation();
  trace->stuck = IsStuck(trace->violation);
}

// What happens if exactly these events happen, those that cannot being left out.
Trace Replay(const Setting& setting, const std::vector<Event>& events, const Trace& like) {
  Trace trace;
  trace.closing_seed = like.closing_seed;
  World world(&setting);
  for (const Event& event : events) {
    if (!world.violation().empty()) break;
    if (world.Apply(event)) trace.events.push_back(event);
  }
  trace.violation = world.violation();
  if (like.stuck) Close(&world, &trace);
  return trace;
}

}  // namespace

std::string Print(const Setting& setting, const Trace& trace) {
  std::string out;
  World world(&setting);
  int line = 0;
  for (const Event& event : trace.events) {
    const std::string what = world.Describe(event);
    if (world.Apply(event)) absl::StrAppend(&out, "  ", ++line, ". ", what, "\n");
  }
  return absl::StrCat(out, trace.stuck ? "  ... fair delivery of everything ...\n" : "", "  => ",
                      trace.violation, "\n");
}

Exploration Explore(const Setting& setting, const ExploreLimits& limits) {
  Exploration result;
  std::unordered_set<Hash, HashLow> visited;
  std::vector<Step> steps;
  std::vector<std::pair<int64_t, World>> level;
  World start(&setting);
  visited.insert(start.StateHash());
  steps.push_back({-1, {}});
  level.emplace_back(0, start);
  // `state`, then `last`, then fair delivery if `closing`.
  const auto fail = [&](int64_t state, const Event* last, const std::vector<Event>& closing,
                        const std::string& violation) {
    if (result.trace) return;
    Trace trace;
    trace.events = PathTo(steps, state);
    if (last != nullptr) trace.events.push_back(*last);
    trace.closing_seed = state;
    trace.violation = violation;
    trace.stuck = IsStuck(violation);
    if (!trace.stuck) trace.events.insert(trace.events.end(), closing.begin(), closing.end());
    result.trace = std::move(trace);
  };
  while (!level.empty() && static_cast<int64_t>(steps.size()) < limits.max_states) {
    std::vector<std::pair<int64_t, World>> next;
    for (const auto& [state, world] : level) {
      if (static_cast<int64_t>(steps.size()) >= limits.max_states) break;
      if (limits.close_every > 0 && state % limits.close_every == 0) {
        World closing = world;
        const std::vector<Event> events = closing.CloseFairly(state);
        ++result.closed;
        result.restores += closing.NeedsRestore();
        if (!closing.violation().empty()) fail(state, nullptr, events, closing.violation());
      }
      for (const Event& event : world.Enabled()) {
        World after = world;
        if (!after.Apply(event)) continue;
        ++result.transitions;
        const Hash hash = after.StateHash();
        if (!after.violation().empty()) fail(state, &event, {}, after.violation());
        if (result.trace && limits.stop_at_first) {
          result.states = static_cast<int64_t>(steps.size());
          return result;
        }
        if (!visited.insert(hash).second) continue;
        steps.push_back({state, event});
        if (after.violation().empty())
          next.emplace_back(static_cast<int64_t>(steps.size()) - 1, std::move(after));
      }
    }
    if (next.empty()) result.complete = static_cast<int64_t>(steps.size()) < limits.max_states;
    level = std::move(next);
  }
  result.states = static_cast<int64_t>(steps.size());
  return result;
}

Walk RandomWalk(const Setting& setting, uint64_t seed, int max_events, int fault_percent) {
  Walk walk;
  Trace trace;
  trace.closing_seed = seed;
  uint64_t random = seed * 0x9E3779B97F4A7C15u + 1;
  World world(&setting);
  for (int i = 0; i < max_events && world.violation().empty() && !world.Done(); ++i) {
    std::vector<Event> enabled = world.Enabled();
    const bool fault = static_cast<int>(NextRandom(&random) % 100) < fault_percent;
    const auto wanted = std::stable_partition(
        enabled.begin(), enabled.end(), [fault](const Event& e) { return e.fault() == fault; });
    const size_t choices = wanted == enabled.begin() ? enabled.size() : wanted - enabled.begin();
    if (choices == 0) break;
    size_t chosen = NextRandom(&random) % choices;
    if (enabled[chosen].fault() && NextRandom(&random) % 2 == 0) {
      // Not only losses and repetitions, of which there is one for every message in flight.
      const auto restart =
          std::find_if(enabled.begin(), enabled.begin() + choices, [](const Event& e) {
            return e.kind == Event::Kind::kRestart || e.kind == Event::Kind::kDeadline;
          });
      const size_t rare = enabled.begin() + choices - restart;
      if (rare > 0) chosen = choices - 1 - NextRandom(&random) % rare;
    }
    const Event event = enabled[chosen];
    if (world.Apply(event)) trace.events.push_back(event);
  }
  Close(&world, &trace);
  (void)world.StateHash();  // checks the bounds of what the machines hold
  walk.events = static_cast<int64_t>(trace.events.size());
  walk.drops = world.attempts_dropped();
  walk.restored = world.NeedsRestore();
  walk.moved = world.moved();
  if (world.violation().empty()) return walk;
  trace.violation = world.violation();
  walk.trace = std::move(trace);
  return walk;
}

Trace Shorten(const Setting& setting, const Trace& trace) {
  Trace best = Replay(setting, trace.events, trace);
  if (best.violation.empty() || best.stuck != trace.stuck) return trace;
  for (size_t chunk = std::max<size_t>(1, best.events.size() / 2); chunk > 0; chunk /= 2) {
    for (size_t begin = 0; begin < best.events.size();) {
      std::vector<Event> fewer = best.events;
      fewer.erase(fewer.begin() + begin, fewer.begin() + std::min(fewer.size(), begin + chunk));
      Trace candidate = Replay(setting, fewer, best);
      if (!candidate.violation.empty() && candidate.stuck == best.stuck &&
          candidate.events.size() < best.events.size()) {
        best = std::move(candidate);
      } else {
        begin += chunk;
      }
    }
  }
  return best;
}

}  // namespace stiefel::model
