#ifndef STIEFEL_PLAN_EXPLAIN_H_
#define STIEFEL_PLAN_EXPLAIN_H_

#include <cstdint>
#include <optional>
#include <vector>

#include "plan/memory.h"
#include "plan/placement.h"

// What a plan means, in numbers: who owns how much, how level the steps are, and whether the
// service pays.
//
// Times follow one simple model, whose constants are all in Machine:
//   compute of a matrix      flops / flops_per_second + bytes / memory_bytes_per_second, divided by
//   the server's speed push, pull of a server   its bytes in one direction /
//   network_bytes_per_second a step                   the slowest server's push + compute + pull
//   exposed time of a step   max(0, push + compute + pull - backward): what the backward pass
//   cannot hide the rule in the trainers every rank does all of it (compute of the whole model), or
//   each of n ranks does 1/n of it and
//                            they all-gather the result: compute / n + (n - 1)/n x payload bytes /
//                            network

namespace stiefel {

// Of one server, one trainer and the wire between them. Defaults are those of a good CPU server.
struct Machine {
  double flops_per_second = 1e12;
  double memory_bytes_per_second = 50e9;
  double network_bytes_per_second = 3e9;
  double trainer_flops_per_second = 1e12;
  double trainer_memory_bytes_per_second = 50e9;
  double backward_seconds = 1;
  int64_t trainers = 1;
};

struct ServerLoad {
  int64_t shards = 0;    // Owned; a matrix that is not cut is one.
  int64_t elements = 0;  // Parameters owned.
  MatrixBytes bytes;     // Sums; workspace is that of the matrices in flight.
  int64_t stream_bytes = 0;
  int64_t total_bytes = 0;
  double push_bytes_per_step = 0;  // On the wire, all copies.
  double pull_bytes_per_step = 0;
  std::vector<double> flops;            // By step of the cycle.
  std::vector<double> compute_seconds;  // By step of the cycle.

  // State, staging, weights, push, payload and what shards hold; 0 without parameters.
  double BytesPerParameter() const;
};

struct StepLoad {
  double flops = 0;            // Of all servers.
  double compute_seconds = 0;  // Of the slowest server.
  double balance = 1;  // Slowest server's compute time / mean; 1 where there is nothing to do.
  double exposed_seconds = 0;
};

struct Explanation {
  std::vector<ServerLoad> servers;
  std::vector<StepLoad> cycle;  // Steps 1, 2, ... of the cycle.
  int64_t elements = 0;
  int64_t total_bytes = 0;
  double push_bytes_per_step = 0;
  double pull_bytes_per_step = 0;
  double exposed_seconds = 0;  // Mean over the cycle.
  double balance = 1;          // Worst over the cycle.

  int32_t largest_matrix = -1;        // The dearest to refresh; -1 for an empty model.
  double largest_matrix_seconds = 0;  // Its refresh on a server of speed 1.
  // Fewest servers of speed 1 with no exposed time in any step; unset where kMaxServersTried do not
  // do it.
  std::optional<int64_t> servers_to_hide;

  double trainer_seconds = 0;          // The same rules in every trainer, mean over the cycle.
  double trainer_sharded_seconds = 0;  // Shared out among the trainers, with an all-gather.
};

inline constexpr int64_t kMaxServersTried = 1024;

// REQUIRES: `plan` is MakePlan(request), every number of `machine` is positive (backward_seconds
// may be 0).
Explanation ExplainPlan(const PlanRequest& request, const Plan& plan, const Machine& machine);

}  // namespace stiefel

#endif  // STIEFEL_PLAN_EXPLAIN_H_
