// What a RunMachine asks its host to do. Actions are performed in order, after the event that
// caused them, under the same lock.
#ifndef STIEFEL_SERVER_ACTIONS_H_
#define STIEFEL_SERVER_ACTIONS_H_

#include <cstdint>
#include <memory>
#include <string>
#include <variant>
#include <vector>

#include "absl/status/status.h"
#include "proto/protocol.h"
#include "stiefel/v1/optimizer.pb.h"

namespace stiefel {

class RunSpec;

namespace action {

// On the control stream of this incarnation of the rank; discarded where it has none (it is sent
// again on reconnect).
struct SendControl {
  int32_t rank;
  Incarnation to;
  v1::ServerMessage message;
};

// Ends a JoinRun call.
struct AnswerJoin {
  uint64_t token;
  absl::Status status;
  v1::JoinRunResponse response;
};

// Start to grant credits to a rank that has begun the open attempt.
struct GrantCredit {
  int32_t rank;
};

// All gradients of the matrix are here: compute it, then report OnComputed with the same step,
// attempt and round. The open attempt (RunMachine::attempt) has weights, absent blocks and common
// fields; `scale` multiplies the gradient (1 in round 0).
struct Compute {
  int32_t matrix;
  int64_t step;
  int32_t attempt;
  int32_t round;
  double scale;
};

// The matrix of the open attempt is computed (or absent): send its update to every rank that pulls
// from it.
struct Publish {
  int32_t matrix;
};

// The rank joined or connected again: send it the deltas (weights) of the kept step unless it has
// applied that step (RankState::applied), and what the open attempt has computed. A rank that
// joined with nothing (RankState::needs_weights) gets, before these, chunks of type WEIGHTS_AT with
// the weights after RunMachine::consumed_step, once they are ready; Finish comes first.
struct Resend {
  int32_t rank;
};

// An attempt ended. Take the staged state in (commit, but for skipped matrices) or leave it; when
// nothing reads or writes this attempt's gradients any more, report OnSettled.
struct Finish {
  v1::Decide decision;
};

// The kept deltas are needed by nobody any more.
struct FreeDeltas {
  int64_t step;
};

// The rank has a newer incarnation: end the older one's streams.
struct Fence {
  int32_t rank;
  Incarnation older;
};

// ---- change of placement (rules 15 and 16)

// `next` is prepared: make room for the shards that this server gains, and fetch their state as of
// `after_step` from their owners in the placement in force. Then report OnPrepared, also where
// nothing is gained.
struct FetchState {
  std::shared_ptr<const RunSpec> next;
  int64_t after_step;
};

// What was prepared for this epoch is not wanted any more: stop fetching, free it. No OnPrepared.
struct DropPrepared {
  int64_t epoch;
};

// The prepared placement is in force: what was fetched comes in, lost shards go out, and all
// streams are closed, after what was sent before this. What was received for (step, attempt) is
// discarded: report OnSettled with both when nothing reads or writes gradient buffers any more.
// Null: this server has no part in the new placement.
struct SwitchPlacement {
  std::shared_ptr<const RunSpec> next;
  int64_t step;
  int32_t attempt;
};

// The run is over: release everything.
struct EndRun {
  std::string reason;
};

}  // namespace action

using Action =
    std::variant<action::SendControl, action::AnswerJoin, action::GrantCredit, action::Compute,
                 action::Publish, action::Resend, action::Finish, action::FreeDeltas, action::Fence,
                 action::FetchState, action::DropPrepared, action::SwitchPlacement, action::EndRun>;
using Actions = std::vector<Action>;

}  // namespace stiefel

#endif  // STIEFEL_SERVER_ACTIONS_H_
