#ifndef STIEFEL_CLIENT_EXAMPLES_BYTE_LM_SERVER_FIGURES_H_
#define STIEFEL_CLIENT_EXAMPLES_BYTE_LM_SERVER_FIGURES_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "stiefel/v1/status.pb.h"

namespace stiefel::byte_lm {

// What a group of servers says about a run, added up.
struct ServerFigures {
  // Of all optimizer state, by name of the matrix: the same however many servers share it.
  uint64_t state_hash = 0;
  double compute_seconds = 0;  // sum over servers
  int64_t skipped_steps = 0;   // by the server that counts most
  int64_t dropped_attempts = 0;
  int64_t resident_bytes = 0;  // sum over servers
};

// The sum over one answer of each server. NOT_FOUND if one does not hold `run`; INTERNAL if a
// matrix has no hash.
absl::StatusOr<ServerFigures> AddFigures(const std::vector<v1::ServerStatus>& statuses,
                                         const std::string& run);

// Asks every server, again until it has decided step `step` of `run`. REQUIRES: the run is still
// open. DEADLINE_EXCEEDED after `timeout`, UNAVAILABLE, both naming the server; and AddFigures'.
absl::StatusOr<ServerFigures> CollectFigures(const std::vector<std::string>& servers,
                                             const std::string& run, int64_t step,
                                             absl::Duration timeout);

}  // namespace stiefel::byte_lm

#endif  // STIEFEL_CLIENT_EXAMPLES_BYTE_LM_SERVER_FIGURES_H_
