#include "client/leader_machine.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

namespace stiefel {
namespace {

v1::Vote MakeVote(int64_t step, int32_t attempt, int32_t matrix, double sum_squares,
                  int32_t round = 0) {
  v1::Vote vote;
  vote.set_step(step);
  vote.set_attempt(attempt);
  vote.set_round(round);
  v1::Vote::Matrix* entry = vote.add_matrices();
  entry->set_matrix(matrix);
  entry->set_sum_squares(sum_squares);
  for (int rank = 0; rank < 2; ++rank) {
    *vote.add_summed() = Incarnation(1, 100 + rank).ToProto();
    vote.add_local_sum_squares(0);
    vote.add_local_finite(true);
  }
  vote.set_commit(v1::WHOLE_STEP);
  return vote;
}

v1::DecideAck Ack(int64_t step, int32_t attempt = 0) {
  v1::DecideAck ack;
  ack.set_step(step);
  ack.set_attempt(attempt);
  return ack;
}

// The decision sent to each of `servers`, which must be one and the same; fails the test otherwise.
v1::Decide TheDecision(const LeaderSends& sends, size_t servers = 2) {
  EXPECT_EQ(sends.size(), servers);
  v1::Decide decision;
  for (const LeaderSend& send : sends) {
    EXPECT_TRUE(send.message.has_decide());
    decision = send.message.decide();
    EXPECT_EQ(decision.SerializeAsString(), sends[0].message.decide().SerializeAsString());
  }
  return decision;
}

TEST(LeaderMachine, CommitsWhenAllServersVoted) {
  LeaderMachine leader = LeaderMachine::Opened(2, 1);
  LeaderSends sends;
  leader.OnVote(1, MakeVote(1, 0, 1, 9), &sends);
  leader.OnVote(1, MakeVote(1, 0, 1, 9), &sends);  // again
  EXPECT_TRUE(sends.empty());
  EXPECT_EQ(leader.Awaited(), "vote of server 0 on step 1");
  leader.OnVote(0, MakeVote(1, 0, 0, 16), &sends);
  const v1::Decide decision = TheDecision(sends);
  EXPECT_EQ(decision.outcome(), v1::COMMIT);
  EXPECT_EQ(decision.grad_norm(), 5);
  EXPECT_EQ(leader.Awaited(), "server 0 to record the decision on step 1");
}

TEST(LeaderMachine, NormIsSummedInRegistrationOrderAndCountsLocalSumsOnce) {
  LeaderMachine leader = LeaderMachine::Opened(2, 1);
  LeaderSends sends;
  v1::Vote a = MakeVote(1, 0, 1, 1);
  v1::Vote b = MakeVote(1, 0, 0, 1e16);
  for (v1::Vote* vote : {&a, &b}) vote->set_local_sum_squares(1, 3);
  leader.OnVote(0, a, &sends);
  leader.OnVote(1, b, &sends);
  EXPECT_EQ(TheDecision(sends).grad_norm(), std::sqrt(1e16 + 1.0 + 3.0));
}

TEST(LeaderMachine, OneDecisionAtATime) {
  LeaderMachine leader = LeaderMachine::Opened(2, 1);
  LeaderSends sends;
  for (int server = 0; server < 2; ++server)
    leader.OnVote(server, MakeVote(1, 0, server, 1), &sends);
  leader.OnDecideAck(0, Ack(1), &sends);
  sends.clear();
  for (int server = 0; server < 2; ++server)
    leader.OnVote(server, MakeVote(2, 0, server, 1), &sends);
  EXPECT_TRUE(sends.empty()) << "server 1 has not acknowledged step 1";
  leader.OnDecideAck(1, Ack(2), &sends);  // of another step
  EXPECT_TRUE(sends.empty());
  leader.OnDecideAck(1, Ack(1), &sends);
  EXPECT_EQ(TheDecision(sends).step(), 2);
}

TEST(LeaderMachine, DropOfOneServerDropsAtOnce) {
  LeaderMachine leader = LeaderMachine::Opened(2, 1);
  LeaderSends sends;
  v1::Drop drop;
  drop.set_step(1);
  drop.set_reason("rank 1 is gone");
  leader.OnDrop(1, drop, &sends);
  EXPECT_EQ(TheDecision(sends).outcome(), v1::DROP);
  EXPECT_EQ(TheDecision(sends).reason(), "rank 1 is gone");
  sends.clear();
  leader.OnVote(0, MakeVote(1, 0, 0, 1), &sends);  // late
  EXPECT_TRUE(sends.empty());
}

TEST(LeaderMachine, VotesThatSummedTwoLivesOfARankAreDropped) {
  LeaderMachine leader = LeaderMachine::Opened(2, 1);
  LeaderSends sends;
  leader.OnVote(0, MakeVote(1, 0, 0, 1), &sends);
  v1::Vote other = MakeVote(1, 0, 1, 1);
  *other.mutable_summed(1) = Incarnation(2, 7).ToProto();
  leader.OnVote(1, other, &sends);
  EXPECT_EQ(TheDecision(sends).outcome(), v1::DROP);
  EXPECT_NE(TheDecision(sends).reason().find("rank 1"), std::string::npos);
}

TEST(LeaderMachine, NonFiniteSkipsTheStepOrOnlyTheMatrix) {
  for (const bool per_matrix : {false, true}) {
    LeaderMachine leader = LeaderMachine::Opened(2, 1);
    LeaderSends sends;
    for (int server = 0; server < 2; ++server) {
      v1::Vote vote = MakeVote(1, 0, server, 4);
      if (server == 1) {
        vote.mutable_matrices(0)->set_nonfinite_gradient(3);
        vote.mutable_matrices(0)->set_explanation("3 non-finite elements in m1 from rank 1");
        vote.mutable_matrices(0)->set_sum_squares(INFINITY);
      }
      vote.set_commit(per_matrix ? v1::PER_MATRIX : v1::WHOLE_STEP);
      leader.OnVote(server, vote, &sends);
    }
    const v1::Decide decision = TheDecision(sends);
    EXPECT_EQ(decision.outcome(), per_matrix ? v1::COMMIT : v1::SKIP);
    EXPECT_EQ(decision.skipped_matrices_size(), per_matrix ? 1 : 0);
    EXPECT_EQ(decision.grad_norm(), 2) << "a non-finite matrix is left out of the norm";
    EXPECT_NE(decision.reason().find("from rank 1"), std::string::npos);
  }
}

// Shards 1 and 2 are those of parameter 1: what is not finite in one leaves both out, of the step
// and of the norm.
TEST(LeaderMachine, ShardsOfAMatrixAreSkippedTogether) {
  v1::OpenRunRequest opened;
  for (int p = 0; p < 3; ++p) opened.add_parameters();
  opened.add_cuts()->set_parameter(1);
  opened.mutable_cuts(0)->add_at(4);
  LeaderMachine leader = LeaderMachine::Opened(2, 1);
  leader.KnowShards(opened);
  LeaderSends sends;
  v1::Vote first = MakeVote(1, 0, 0, 16);
  *first.add_matrices() = MakeVote(1, 0, 2, 100).matrices(0);
  v1::Vote second = MakeVote(1, 0, 1, 0);
  second.mutable_matrices(0)->set_nonfinite_gradient(3);
  *second.add_matrices() = MakeVote(1, 0, 3, 9).matrices(0);
  first.set_commit(v1::PER_MATRIX);
  second.set_commit(v1::PER_MATRIX);
  leader.OnVote(0, first, &sends);
  leader.OnVote(1, second, &sends);
  const v1::Decide decision = TheDecision(sends);
  EXPECT_EQ(decision.outcome(), v1::COMMIT);
  EXPECT_EQ(decision.grad_norm(), 5);
  ASSERT_EQ(decision.skipped_matrices_size(), 2);
  EXPECT_EQ(decision.skipped_matrices(0), 1);
  EXPECT_EQ(decision.skipped_matrices(1), 2);
}

TEST(LeaderMachine, NonFiniteLocalGradientNamesTheRank) {
  LeaderMachine leader = LeaderMachine::Opened(1, 1);
  LeaderSends sends;
  v1::Vote vote = MakeVote(1, 0, 0, 4);
  vote.set_local_finite(1, false);
  leader.OnVote(0, vote, &sends);
  EXPECT_EQ(TheDecision(sends, 1).outcome(), v1::SKIP);
  EXPECT_NE(TheDecision(sends, 1).reason().find("rank 1"), std::string::npos);
}

TEST(LeaderMachine, ClipsByASecondRound) {
  LeaderMachine leader = LeaderMachine::Opened(2, 1);
  LeaderSends sends;
  for (int server = 0; server < 2; ++server) {
    v1::Vote vote = MakeVote(1, 0, server, server == 0 ? 9 : 16);
    vote.set_max_grad_norm(2.5);
    leader.OnVote(server, vote, &sends);
  }
  ASSERT_EQ(sends.size(), 2u);
  EXPECT_EQ(sends[0].message.rescale().scale(), 0.5);
  sends.clear();
  leader.OnServerUp(1, &sends);  // rule 10
  ASSERT_EQ(sends.size(), 1u);
  EXPECT_TRUE(sends[0].message.has_rescale());
  sends.clear();
  for (int server = 0; server < 2; ++server) {
    v1::Vote vote = MakeVote(1, 0, server, server == 0 ? 9 : 16, 1);
    vote.set_max_grad_norm(2.5);
    EXPECT_TRUE(sends.empty());
    leader.OnVote(server, vote, &sends);
  }
  EXPECT_EQ(TheDecision(sends).round(), 1);
  EXPECT_EQ(TheDecision(sends).grad_norm(), 5) << "the norm before clipping";
}

TEST(LeaderMachine, AFailedRoundOneIsDropped) {
  LeaderMachine leader = LeaderMachine::Opened(2, 1);
  LeaderSends sends;
  for (int server = 0; server < 2; ++server) {
    v1::Vote vote = MakeVote(1, 0, server, 16);
    vote.set_max_grad_norm(1);
    leader.OnVote(server, vote, &sends);
  }
  sends.clear();
  v1::Vote failed = MakeVote(1, 0, 1, 16, 1);
  failed.set_failed(true);
  failed.set_failure("no workspace");
  leader.OnVote(1, failed, &sends);
  EXPECT_EQ(TheDecision(sends).outcome(), v1::DROP);
  EXPECT_EQ(TheDecision(sends).reason(), "no workspace");
}

// Rule 10.
TEST(LeaderMachine, SendsAgainWhatAServerHasNotAcknowledged) {
  LeaderMachine leader = LeaderMachine::Opened(2, 1);
  LeaderSends sends;
  for (int server = 0; server < 2; ++server)
    leader.OnVote(server, MakeVote(1, 0, server, 1), &sends);
  leader.OnDecideAck(0, Ack(1), &sends);
  sends.clear();
  leader.OnServerUp(0, &sends);
  EXPECT_TRUE(sends.empty());
  leader.OnServerUp(1, &sends);
  ASSERT_EQ(sends.size(), 1u);
  EXPECT_EQ(sends[0].server, 1);
}

v1::TakeOverResponse Record(int64_t consumed, int64_t open_step, int32_t open_attempt) {
  v1::TakeOverResponse record;
  record.set_consumed_step(consumed);
  record.set_open_step(open_step);
  record.set_open_attempt(open_attempt);
  if (consumed > 0) {
    record.mutable_last_consumed()->set_step(consumed);
    record.mutable_last_consumed()->set_outcome(v1::COMMIT);
    *record.mutable_last_attempt() = record.last_consumed();
  }
  return record;
}

// The record as server `server` of two gives it, at placement 1 unless it says otherwise.
void Answer(LeaderMachine* leader, int32_t server, v1::TakeOverResponse record,
            LeaderSends* sends) {
  if (!record.has_opened()) {
    for (const char* address : {"s0", "s1"}) record.mutable_opened()->add_servers(address);
    record.mutable_opened()->set_server_index(server);
  }
  if (record.placement_epoch() == 0) record.set_placement_epoch(1);
  record.set_largest_epoch(
      std::max(record.placement_epoch(), record.prepare().placement().epoch()));
  leader->OnRecord(server, record, sends);
}

// Rules 12 and 13.
TEST(LeaderMachineTakeOver, CompletesADecisionFoundOnOneServer) {
  LeaderMachine leader = LeaderMachine::TakingOver(2);
  LeaderSends sends;
  v1::TakeOverResponse behind = Record(0, 1, 0);
  *behind.mutable_vote_round0() = MakeVote(1, 0, 1, 1);
  Answer(&leader, 1, behind, &sends);
  EXPECT_TRUE(sends.empty());
  EXPECT_FALSE(leader.ready());
  EXPECT_EQ(leader.Awaited(), "TakeOver answers of 1 servers, first 0");
  Answer(&leader, 0, Record(1, 2, 0), &sends);
  EXPECT_EQ(TheDecision(sends).step(), 1);
  EXPECT_FALSE(leader.ready());
  leader.OnDecideAck(0, Ack(1), &sends);
  leader.OnDecideAck(1, Ack(1), &sends);
  EXPECT_TRUE(leader.ready());
}

TEST(LeaderMachineTakeOver, CompletesTheNewestOfSeveral) {
  LeaderMachine leader = LeaderMachine::TakingOver(2);
  LeaderSends sends;
  Answer(&leader, 0, Record(1, 2, 0), &sends);
  v1::TakeOverResponse ahead = Record(1, 2, 1);
  ahead.mutable_last_attempt()->set_step(2);
  ahead.mutable_last_attempt()->set_outcome(v1::DROP);
  Answer(&leader, 1, ahead, &sends);
  EXPECT_EQ(TheDecision(sends).outcome(), v1::DROP);
  EXPECT_EQ(TheDecision(sends).step(), 2);
}

TEST(LeaderMachineTakeOver, JudgesSealedVotesAfresh) {
  LeaderMachine leader = LeaderMachine::TakingOver(2);
  LeaderSends sends;
  for (int server = 0; server < 2; ++server) {
    v1::TakeOverResponse record = Record(1, 2, 0);
    *record.mutable_vote_round0() = MakeVote(2, 0, server, 1);
    Answer(&leader, server, record, &sends);
  }
  EXPECT_EQ(TheDecision(sends).step(), 1) << "what is recorded comes first";
  sends.clear();
  leader.OnDecideAck(0, Ack(1), &sends);
  leader.OnDecideAck(1, Ack(1), &sends);
  EXPECT_EQ(TheDecision(sends).step(), 2);
  EXPECT_EQ(TheDecision(sends).outcome(), v1::COMMIT);
}

TEST(LeaderMachineTakeOver, CompletesARescaleWithTheSameScale) {
  LeaderMachine leader = LeaderMachine::TakingOver(2);
  LeaderSends sends;
  for (int server = 0; server < 2; ++server) {
    v1::TakeOverResponse record = Record(0, 1, 0);
    *record.mutable_vote_round0() = MakeVote(1, 0, server, 1);
    record.mutable_vote_round0()->set_max_grad_norm(1);
    if (server == 1) {
      record.mutable_rescale()->set_step(1);
      record.mutable_rescale()->set_scale(0.125);
    }
    Answer(&leader, server, record, &sends);
  }
  ASSERT_EQ(sends.size(), 2u);
  EXPECT_EQ(sends[0].message.rescale().scale(), 0.125);
  EXPECT_EQ(sends[1].message.rescale().scale(), 0.125);
}

TEST(LeaderMachineTakeOver, ARecordCountsOnce) {
  LeaderMachine leader = LeaderMachine::TakingOver(2);
  LeaderSends sends;
  Answer(&leader, 0, Record(0, 1, 0), &sends);
  Answer(&leader, 0, Record(0, 1, 0), &sends);
  EXPECT_FALSE(leader.ready());
  Answer(&leader, 1, Record(0, 1, 0), &sends);
  EXPECT_TRUE(leader.ready()) << "nothing to complete in a run without a decision";
}

// ---------------------------------------------------------------- changes of placement

// Server 1 leaves, server 2 of the union comes in.
v1::Prepare MakePrepare(int64_t epoch = 2, int64_t after_step = 0) {
  v1::Prepare prepare;
  prepare.mutable_placement()->set_epoch(epoch);
  for (const char* address : {"s0", "s2"}) prepare.mutable_placement()->add_servers(address);
  prepare.set_after_step(after_step);
  return prepare;
}
const std::vector<bool> kNext = {true, false, true};

v1::EpochAck Said(v1::EpochAck::State state, int64_t epoch = 2, const char* reason = "") {
  v1::EpochAck ack;
  ack.set_epoch(epoch);
  ack.set_state(state);
  ack.set_reason(reason);
  return ack;
}
void AllSay(LeaderMachine* leader, v1::EpochAck::State state, LeaderSends* sends) {
  for (int32_t s = 0; s < 3; ++s) leader->OnEpochAck(s, Said(state), sends);
}
std::vector<int32_t> To(const LeaderSends& sends, v1::TrainerMessage::KindCase kind) {
  std::vector<int32_t> servers;
  for (const LeaderSend& send : sends) {
    if (send.message.kind_case() == kind) servers.push_back(send.server);
  }
  return servers;
}
using Ints = std::vector<int32_t>;

TEST(LeaderMachineMove, PreparesSwitchesAndEnds) {
  LeaderMachine leader = LeaderMachine::Opened(2, 1);
  LeaderSends sends;
  ASSERT_TRUE(leader.StartMove(MakePrepare(), kNext, &sends).ok());
  EXPECT_EQ(To(sends, v1::TrainerMessage::kPrepare), (Ints{0, 1})) << "2 is opened with moves_in";
  EXPECT_TRUE(leader.moving());
  EXPECT_FALSE(leader.ready());
  EXPECT_FALSE(leader.StartMove(MakePrepare(3), kNext, &sends).ok()) << "one is under way";
  sends.clear();
  leader.OnEpochAck(0, Said(v1::EpochAck::PREPARED), &sends);
  leader.OnEpochAck(1, Said(v1::EpochAck::PREPARED), &sends);
  leader.OnEpochAck(2, Said(v1::EpochAck::PREPARED, 9), &sends);  // of another epoch
  EXPECT_TRUE(sends.empty());
  EXPECT_EQ(leader.Awaited(), "server 2 to prepare placement 2");
  leader.OnEpochAck(2, Said(v1::EpochAck::PREPARED), &sends);
  EXPECT_EQ(To(sends, v1::TrainerMessage::kSwitchPlacement), (Ints{0, 1, 2}));
  sends.clear();
  leader.OnEpochAck(0, Said(v1::EpochAck::SWITCHED), &sends);
  leader.OnEpochAck(2, Said(v1::EpochAck::SWITCHED), &sends);
  leader.OnServerUp(0, &sends);
  EXPECT_TRUE(sends.empty());
  leader.OnServerUp(1, &sends);
  EXPECT_EQ(To(sends, v1::TrainerMessage::kSwitchPlacement), Ints{1}) << "until it answers";
  EXPECT_TRUE(leader.moving());
  leader.OnEpochAck(1, Said(v1::EpochAck::SWITCHED), &sends);
  EXPECT_FALSE(leader.moving());
  ASSERT_TRUE(leader.move_end().has_value());
  EXPECT_TRUE(leader.move_end()->switched);
  EXPECT_EQ(leader.members(), kNext);
  EXPECT_EQ(leader.largest_epoch(), 2);
}

// Rule 15.
TEST(LeaderMachineMove, WaitsUntilNothingIsLeftToDecide) {
  LeaderMachine leader = LeaderMachine::Opened(2, 1);
  LeaderSends sends;
  leader.OnVote(0, MakeVote(1, 0, 0, 1), &sends);
  leader.OnVote(1, MakeVote(1, 0, 1, 1), &sends);
  leader.OnDecideAck(0, Ack(1), &sends);
  sends.clear();
  ASSERT_TRUE(leader.StartMove(MakePrepare(2, 1), kNext, &sends).ok());
  EXPECT_TRUE(sends.empty());
  leader.OnDecideAck(1, Ack(1), &sends);
  EXPECT_EQ(To(sends, v1::TrainerMessage::kPrepare), (Ints{0, 1}));
  // A server dropped the next attempt before it heard of the move.
  sends.clear();
  v1::Drop drop;
  drop.set_step(2);
  leader.OnDrop(0, drop, &sends);
  EXPECT_EQ(To(sends, v1::TrainerMessage::kDecide), (Ints{0, 1})) << "not to the one coming in";
  sends.clear();
  AllSay(&leader, v1::EpochAck::PREPARED, &sends);
  EXPECT_TRUE(sends.empty());
  leader.OnDecideAck(0, Ack(2), &sends);
  leader.OnDecideAck(1, Ack(2), &sends);
  EXPECT_EQ(To(sends, v1::TrainerMessage::kSwitchPlacement), (Ints{0, 1, 2}));
}

// It fetches from the moment it is opened: it need not say so again once the last decision is
// acknowledged.
TEST(LeaderMachineMove, AServerThatComesInMayBePreparedFirst) {
  LeaderMachine leader = LeaderMachine::Opened(2, 1);
  LeaderSends sends;
  leader.OnVote(0, MakeVote(1, 0, 0, 1), &sends);
  leader.OnVote(1, MakeVote(1, 0, 1, 1), &sends);
  leader.OnDecideAck(0, Ack(1), &sends);
  ASSERT_TRUE(leader.StartMove(MakePrepare(2, 1), kNext, &sends).ok());
  v1::EpochAck prepared;
  prepared.set_epoch(2);
  prepared.set_state(v1::EpochAck::PREPARED);
  leader.OnEpochAck(2, prepared, &sends);
  leader.OnDecideAck(1, Ack(1), &sends);
  sends.clear();
  leader.OnEpochAck(0, prepared, &sends);
  EXPECT_TRUE(sends.empty());
  leader.OnEpochAck(1, prepared, &sends);
  EXPECT_EQ(To(sends, v1::TrainerMessage::kSwitchPlacement), (Ints{0, 1, 2}));
}

TEST(LeaderMachineMove, AFailureOrTheDeadlineCancels) {
  for (const bool deadline : {false, true}) {
    LeaderMachine leader = LeaderMachine::Opened(2, 1);
    LeaderSends sends;
    ASSERT_TRUE(leader.StartMove(MakePrepare(), kNext, &sends).ok());
    leader.OnEpochAck(0, Said(v1::EpochAck::PREPARED), &sends);
    sends.clear();
    if (deadline) {
      leader.OnMoveDeadline(&sends);
    } else {
      leader.OnEpochAck(2, Said(v1::EpochAck::FAILED, 2, "no room"), &sends);
    }
    EXPECT_EQ(To(sends, v1::TrainerMessage::kCancelPrepare), (Ints{0, 1, 2}));
    sends.clear();
    leader.OnEpochAck(1, Said(v1::EpochAck::PREPARED), &sends);  // too late
    leader.OnEpochAck(0, Said(v1::EpochAck::CANCELLED), &sends);
    EXPECT_TRUE(leader.moving());
    leader.OnEpochAck(1, Said(v1::EpochAck::CANCELLED), &sends);
    EXPECT_FALSE(leader.moving()) << "2 is not waited for: it is not in the run";
    EXPECT_FALSE(leader.move_end()->switched);
    EXPECT_EQ(
        leader.move_end()->reason,
        deadline ? "the deadline passed, awaiting server 1 to prepare placement 2" : "no room");
    EXPECT_TRUE(sends.empty());
    EXPECT_FALSE(leader.StartMove(MakePrepare(2), kNext, &sends).ok()) << "rule 15";
    EXPECT_TRUE(leader.StartMove(MakePrepare(3), kNext, &sends).ok());
  }
}

TEST(LeaderMachineMove, OnceSwitchWasSentTheDeadlineOnlyLeavesTheLeavingBehind) {
  LeaderMachine leader = LeaderMachine::Opened(2, 1);
  LeaderSends sends;
  ASSERT_TRUE(leader.StartMove(MakePrepare(), kNext, &sends).ok());
  AllSay(&leader, v1::EpochAck::PREPARED, &sends);
  leader.OnEpochAck(0, Said(v1::EpochAck::SWITCHED), &sends);
  sends.clear();
  leader.OnMoveDeadline(&sends);
  EXPECT_TRUE(sends.empty());
  EXPECT_TRUE(leader.moving()) << "server 2 takes part";
  leader.OnEpochAck(2, Said(v1::EpochAck::SWITCHED), &sends);
  EXPECT_TRUE(leader.move_end()->switched);
}

v1::TakeOverResponse Moving(int32_t server, bool switched, bool comes_in = false) {
  v1::TakeOverResponse record = Record(4, 5, 0);
  v1::OpenRunRequest* opened = record.mutable_opened();
  const v1::Prepare prepare = MakePrepare(2, 4);
  if (switched || comes_in) {
    *opened->mutable_servers() = prepare.placement().servers();
    opened->set_server_index(server == 0 ? 0 : server == 2 ? 1 : -1);
  } else {
    for (const char* address : {"s0", "s1"}) opened->add_servers(address);
    opened->set_server_index(server);
  }
  if (comes_in && !switched) {
    v1::Placement* in_force = opened->mutable_moves_in()->mutable_placement();
    in_force->set_epoch(1);
    for (const char* address : {"s0", "s1"}) in_force->add_servers(address);
  }
  record.set_placement_epoch(switched ? 2 : 1);
  if (!switched) *record.mutable_prepare() = prepare;
  if (switched || comes_in) {
    record.clear_last_consumed();
    record.clear_last_attempt();
  }
  return record;
}

// Rule 13.
TEST(LeaderMachineTakeOver, CompletesASwitchFoundAnywhere) {
  for (int32_t first = 0; first < 3; ++first) {
    LeaderMachine leader = LeaderMachine::TakingOver(3);
    LeaderSends sends;
    for (int32_t s = 0; s < 3; ++s) Answer(&leader, s, Moving(s, s == first, s == 2), &sends);
    EXPECT_EQ(To(sends, v1::TrainerMessage::kSwitchPlacement).size(), 2u) << first;
    EXPECT_EQ(sends.size(), 2u) << "decisions of before are on all servers";
    EXPECT_FALSE(leader.ready());
    for (int32_t s = 0; s < 3; ++s) leader.OnEpochAck(s, Said(v1::EpochAck::SWITCHED), &sends);
    EXPECT_TRUE(leader.ready());
    EXPECT_EQ(leader.members(), kNext);
    sends.clear();
    leader.OnVote(1, MakeVote(5, 0, 1, 1), &sends);
    leader.OnVote(0, MakeVote(5, 0, 0, 1), &sends);
    EXPECT_TRUE(sends.empty()) << "server 1 has left";
    leader.OnVote(2, MakeVote(5, 0, 1, 1), &sends);
    EXPECT_EQ(To(sends, v1::TrainerMessage::kDecide), (Ints{0, 2}));
  }
}

TEST(LeaderMachineTakeOver, ElseCancelsEveryPrepare) {
  LeaderMachine leader = LeaderMachine::TakingOver(3);
  LeaderSends sends;
  for (int32_t s = 0; s < 3; ++s) {
    v1::TakeOverResponse record = Moving(s, false, s == 2);
    if (s == 0) record.clear_prepare();  // cancelled there already
    Answer(&leader, s, record, &sends);
  }
  EXPECT_EQ(To(sends, v1::TrainerMessage::kDecide), (Ints{0, 1}));
  EXPECT_EQ(To(sends, v1::TrainerMessage::kCancelPrepare), (Ints{1, 2}));
  leader.OnDecideAck(0, Ack(4), &sends);
  leader.OnDecideAck(1, Ack(4), &sends);
  EXPECT_FALSE(leader.ready());
  leader.OnEpochAck(1, Said(v1::EpochAck::CANCELLED), &sends);
  EXPECT_TRUE(leader.ready());
  EXPECT_EQ(leader.members(), (std::vector<bool>{true, true, false}));
  EXPECT_EQ(leader.largest_epoch(), 2);
}

// Found by the model test: the server that had left was not waited for, and the next move was
// prepared when the leader died; its successor switched the prepared server too.
TEST(LeaderMachineTakeOver, APrepareAfterASwitchThatALeavingServerMissedIsCancelled) {
  LeaderMachine leader = LeaderMachine::TakingOver(3);
  LeaderSends sends;
  for (int32_t s = 0; s < 3; ++s) {
    v1::TakeOverResponse record = Moving(s, s != 1, s == 2);
    if (s != 1) *record.mutable_prepare() = MakePrepare(3, 4);
    Answer(&leader, s, record, &sends);
  }
  EXPECT_TRUE(To(sends, v1::TrainerMessage::kSwitchPlacement).empty());
  EXPECT_EQ(To(sends, v1::TrainerMessage::kCancelPrepare), (Ints{0, 2}));
  EXPECT_TRUE(leader.Leads(0) && leader.Leads(2));
  EXPECT_FALSE(leader.Leads(1)) << "it left, and nothing is to be completed there";
  leader.OnEpochAck(0, Said(v1::EpochAck::CANCELLED, 3), &sends);
  leader.OnEpochAck(2, Said(v1::EpochAck::CANCELLED, 3), &sends);
  EXPECT_TRUE(leader.ready());
  EXPECT_EQ(leader.members(), kNext);
}

TEST(LeaderMachineTakeOver, AServerThatWasNeverPreparedIsAnError) {
  LeaderMachine leader = LeaderMachine::TakingOver(3);
  LeaderSends sends;
  v1::TakeOverResponse older = Moving(0, false);
  older.clear_prepare();
  Answer(&leader, 0, older, &sends);
  Answer(&leader, 1, Moving(1, true), &sends);
  Answer(&leader, 2, Moving(2, true, true), &sends);
  EXPECT_FALSE(leader.ready());
  EXPECT_EQ(leader.failure().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_NE(leader.Awaited().find("server 0 (s0) is at placement 1"), std::string::npos);
}

TEST(LeaderMachine, CanonicalBytesTellStatesApart) {
  LeaderMachine leader = LeaderMachine::Opened(2, 1);
  const LeaderMachine copy = leader;
  LeaderSends sends;
  leader.OnVote(0, MakeVote(1, 0, 0, 1), &sends);
  EXPECT_NE(leader.CanonicalBytes(), copy.CanonicalBytes());
  EXPECT_EQ(copy.CanonicalBytes(), LeaderMachine::Opened(2, 1).CanonicalBytes());
}

}  // namespace
}  // namespace stiefel
