// Which shards change owner when servers are added or drained: a pure function, so that every
// leader decides the same. Cuts and phases stay as they are (DESIGN section 7).
#ifndef STIEFEL_CLIENT_REPLAN_H_
#define STIEFEL_CLIENT_REPLAN_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "plan/matrix.h"
#include "plan/memory.h"

namespace stiefel {

struct MoveShard {
  PlanMatrix shard;             // rows and cols of the shard
  int64_t phase = 0;            // within the rule's period
  int64_t pushed_elements = 0;  // of all trainers, in a step
  int32_t with = -1;            // a shard that belongs on the same server (polora's pair); -1: none
};

struct MoveServer {
  std::string address;
  double speed = 1;          // relative, > 0
  int64_t memory_bytes = 0;  // what the server may use in all
  bool drain = false;        // is to be emptied
  bool fill = false;         // was added: is to take over a fair share
};

struct MoveRequest {
  std::vector<MoveShard> shards;
  std::vector<int32_t> owners;  // now, by shard: index into servers
  std::vector<MoveServer> servers;
  MemoryOptions memory;
  // State and weights that may change servers at once; one shard (pair) always may.
  int64_t max_bytes = 0;
};

struct MovePlan {
  std::vector<int32_t> owners;  // after the move
  int64_t shards_moved = 0;
  int64_t bytes_moved = 0;
  bool complete = false;  // drained servers own nothing, and added ones take no more
};

// Shards leave drained servers, dearest first, each for where it is done soonest; then, within what
// is left of max_bytes, shards go to the added servers while the steps of a cycle get shorter by
// it. Everything else stays where it is. Calling it again with the outcome goes on where it
// stopped, until it is complete.
//
// INVALID_ARGUMENT: nothing but drained servers, an owner or pair outside the lists;
// RESOURCE_EXHAUSTED, with the numbers: what leaves the drained servers fits nowhere, all of it
// counted, whatever max_bytes.
absl::StatusOr<MovePlan> PlanMove(const MoveRequest& request);

}  // namespace stiefel

#endif  // STIEFEL_CLIENT_REPLAN_H_
