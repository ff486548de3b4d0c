// How a rank gets into a run: asking the servers, planning and opening, taking over, joining.
#ifndef STIEFEL_CLIENT_OPEN_RUN_H_
#define STIEFEL_CLIENT_OPEN_RUN_H_

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
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

// And on the servers that records name and that are not among *servers: those that were to come in,
// or that the run moved to or from. Those that do not hold it are left out, and so are those that
// have no part any more (they were emptied) and cannot be reached: they may be gone for good.
// UNAVAILABLE: one that the run needs cannot be reached.
absl::Status TakeOverOthers(const Layout& layout, const Incarnation& leader,
                            int64_t deadline_micros,
                            const std::function<Servers(const std::vector<std::string>&)>& connect,
                            Servers* servers, std::vector<v1::TakeOverResponse>* records);

// Joins on all servers, `applied` being the last step that this rank has applied. They may answer
// under different placements.
absl::StatusOr<std::vector<v1::JoinRunResponse>> JoinRun(const Servers& servers,
                                                         const Layout& layout,
                                                         const Incarnation& incarnation,
                                                         std::optional<int64_t> applied,
                                                         int64_t deadline_micros);

// FAILED_PRECONDITION: they disagree, have another list of servers, or hold another model.
absl::Status CheckJoined(const Servers& servers, const Layout& layout,
                         const std::vector<v1::JoinRunResponse>& answers);

// The servers that the run is on as far as any of those given knows, where it was moved away from
// them; else those given. Errors are left to whoever asks them next.
std::vector<std::string> LocateRun(const Servers& given, const std::string& run,
                                   int64_t deadline_micros);

}  // namespace stiefel

#endif  // STIEFEL_CLIENT_OPEN_RUN_H_
