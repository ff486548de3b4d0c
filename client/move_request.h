// A run and its servers in the form that PlanMove takes.
#ifndef STIEFEL_CLIENT_MOVE_REQUEST_H_
#define STIEFEL_CLIENT_MOVE_REQUEST_H_

#include <cstdint>
#include <set>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "client/layout.h"
#include "client/replan.h"
#include "stiefel/v1/optimizer.pb.h"

namespace stiefel {

// What an operator asked for.
struct MoveWish {
  std::set<std::string> add;
  std::set<std::string> drain;

  bool empty() const { return add.empty() && drain.empty(); }
  void Clear() {
    add.clear();
    drain.clear();
  }
};

// `opened`: the run under the placement in force. `addresses`: its servers, in order, then those
// that may come in; `infos` what they say. INVALID_ARGUMENT: one that is to come in holds another
// run, or is told to stop.
absl::StatusOr<MoveRequest> MakeMoveRequest(const Layout& layout, const v1::OpenRunRequest& opened,
                                            const std::vector<std::string>& addresses,
                                            const std::vector<v1::ServerInfo>& infos,
                                            const MoveWish& wish);

// The outcome as a placement: servers that are drained and own nothing are left out.
v1::Placement PlacementOf(const MoveRequest& request, const MovePlan& plan, int64_t epoch);

// `opened` under another placement.
void SetPlacement(const v1::Placement& placement, v1::OpenRunRequest* opened);
// That of `opened`.
v1::Placement PlacementOf(const v1::OpenRunRequest& opened);

}  // namespace stiefel

#endif  // STIEFEL_CLIENT_MOVE_REQUEST_H_
