// The leader's side of the step protocol (rank 0): takes in votes, decides, and finishes what a
// dead predecessor began. A pure object: events in, messages out; copyable, with a canonical byte
// form. docs/PROTOCOL.md rules 7, 8, 12 and 13.
//
//   votes of round 0 from all servers --> skip | drop | commit, or Rescale --> votes of round 1 -->
//   skip | drop | commit one decision at a time: sent to all servers, sent again on reconnect,
//   acknowledged by all before the next
#ifndef STIEFEL_CLIENT_LEADER_MACHINE_H_
#define STIEFEL_CLIENT_LEADER_MACHINE_H_

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "proto/protocol.h"
#include "stiefel/v1/optimizer.pb.h"

namespace stiefel {

// A control message for one server; its Sender is filled in by the host.
struct LeaderSend {
  int32_t server;
  v1::TrainerMessage message;
};
using LeaderSends = std::vector<LeaderSend>;

class LeaderMachine {
 public:
  // A leader that opened the run itself: may decide from the first vote on.
  static LeaderMachine Opened(int32_t servers, int64_t start_step, ProtocolPolicy policy = {});
  // A leader that takes a run over: decides nothing before OnRecord was called for every server
  // (rule 12).
  static LeaderMachine TakingOver(int32_t servers, ProtocolPolicy policy = {});

  // A server's answer to TakeOver.
  void OnRecord(int32_t server, const v1::TakeOverResponse& record, LeaderSends* sends);

  void OnVote(int32_t server, const v1::Vote& vote, LeaderSends* sends);
  void OnDrop(int32_t server, const v1::Drop& drop, LeaderSends* sends);
  void OnDecideAck(int32_t server, const v1::DecideAck& ack, LeaderSends* sends);
  // The control stream to the server is up (again): sends what it has not acknowledged (rule 10).
  void OnServerUp(int32_t server, LeaderSends* sends);

  // All servers accepted this leader and acknowledged what it found to complete: it may rejoin
  // (rule 13).
  bool ready() const { return records_missing_ == 0 && !outstanding_; }
  // For messages: what the leader waits for; empty if nothing.
  std::string Awaited() const;
  std::string CanonicalBytes() const;

 private:
  using Key = std::pair<int64_t, int32_t>;  // step, attempt

  struct ServerVotes {
    std::optional<v1::Vote> round0;
    std::optional<v1::Vote> round1;
    std::optional<v1::Drop> drop;
  };
  struct Open {
    std::vector<ServerVotes> servers;
    std::optional<v1::Rescale> rescale;
  };
  struct Outstanding {
    v1::Decide decision;
    std::vector<bool> acknowledged;
  };

  LeaderMachine(int32_t servers, ProtocolPolicy policy);

  bool Decided(const Key& key) const { return key <= decided_; }
  Open& OpenAt(const Key& key);
  void CompleteFound(LeaderSends* sends);
  void TryDecide(LeaderSends* sends);
  // The next decision on an attempt, or a Rescale (sent from here); nothing while votes are
  // missing.
  std::optional<v1::Decide> Judge(const Key& key, Open* open, LeaderSends* sends);
  std::optional<v1::Decide> JudgeVotes(const Key& key, const std::vector<const v1::Vote*>& votes,
                                       bool rescaled, Open* open, LeaderSends* sends);
  void SendDecision(LeaderSends* sends);
  void SendRescale(const v1::Rescale& rescale, LeaderSends* sends) const;
  void Settle(const v1::Decide& decision);

  int32_t servers_;
  ProtocolPolicy policy_;
  int32_t records_missing_ = 0;
  std::vector<std::optional<v1::TakeOverResponse>> records_;
  Key decided_;  // everything up to here is decided
  std::optional<Outstanding> outstanding_;
  std::map<Key, Open> open_;
};

}  // namespace stiefel

#endif  // STIEFEL_CLIENT_LEADER_MACHINE_H_
