#ifndef STIEFEL_PLAN_EXPLAIN_H_
#define STIEFEL_PLAN_EXPLAIN_H_

#include <cstdint>
#include <optional>
#include <vector>

#include "plan/memory.h"
#include "plan/placement.h"

// What a plan means, in numbers: who owns how much, how level the steps are, and whether the
// service pays. docs/planner.md explains each of them.
//
// Times follow one simple model, whose constants are all in Machine:
//   compute of a shard       flops / flops_per_second + bytes / memory_bytes_per_second, divided by
//                            the server's speed
//   exchange of a server     bytes to other owners / network_bytes_per_second, and two latencies a
//                            collective
//   push, pull of a server   its bytes in one direction / network_bytes_per_second; together no
//                            less than those of one trainer, which has such a link as well
//   a step                   the slowest server's push + compute + exchange + pull
//   exposed time of a step   max(0, that - backward): what the backward pass cannot hide
//   with overlap             SimulateStep of plan/step_timeline.h, from the last gradient to the
//   last
//                            update: gradients get ready last matrix first, evenly by elements over
//                            the backward pass; the links of all trainers, or of all servers where
//                            these are fewer, are one pipe
//   the rule in the trainers every rank does all of it (compute of the whole model), or each of n
//                            ranks does 1/n of it and they all-gather the result: compute / n +
//                            (n - 1)/n x payload bytes / network

namespace stiefel {

// Of one server, one trainer and the wire between them. Defaults are those of a good CPU server.
struct Machine {
  double flops_per_second = 1e12;
  double memory_bytes_per_second = 50e9;
  double network_bytes_per_second = 3e9;  // of a server and of a trainer, each way
  double latency_seconds = 2e-4;          // one way
  double trainer_flops_per_second = 1e12;
  double trainer_memory_bytes_per_second = 50e9;
  double backward_seconds = 1;
  int64_t trainers = 1;
  // How many trainers pull each element; 0: all. 1 where each pulls its own part, as under FSDP.
  int64_t pull_copies = 0;

  double PullCopies() const {
    return static_cast<double>(pull_copies > 0 ? pull_copies : trainers);
  }
};

struct ServerLoad {
  int64_t shards = 0;    // Owned; a matrix that is not cut is one.
  int64_t elements = 0;  // Parameters owned.
  MatrixBytes bytes;     // Sums; workspace is that of the matrices in flight.
  int64_t stream_bytes = 0;
  int64_t total_bytes = 0;
  double push_bytes_per_step = 0;  // On the wire, all copies.
  double pull_bytes_per_step = 0;
  double peer_bytes_per_step = 0;        // Sent to owners of other shards; mean over the cycle.
  std::vector<double> flops;             // By step of the cycle.
  std::vector<double> compute_seconds;   // By step of the cycle.
  std::vector<double> refresh_seconds;   // Of them, what orthogonalises.
  std::vector<double> exchange_seconds;  // By step of the cycle.

  // State, staging, weights, push, payload and what shards hold; 0 without parameters.
  double BytesPerParameter() const;
};

struct StepLoad {
  double flops = 0;            // Of all servers.
  double compute_seconds = 0;  // Of the slowest server.
  double balance = 1;  // Slowest server's compute time / mean; 1 where there is nothing to do.
  // Most refresh work of one server at this step / its mean over servers and steps, so that 1 is
  // level in both; 0 where nothing orthogonalises.
  double refresh_balance = 0;
  double exposed_seconds = 0;
  double overlapped_seconds = 0;  // Exposed with overlap.
};

struct Explanation {
  std::vector<ServerLoad> servers;
  std::vector<StepLoad> cycle;  // Steps 1, 2, ... of the cycle.
  int64_t elements = 0;
  int64_t shards = 0;
  int64_t cut_matrices = 0;
  int64_t total_bytes = 0;
  double push_bytes_per_step = 0;
  double pull_bytes_per_step = 0;
  double peer_bytes_per_step = 0;
  double busiest_link_bytes = 0;  // Of one server in a step: all that it receives and sends.
  double link_balance = 1;        // That / the mean of all servers.
  double exposed_seconds = 0;     // Mean over the cycle.
  double overlapped_seconds = 0;  // Mean over the cycle.
  double balance = 1;             // Worst over the cycle.

  int32_t largest_matrix = -1;        // The dearest to refresh; -1 for an empty model.
  double largest_matrix_seconds = 0;  // Its refresh, whole, on a server of speed 1.
  // Fewest servers of speed 1 with no exposed time in any step; unset where kMaxServersTried do not
  // do it.
  std::optional<int64_t> servers_to_hide;

  double trainer_seconds = 0;          // The same rules in every trainer, mean over the cycle.
  double trainer_sharded_seconds = 0;  // Shared out among the trainers, with an all-gather.

  double BytesPerStep() const {
    return push_bytes_per_step + pull_bytes_per_step + peer_bytes_per_step;
  }
};

inline constexpr int64_t kMaxServersTried = 1024;

// Everything but servers_to_hide and what trainers would need. REQUIRES: `plan` is valid for the
// request (MakePlan's, or other owners), every number of `machine` is positive (backward_seconds
// and latency_seconds may be 0).
Explanation LoadsOfPlan(const PlanRequest& request, const Plan& plan, const Machine& machine);

// All of it. REQUIRES: as LoadsOfPlan.
Explanation ExplainPlan(const PlanRequest& request, const Plan& plan, const Machine& machine);

// Seconds of one step of every rule, all on one machine, mean over the cycle.
double SecondsOfModel(const PlanRequest& request, double flops_per_second, double bytes_per_second);

}  // namespace stiefel

#endif  // STIEFEL_PLAN_EXPLAIN_H_
