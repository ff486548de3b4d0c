#include "kernels/rules/batch.h"

#include <algorithm>
#include <atomic>
#include <functional>

namespace stiefel {

absl::Status ComputeBatch(Stream* stream, const std::vector<StepJob>& jobs,
                          std::vector<DeviceBuffer>* workspaces) {
  const auto count = static_cast<int64_t>(jobs.size());
  const auto lanes = static_cast<int64_t>(workspaces->size());
  struct Entry {
    double cost;
    int64_t job;
  };
  std::vector<Entry> order;  // the dearest first
  double total = 0;
  for (int64_t i = 0; i < count; ++i) {
    order.push_back({jobs[i].rule->CostUnits(jobs[i].args->kind), i});
    total += order.back().cost;
  }
  std::sort(order.begin(), order.end(), [](const Entry& a, const Entry& b) {
    return a.cost > b.cost || (a.cost == b.cost && a.job < b.job);
  });
  std::vector<absl::Status> errors(jobs.size());
  const auto compute = [&](int64_t place, int64_t lane, Stream* on) {
    const StepJob& job = jobs[order[place].job];
    errors[order[place].job] = job.rule->Compute(on, *job.gradient, *job.args, *job.buffers,
                                                 &(*workspaces)[lane], job.result);
  };
  // A matrix of more than half a lane's share would keep its lane busy when the others have done.
  int64_t alone = 0;
  while (alone < count && (lanes == 1 || 2 * lanes * order[alone].cost > total)) {
    total -= order[alone].cost;
    compute(alone++, 0, stream);
  }
  std::atomic<int64_t> next{alone};
  const auto run_lane = [&](int64_t lane, Stream* sub) {
    for (int64_t place = next++; place < count; place = next++) compute(place, lane, sub);
  };
  if (alone < count) stream->ForEach(lanes, std::ref(run_lane));
  for (const absl::Status& error : errors) {
    if (!error.ok()) return error;
  }
  return absl::OkStatus();
}

}  // namespace stiefel
