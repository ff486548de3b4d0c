// What both ends of the step protocol share: comparing incarnations, the protocol version, and the
// policy by which a test switches a rule off.
#ifndef STIEFEL_PROTO_PROTOCOL_H_
#define STIEFEL_PROTO_PROTOCOL_H_

#include <cstdint>
#include <string>
#include <tuple>

#include "stiefel/v1/optimizer.pb.h"

namespace stiefel {

inline constexpr int32_t kProtocolVersion = 1;
inline constexpr char kSoftwareVersion[] = "0.1.0";

// One whole gRPC message, header included.
inline constexpr int64_t kMaxMessageBytes = 4 << 20;
// Payload of one chunk: leaves room for the header of a chunk of many pieces.
inline constexpr int64_t kMaxChunkPayloadBytes = kMaxMessageBytes - (256 << 10);

// Incarnations are compared as the pair (generation, id); a default one is below every real one.
struct Incarnation {
  int64_t generation = 0;
  uint64_t id = 0;

  Incarnation() = default;
  Incarnation(int64_t g, uint64_t i) : generation(g), id(i) {}
  explicit Incarnation(const v1::Incarnation& wire)
      : generation(wire.generation()), id(wire.id()) {}

  v1::Incarnation ToProto() const {
    v1::Incarnation wire;
    wire.set_generation(generation);
    wire.set_id(id);
    return wire;
  }
  std::string DebugString() const {
    return "generation " + std::to_string(generation) + " id " + std::to_string(id % 100000);
  }
  friend bool operator==(const Incarnation& a, const Incarnation& b) {
    return std::tie(a.generation, a.id) == std::tie(b.generation, b.id);
  }
  friend bool operator!=(const Incarnation& a, const Incarnation& b) { return !(a == b); }
  friend bool operator<(const Incarnation& a, const Incarnation& b) {
    return std::tie(a.generation, a.id) < std::tie(b.generation, b.id);
  }
};

// The rules of docs/PROTOCOL.md, each of which the model test can switch off to show that it is
// needed. Production code always runs the default.
struct ProtocolPolicy {
  bool match_names = true;  // 1: messages of another step, attempt or round are discarded
  bool fence_leader =
      true;  // 2: a smaller incarnation is refused, a larger one waits for the old one's end
  bool check_applied = true;   // 3: JoinRun's applied step is checked against the record
  bool cancel_on_join = true;  // 3: JoinRun cancels what the earlier incarnation asserted
  bool drop_on_rejoin = true;  // 4: a rank that had begun the open attempt and comes back drops it
  bool resend_deltas = true;   // 5: after a join or reconnect the kept deltas are sent again
  bool vote_after_all = true;  // 6: a vote waits for BeginStep and EndPush of all ranks
  bool seal_on_vote = true;    // 6: nothing but Decide ends a voted attempt
  bool compare_incarnations = true;  // 6: the leader drops if the votes name different incarnations
  bool all_votes = true;             // 7: the leader waits for the votes of all servers
  bool one_decision =
      true;  // 7: and decides nothing further until the last decision was acknowledged by all
  bool first_decision = true;  // 8: the first decision is kept, an unequal second one fails the run
  bool match_round = true;     // 9: a trainer applies only deltas of the decided attempt and round
  bool complete_deltas = true;  // 9: and only complete ones
  bool resend_votes = true;     // 10: votes, drops and decisions are sent again on reconnect
  bool hold_ahead = true;       // 11: BeginStep ahead of the record is held
  bool keep_deltas =
      true;  // 11: deltas are freed only when every living rank has begun the next step
  bool take_over_all = true;    // 12: the new leader decides nothing before all servers accepted it
  bool complete_found = true;   // 13: the new leader completes a decision or rescale found anywhere
  bool complete_switch = true;  // 13: and a Switch found anywhere
  bool cancel_found = true;     // 13: else it cancels every Prepare
  bool release_timeout =
      true;                  // 14: a run without leases keeps its records for the takeover timeout
  bool decide_first = true;  // 15: what is sealed is decided before the placement changes
  bool fresh_epochs = true;  // 15: an epoch number that was prepared is never used again
  bool withhold_begin = true;  // 16: the leader begins no step between Prepare and the last answer
  bool prepare_all = true;     // 16: Switch waits until every server is prepared
  bool applied_first = true;   // 16: and a server until all ranks have applied the step before
};

}  // namespace stiefel

#endif  // STIEFEL_PROTO_PROTOCOL_H_
