#include "plan/step_timeline.h"

#include <algorithm>
#include <map>
#include <numeric>
#include <queue>
#include <set>

namespace stiefel {
namespace {

// Jobs with a release time each, on `machines` equal machines; of those that are released the one
// with the smallest index begins first. Returns when each ends.
std::vector<double> Run(const std::vector<double>& release, const std::vector<double>& length,
                        int machines) {
  std::vector<size_t> order(release.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::stable_sort(order.begin(), order.end(),
                   [&](size_t a, size_t b) { return release[a] < release[b]; });
  std::priority_queue<double, std::vector<double>, std::greater<double>> free;
  for (int m = 0; m < machines; ++m) free.push(0);
  std::vector<double> ends(release.size(), 0);
  std::set<size_t> waiting;
  double now = 0;
  for (size_t next = 0; next < order.size() || !waiting.empty();) {
    now = std::max(now, free.top());
    if (waiting.empty()) now = std::max(now, release[order[next]]);
    while (next < order.size() && release[order[next]] <= now) waiting.insert(order[next++]);
    const size_t job = *waiting.begin();
    waiting.erase(waiting.begin());
    free.pop();
    ends[job] = now + length[job];
    free.push(ends[job]);
  }
  return ends;
}

// First come, first served on one machine; of equal times the last index first.
std::vector<double> RunInTurn(const std::vector<double>& release,
                              const std::vector<double>& length) {
  std::vector<size_t> order(release.size());
  std::iota(order.rbegin(), order.rend(), size_t{0});
  std::stable_sort(order.begin(), order.end(),
                   [&](size_t a, size_t b) { return release[a] < release[b]; });
  std::vector<double> ends(release.size(), 0);
  double now = 0;
  for (const size_t job : order) {
    now = std::max(now, release[job]) + length[job];
    ends[job] = now;
  }
  return ends;
}

}  // namespace

StepTimeline SimulateStep(const std::vector<TimelineMatrix>& matrices, const TimelineLink& link,
                          int lanes) {
  const size_t count = matrices.size();
  std::vector<double> ready(count), push(count), pull(count);
  double last_gradient = 0;
  std::map<int32_t, std::vector<size_t>> of_server;
  for (size_t i = 0; i < count; ++i) {
    ready[i] = matrices[i].ready_s;
    push[i] = matrices[i].push_bytes / link.push_bytes_per_s;
    pull[i] = matrices[i].pull_bytes / link.pull_bytes_per_s;
    last_gradient = std::max(last_gradient, ready[i]);
    of_server[matrices[i].server].push_back(i);
  }
  StepTimeline timeline;
  timeline.pushed_s = RunInTurn(ready, push);
  for (double& at : timeline.pushed_s) at += link.latency_s;
  timeline.computed_s.resize(count);
  for (const auto& [server, owned] : of_server) {
    std::vector<double> arrived, compute;
    for (const size_t i : owned) {
      arrived.push_back(timeline.pushed_s[i]);
      compute.push_back(matrices[i].compute_s);
    }
    const std::vector<double> ends = Run(arrived, compute, lanes);
    for (size_t k = 0; k < owned.size(); ++k) timeline.computed_s[owned[k]] = ends[k];
  }
  timeline.pulled_s = Run(timeline.computed_s, pull, 1);
  double computed = last_gradient;
  for (size_t i = 0; i < count; ++i) {
    timeline.pulled_s[i] += link.latency_s;
    computed = std::max(computed, timeline.computed_s[i]);
    timeline.end_s = std::max(timeline.end_s, timeline.pulled_s[i]);
  }
  timeline.decided_s = computed + kDecisionLatencies * link.latency_s;
  timeline.end_s = std::max(timeline.end_s, timeline.decided_s);
  timeline.exposed_s = timeline.end_s - last_gradient;
  return timeline;
}

}  // namespace stiefel
