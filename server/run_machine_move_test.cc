#include <gtest/gtest.h>

#include <string>
#include <utility>
#include <vector>

#include "server/run_machine_fixture.h"

namespace stiefel {
namespace {

using testing::JoinRequest;
using testing::MachineFixture;
using testing::OpenRequest;
using testing::RunShape;
using testing::SenderOf;
using testing::TakeOver;

constexpr int64_t kNext = 2;  // the epoch moved to

// Two servers, two matrices.
RunShape Two() {
  RunShape shape;
  shape.servers = 2;
  shape.matrices = 2;
  return shape;
}

v1::Placement PlacementOf(int64_t epoch, const std::vector<std::string>& servers,
                          const std::vector<int32_t>& owners) {
  v1::Placement placement;
  placement.set_epoch(epoch);
  for (const std::string& server : servers) placement.add_servers(server);
  for (const int32_t owner : owners) placement.add_owners(owner);
  return placement;
}

// Server 1 is drained, server 2 comes in: m1 moves from 1 to 2.
v1::Prepare Drain(int64_t after_step, int64_t epoch = kNext) {
  v1::Prepare prepare;
  *prepare.mutable_placement() = PlacementOf(epoch, {"server0:1", "server2:1"}, {0, 1});
  prepare.set_after_step(after_step);
  return prepare;
}

void Prepare(MachineFixture* run, const v1::Prepare& prepare) {
  v1::TrainerMessage message = run->From(0);
  *message.mutable_prepare() = prepare;
  run->Send(message);
}
void Cancel(MachineFixture* run, int64_t epoch = kNext) {
  v1::TrainerMessage message = run->From(0);
  message.mutable_cancel_prepare()->set_epoch(epoch);
  run->Send(message);
}
void Switch(MachineFixture* run, int64_t epoch = kNext) {
  v1::TrainerMessage message = run->From(0);
  message.mutable_switch_placement()->set_epoch(epoch);
  run->Send(message);
}

// States of the answers to the leader since the last Take.
std::vector<v1::EpochAck::State> Acks(const MachineFixture& run) {
  std::vector<v1::EpochAck::State> states;
  for (const auto& message : run.Sent(0, v1::ServerMessage::kEpochAck))
    states.push_back(message.epoch_ack().state());
  return states;
}
using States = std::vector<v1::EpochAck::State>;

// Step 1 is committed, rank 1 has begun step 2, the leader has not.
void UpToMove(MachineFixture* run) {
  run->JoinAll();
  run->Commit(1);
  run->Begin(1, 2);
}

TEST(RunMachineMove, PreparesFetchesAndSwitches) {
  MachineFixture run(Two(), 0);
  UpToMove(&run);
  run.Take();

  v1::Prepare to_zero = Drain(1);  // both matrices come to server 0
  to_zero.mutable_placement()->set_owners(1, 0);
  Prepare(&run, to_zero);
  const auto fetch = run.All<action::FetchState>();
  ASSERT_EQ(fetch.size(), 1u);
  EXPECT_EQ(fetch[0].after_step, 1);
  EXPECT_EQ(fetch[0].next->owned(), (std::vector<int32_t>{0, 1}));
  EXPECT_TRUE(Acks(run).empty()) << "before the state is here";
  EXPECT_EQ(run.machine.PhaseName(), "moving");
  EXPECT_EQ(run.machine.Awaited(), "state of shards from their owners");

  run.machine.OnPrepared(kNext, absl::OkStatus(), &run.actions);
  EXPECT_EQ(Acks(run), States{v1::EpochAck::PREPARED});
  EXPECT_EQ(run.machine.kept_step(), 1) << "a cancelled move may need them";
  EXPECT_EQ(run.machine.placement_epoch(), 1);
  run.Take();

  Switch(&run);
  EXPECT_EQ(Acks(run), States{v1::EpochAck::SWITCHED});
  ASSERT_EQ(run.Sent(1, v1::ServerMessage::kMoved).size(), 1u);
  EXPECT_EQ(run.Sent(1, v1::ServerMessage::kMoved)[0].moved().placement().epoch(), kNext);
  EXPECT_EQ(run.Sent(1, v1::ServerMessage::kMoved)[0].moved().after_step(), 1);
  const auto switched = run.All<action::SwitchPlacement>();
  ASSERT_EQ(switched.size(), 1u);
  EXPECT_EQ(switched[0].next->owned(), (std::vector<int32_t>{0, 1}));
  EXPECT_EQ(switched[0].step, 2);
  EXPECT_TRUE(std::holds_alternative<action::SwitchPlacement>(run.actions.back()));
  EXPECT_EQ(run.All<action::FreeDeltas>().size(), 1u);
  EXPECT_EQ(run.machine.placement_epoch(), kNext);
  EXPECT_EQ(run.machine.consumed_step(), 1);
  EXPECT_EQ(run.machine.attempt().step, 2);
  EXPECT_FALSE(run.machine.attempt().ranks[1].begun) << "what was sent for step 2 is discarded";
}

TEST(RunMachineMove, RanksJoinAgainAndTheRunGoesOn) {
  MachineFixture run(Two(), 0);
  UpToMove(&run);
  v1::Prepare prepare = Drain(1);
  Prepare(&run, prepare);
  run.machine.OnPrepared(kNext, absl::OkStatus(), &run.actions);
  Switch(&run);
  run.machine.OnSettled(2, 0, &run.actions);
  run.Take();

  // A control stream of before hears where the run went, whatever it says.
  ASSERT_TRUE(run.machine.OnControlUp(SenderOf(1, run.life[1]), run.now, &run.actions).ok());
  EXPECT_EQ(run.Sent(1, v1::ServerMessage::kMoved).size(), 1u);
  run.Begin(1, 2);
  EXPECT_EQ(run.Sent(1, v1::ServerMessage::kMoved).size(), 2u);
  EXPECT_TRUE(run.Sent(1, v1::ServerMessage::kRefused).empty());
  EXPECT_EQ(run.machine.OnDataUp(SenderOf(1, run.life[1]), run.now, &run.actions).code(),
            absl::StatusCode::kUnavailable);
  run.Take();

  run.epoch = kNext;
  const uint64_t first = run.Join(0, 1);
  EXPECT_FALSE(run.Answer(first)) << "until all have joined";
  const uint64_t second = run.Join(1, 1);
  ASSERT_TRUE(run.Answer(first) && run.Answer(second));
  EXPECT_EQ(run.Answer(second)->response.placement_epoch(), kNext);
  EXPECT_EQ(run.Answer(second)->response.servers(1), "server2:1");
  EXPECT_EQ(run.Answer(second)->response.consumed_step(), 1);
  for (int32_t rank = 0; rank < 2; ++rank) ASSERT_TRUE(run.Connect(rank).ok());
  run.Collect(2);
  ASSERT_TRUE(run.machine.attempt().vote0.has_value());
  run.Decide(v1::COMMIT, 2);
  EXPECT_EQ(run.machine.consumed_step(), 2);
}

TEST(RunMachineMove, AfterASwitchOnlyTheStepBeforeCountsAsApplied) {
  MachineFixture run(Two(), 0);
  run.JoinAll();
  run.Collect(1);
  run.Decide(v1::SKIP, 1);
  run.machine.OnSettled(1, 0, &run.actions);
  run.Begin(1, 2);
  Prepare(&run, Drain(1));
  run.machine.OnPrepared(kNext, absl::OkStatus(), &run.actions);
  Switch(&run);
  const uint64_t behind = run.Join(1, 0);
  EXPECT_EQ(run.Answer(behind)->status.code(), absl::StatusCode::kFailedPrecondition);
}

TEST(RunMachineMove, PreparedWaitsForTheDecisionTheSettlingAndTheOtherRanks) {
  MachineFixture run(Two(), 0);
  run.JoinAll();
  run.Collect(1);
  Prepare(&run, Drain(1));
  run.machine.OnPrepared(kNext, absl::OkStatus(), &run.actions);
  run.Begin(1, 2);  // ahead of this server's record: held
  EXPECT_TRUE(Acks(run).empty()) << "step 1 is not decided here (rule 15)";
  run.Decide(v1::COMMIT, 1);
  EXPECT_TRUE(Acks(run).empty()) << "the step may still be taken in";
  run.machine.OnSettled(1, 0, &run.actions);
  EXPECT_EQ(Acks(run), States{v1::EpochAck::PREPARED});

  MachineFixture other(Two(), 0);
  other.JoinAll();
  other.Commit(1);
  Prepare(&other, Drain(1));
  other.machine.OnPrepared(kNext, absl::OkStatus(), &other.actions);
  EXPECT_TRUE(Acks(other).empty()) << "rank 1 may need the deltas of step 1";
  EXPECT_EQ(other.machine.Awaited(), "step 1 to be applied by rank 1");
  other.Begin(1, 2);
  EXPECT_EQ(Acks(other), States{v1::EpochAck::PREPARED});
}

TEST(RunMachineMove, ASealedAttemptForbidsPreparedUntilItIsDecided) {
  MachineFixture run(Two(), 0);
  UpToMove(&run);
  run.machine.OnStepDeadline(run.now, &run.actions);
  ASSERT_TRUE(run.machine.attempt().drop.has_value());
  run.Take();
  Prepare(&run, Drain(1));
  run.machine.OnPrepared(kNext, absl::OkStatus(), &run.actions);
  EXPECT_TRUE(Acks(run).empty());
  run.Decide(v1::DROP, 2);
  run.machine.OnSettled(2, 0, &run.actions);
  EXPECT_EQ(Acks(run), States{v1::EpochAck::PREPARED});
}

TEST(RunMachineMove, AfterPreparedNothingIsSealedAndJoinsWait) {
  MachineFixture run(Two(), 0);
  UpToMove(&run);
  Prepare(&run, Drain(1));
  run.machine.OnPrepared(kNext, absl::OkStatus(), &run.actions);
  run.Take();
  run.machine.OnStepDeadline(run.now, &run.actions);
  run.machine.OnDrain(run.now, &run.actions);
  EXPECT_FALSE(run.machine.attempt().sealed());
  const uint64_t token = run.Replace(1, 1);
  EXPECT_FALSE(run.Answer(token));
  EXPECT_FALSE(run.machine.attempt().sealed()) << "rule 4 waits too";
  Cancel(&run);
  EXPECT_TRUE(run.machine.attempt().drop.has_value()) << "rank 1 had begun step 2";
  ASSERT_TRUE(run.Answer(token));
  EXPECT_EQ(run.Answer(token)->response.placement_epoch(), 1);
}

TEST(RunMachineMove, CancelGoesBackAndTheNumberIsSpent) {
  MachineFixture run(Two(), 0);
  UpToMove(&run);
  Prepare(&run, Drain(1));
  run.machine.OnPrepared(kNext, absl::OkStatus(), &run.actions);
  run.Take();
  Cancel(&run);
  EXPECT_EQ(Acks(run), States{v1::EpochAck::CANCELLED});
  ASSERT_EQ(run.All<action::DropPrepared>().size(), 1u);
  run.Take();
  Cancel(&run);
  EXPECT_EQ(Acks(run), States{v1::EpochAck::CANCELLED}) << "also where nothing is prepared";
  EXPECT_TRUE(run.All<action::DropPrepared>().empty());
  run.Take();
  Prepare(&run, Drain(1));
  EXPECT_EQ(Acks(run), States{v1::EpochAck::FAILED}) << "rule 15";
  run.Take();
  Prepare(&run, Drain(1, kNext + 1));
  EXPECT_EQ(run.All<action::FetchState>().size(), 1u);
  Cancel(&run, kNext + 1);
  run.Take();
  run.Begin(0, 2);
  for (int32_t rank = 0; rank < 2; ++rank) {
    (void)run.Push(rank, 2);
    run.End(rank, 2);
  }
  run.Computed(0, 2);
  EXPECT_TRUE(run.machine.attempt().vote0.has_value()) << "the run goes on";
}

TEST(RunMachineMove, WhatCannotBePreparedFails) {
  MachineFixture run(Two(), 0);
  UpToMove(&run);
  Prepare(&run, Drain(1));
  run.machine.OnPrepared(kNext, absl::ResourceExhaustedError("no room"), &run.actions);
  auto acks = run.Sent(0, v1::ServerMessage::kEpochAck);
  ASSERT_EQ(acks.size(), 1u);
  EXPECT_EQ(acks[0].epoch_ack().state(), v1::EpochAck::FAILED);
  EXPECT_EQ(acks[0].epoch_ack().reason(), "server server0:1: no room");
  run.Take();
  Switch(&run);
  EXPECT_EQ(Acks(run), States{v1::EpochAck::FAILED}) << "never prepared";
  EXPECT_EQ(run.machine.placement_epoch(), 1);
  Cancel(&run);
  run.Take();

  v1::Prepare bad = Drain(1, 7);
  bad.mutable_placement()->set_owners(0, 5);
  Prepare(&run, bad);
  EXPECT_EQ(Acks(run), States{v1::EpochAck::FAILED}) << "an owner that does not exist";
  run.Take();
  Prepare(&run, Drain(0, 8));
  EXPECT_EQ(Acks(run), States{v1::EpochAck::FAILED}) << "step 1 is decided already";
  run.Take();
  Switch(&run, 9);
  EXPECT_EQ(Acks(run), States{v1::EpochAck::FAILED}) << "never heard of";
  run.Take();
  v1::TrainerMessage message = run.From(1);
  message.mutable_switch_placement()->set_epoch(9);
  run.Send(message);
  EXPECT_EQ(run.Sent(1, v1::ServerMessage::kRefused).size(), 1u) << "not the leader";
}

TEST(RunMachineMove, AServerThatLeavesTellsWhereTheRunWent) {
  MachineFixture run(Two(), 1);
  UpToMove(&run);
  run.Take();
  Prepare(&run, Drain(1));
  EXPECT_TRUE(run.All<action::FetchState>().empty()) << "it gains nothing";
  EXPECT_EQ(Acks(run), States{v1::EpochAck::PREPARED});
  run.Take();
  Switch(&run);
  ASSERT_EQ(run.All<action::SwitchPlacement>().size(), 1u);
  EXPECT_EQ(run.All<action::SwitchPlacement>()[0].next, nullptr);
  EXPECT_TRUE(run.machine.away());
  EXPECT_EQ(run.machine.PhaseName(), "moved away");
  run.Take();

  const uint64_t token = run.Join(1, 1);
  ASSERT_TRUE(run.Answer(token));
  EXPECT_TRUE(run.Answer(token)->status.ok());
  EXPECT_EQ(run.Answer(token)->response.placement_epoch(), kNext);
  EXPECT_EQ(run.Answer(token)->response.servers(1), "server2:1");
  Switch(&run);
  EXPECT_EQ(Acks(run), States{v1::EpochAck::SWITCHED}) << "the first answer may be lost";
  run.machine.OnLeaseEnd(0, run.now);
  const auto record = run.machine.OnTakeOver(TakeOver(Incarnation(2, 5)), run.now, &run.actions);
  ASSERT_TRUE(record.ok());
  EXPECT_EQ(record->placement_epoch(), kNext);
  EXPECT_EQ(record->opened().servers(1), "server2:1");
  EXPECT_EQ(record->opened().server_index(), -1);

  run.machine.OnTick(run.now + 1, &run.actions);
  EXPECT_FALSE(run.machine.ended());
  v1::CloseRunRequest close;
  *close.mutable_sender() = SenderOf(0, Incarnation(2, 5));
  EXPECT_TRUE(*run.machine.OnClose(close, run.now, &run.actions));
  EXPECT_TRUE(run.machine.ended());
}

TEST(RunMachineMove, AServerThatLeftEndsAfterTheTakeoverTimeout) {
  MachineFixture run(Two(), 1);
  UpToMove(&run);
  Prepare(&run, Drain(1));
  Switch(&run);
  run.machine.OnTick(run.now, &run.actions);
  for (int64_t passed = 0; passed < 299; ++passed)
    run.machine.OnTick(run.now += 1000000, &run.actions);
  EXPECT_FALSE(run.machine.ended());
  run.machine.OnTick(run.now += 1000000, &run.actions);
  EXPECT_TRUE(run.machine.ended());
}

// Server 2 as it is opened by the move of Drain(1).
v1::OpenRunRequest MovesIn() {
  v1::OpenRunRequest opened = OpenRequest(Two(), 1);
  opened.set_servers(1, "server2:1");
  opened.set_placement_epoch(kNext);
  *opened.mutable_moves_in()->mutable_placement() =
      PlacementOf(1, {"server0:1", "server1:1"}, {0, 1});
  opened.mutable_moves_in()->set_after_step(4);
  return opened;
}

TEST(RunMachineMovesIn, FetchesAndTakesPartFromTheSwitchOn) {
  MachineFixture run(Two(), *RunSpec::Create(MovesIn()));
  run.machine.OnOpened(&run.actions);
  const auto fetch = run.All<action::FetchState>();
  ASSERT_EQ(fetch.size(), 1u);
  EXPECT_EQ(fetch[0].after_step, 4);
  EXPECT_EQ(fetch[0].next->owned(), std::vector<int32_t>{1});
  EXPECT_EQ(run.machine.placement_epoch(), 1) << "the one in force";
  EXPECT_EQ(run.machine.consumed_step(), 4);
  const uint64_t early = run.Join(1, 4);
  EXPECT_FALSE(run.Answer(early));

  run.machine.OnPrepared(kNext, absl::OkStatus(), &run.actions);
  EXPECT_EQ(Acks(run), States{v1::EpochAck::PREPARED});
  run.Take();
  // The leader's stream may have come up later: it is told again.
  ASSERT_TRUE(run.machine.OnControlUp(SenderOf(0, run.life[0]), run.now, &run.actions).ok());
  EXPECT_EQ(Acks(run), States{v1::EpochAck::PREPARED});
  const auto record = run.machine.OnTakeOver(TakeOver(run.life[0]), run.now, &run.actions);
  ASSERT_TRUE(record.ok());
  EXPECT_EQ(record->placement_epoch(), 1);
  EXPECT_EQ(record->prepare().placement().epoch(), kNext);
  EXPECT_EQ(record->prepare().after_step(), 4);
  EXPECT_EQ(record->largest_epoch(), kNext);
  run.Take();

  Switch(&run);
  EXPECT_EQ(Acks(run), States{v1::EpochAck::SWITCHED});
  EXPECT_EQ(run.machine.placement_epoch(), kNext);
  run.machine.OnSettled(5, 0, &run.actions);
  run.epoch = kNext;
  const uint64_t leader = run.Join(0, 4);
  ASSERT_TRUE(run.Answer(early)) << "it waited for the switch";
  ASSERT_TRUE(run.Answer(leader));
  for (int32_t rank = 0; rank < 2; ++rank) ASSERT_TRUE(run.Connect(rank).ok());
  run.Collect(5);
  run.Decide(v1::COMMIT, 5);
  EXPECT_EQ(run.machine.consumed_step(), 5);
}

TEST(RunMachineMovesIn, EndsWhenItIsCancelled) {
  MachineFixture run(Two(), *RunSpec::Create(MovesIn()));
  run.machine.OnOpened(&run.actions);
  Cancel(&run);
  EXPECT_EQ(Acks(run), States{v1::EpochAck::CANCELLED});
  EXPECT_EQ(run.All<action::DropPrepared>().size(), 1u);
  EXPECT_TRUE(run.machine.ended());
}

TEST(RunMachineMovesIn, BadRequestsAreRefused) {
  v1::OpenRunRequest opened = MovesIn();
  opened.mutable_moves_in()->mutable_placement()->set_epoch(kNext);
  EXPECT_EQ(RunSpec::Create(opened).status().code(), absl::StatusCode::kInvalidArgument);
  opened = MovesIn();
  opened.mutable_moves_in()->mutable_placement()->set_owners(0, 2);
  EXPECT_FALSE(RunSpec::Create(opened).ok());
  opened = MovesIn();
  opened.mutable_moves_in()->mutable_placement()->clear_owners();
  EXPECT_EQ(RunSpec::Create(opened).status().code(), absl::StatusCode::kInvalidArgument);
  opened = MovesIn();
  opened.mutable_moves_in()->set_after_step(-1);
  EXPECT_EQ(RunSpec::Create(opened).status().code(), absl::StatusCode::kInvalidArgument);
}

TEST(RunMachineMove, ANewLeaderFindsThePrepareAndSpeaksUnderTheNewEpoch) {
  MachineFixture run(Two(), 0);
  UpToMove(&run);
  Prepare(&run, Drain(1));
  run.machine.OnPrepared(kNext, absl::OkStatus(), &run.actions);
  run.machine.OnLeaseEnd(0, run.now);
  run.life[0] = Incarnation(2, 5);
  const auto record = run.machine.OnTakeOver(TakeOver(run.life[0]), run.now, &run.actions);
  ASSERT_TRUE(record.ok());
  EXPECT_EQ(record->prepare().placement().epoch(), kNext);
  // Another server has switched already.
  run.epoch = kNext;
  ASSERT_TRUE(run.machine.OnControlUp(SenderOf(0, run.life[0], kNext), run.now, &run.actions).ok());
  run.Take();
  Switch(&run);
  EXPECT_EQ(Acks(run), States{v1::EpochAck::SWITCHED});
  EXPECT_EQ(run.machine.placement_epoch(), kNext);
}

TEST(RunMachineMove, ReplanIsAskedUntilThePlacementAgrees) {
  MachineFixture run(Two(), 0);
  UpToMove(&run);
  run.Take();
  v1::ReplanAsked asked;
  asked.add_drain("server1:1");
  run.machine.OnReplanAsked(asked, &run.actions);
  ASSERT_EQ(run.Sent(0, v1::ServerMessage::kReplanAsked).size(), 1u);
  asked.Clear();
  asked.add_add("server2:1");
  run.machine.OnReplanAsked(asked, &run.actions);
  run.Take();
  ASSERT_TRUE(run.Connect(0).ok());
  const auto again = run.Sent(0, v1::ServerMessage::kReplanAsked);
  ASSERT_EQ(again.size(), 1u);
  EXPECT_EQ(again[0].replan_asked().drain(0), "server1:1");
  EXPECT_EQ(again[0].replan_asked().add(0), "server2:1");
  Prepare(&run, Drain(1));
  run.machine.OnPrepared(kNext, absl::OkStatus(), &run.actions);
  Switch(&run);
  run.epoch = kNext;
  run.Join(0, 1);
  run.Join(1, 1);
  run.Take();
  ASSERT_TRUE(run.Connect(0).ok());
  EXPECT_TRUE(run.Sent(0, v1::ServerMessage::kReplanAsked).empty());
}

}  // namespace
}  // namespace stiefel
