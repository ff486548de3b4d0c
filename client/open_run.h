// How a rank gets into a run: asking the servers, planning and opening, taking over, joining.
#ifndef STIEFEL_CLIENT_OPEN_RUN_H_
#define STIEFEL_CLIENT_OPEN_RUN_H_

#include <cstdint>
#include <optional>
#include <vector>

#include "absl/status/statusor.h"
#include "client/calls.h"
#include "client/layout.h"
#include "proto/protocol.h"
#include "stiefel/v1/optimizer.pb.h"

namespace stiefel {

// What the servers said before anything was changed there.
struct Survey {
  std::vector<v1::ServerInfo> infos;
  // The run of this name, where a server holds it.
  std::vector<std::optional<v1::ServerInfo::HeldRun>> held;
  // Above every generation of this rank that any server has seen.
  int64_t generation = 1;

  bool HeldAnywhere() const;
  bool HeldEverywhere() const;
};

// Asks every server once. UNAVAILABLE (or what gRPC says) names the one that did not answer by the
// deadline. FAILED_PRECONDITION: two servers hold runs of this name with different uids.
absl::StatusOr<Survey> AskServers(const Servers& servers, const Layout& layout,
                                  int64_t deadline_micros);

// Of a rank that is not the leader: asks until all servers hold the run. DEADLINE_EXCEEDED names a
// server that does not.
absl::StatusOr<Survey> AwaitOpen(const Servers& servers, const Layout& layout,
                                 int64_t connect_deadline_micros, int64_t deadline_micros);

// Leader: plans the placement and opens the run everywhere; where that fails on one server it is
// closed again on the others. Returns what it was opened with (as the last server).
absl::StatusOr<v1::OpenRunRequest> OpenRun(const Servers& servers, const Layout& layout,
                                           const Survey& survey, uint64_t run_uid,
                                           const Incarnation& leader, int64_t deadline_micros);

// Leader, of a run that some server holds: fences the older leader on those that do, opens the run
// with the same request on the rest, and returns the records of all. ALREADY_EXISTS at the deadline
// while the older leader lives. FAILED_PRECONDITION: some server has decided a step and another
// does not hold the run.
absl::StatusOr<std::vector<v1::TakeOverResponse>> TakeOver(const Servers& servers,
                                                           const Layout& layout,
                                                           const Survey& survey,
                                                           const Incarnation& leader,
                                                           int64_t deadline_micros);

// Joins on all servers. FAILED_PRECONDITION: they disagree, or have another list of servers.
absl::StatusOr<std::vector<v1::JoinRunResponse>> JoinRun(const Servers& servers,
                                                         const Layout& layout,
                                                         const Incarnation& incarnation,
                                                         int64_t deadline_micros);

}  // namespace stiefel

#endif  // STIEFEL_CLIENT_OPEN_RUN_H_
