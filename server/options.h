#ifndef STIEFEL_SERVER_OPTIONS_H_
#define STIEFEL_SERVER_OPTIONS_H_

#include <cstdint>
#include <optional>
#include <string>

#include "plan/memory.h"

namespace stiefel {

// Everything that can be chosen when a server starts; filled from the command line by main.cc.
struct ServerOptions {
  // HOST:PORT; port 0 takes a free one. Anything but loopback needs `insecure`, because the
  // protocol is not encrypted.
  std::string listen = "127.0.0.1:7770";
  bool insecure = false;

  // Processors for computing; 0: all.
  int threads = 0;
  // Matrices that are computed at once, each with its own workspace; 0: as many as threads, up
  // to 8.
  int matrices_in_flight = 0;

  // Bytes that a run may need by the formula of plan/memory.h; 0: 80 % of the machine's memory.
  int64_t memory_limit_bytes = 0;
  // Where a step's new state waits for the decision. Unset: double where the run fits, else lazy.
  std::optional<Staging> staging;

  // Gradient bytes that a rank may have under way. At least kMaxMessageBytes.
  int64_t credit_window_bytes = int64_t{32} << 20;
  // Streams of one rank, and of all; further ones are refused.
  int max_streams_per_rank = 64;
  int max_streams = 4096;

  // Where to write what was done when (common/trace.h). Empty: nowhere.
  std::string trace_file;

  // A server that is told to stop first asks its run's leader to move its shards to the other
  // servers. Where that is refused, or does not come within the grace period, it stops as alone.
  bool drain_to_peers = true;
  // How long a server that was told to stop waits for that, and for the decision of a voted step,
  // in seconds.
  double grace_seconds = 10;
  // Relative speed, for the leader's placement.
  double speed = 1;
};

}  // namespace stiefel

#endif  // STIEFEL_SERVER_OPTIONS_H_
