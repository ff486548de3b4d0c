// The walk of a step, one rule at a time. Joins and takeover: run_machine_join_test.cc.
#include "server/run_machine.h"

#include <gtest/gtest.h>

#include "server/run_machine_fixture.h"

namespace stiefel {
namespace {

using testing::MachineFixture;
using testing::RunShape;
using testing::SenderOf;
using Message = v1::ServerMessage;

v1::CommonFields MaxNorm(double value) {
  v1::CommonFields common;
  common.set_max_grad_norm(value);
  return common;
}

TEST(RunMachineStep, WalksFromBeginToSettled) {
  MachineFixture run;
  run.JoinAll();
  run.Take();
  run.Begin(0, 1);
  EXPECT_EQ(run.All<action::GrantCredit>().size(), 1u);
  run.Begin(1, 1);
  EXPECT_EQ(*run.Push(0, 1), PieceVerdict::kPlace);
  EXPECT_TRUE(run.All<action::Compute>().empty());  // rank 1's gradient is missing
  EXPECT_EQ(*run.Push(1, 1), PieceVerdict::kPlace);
  ASSERT_EQ(run.All<action::Compute>().size(), 1u);
  EXPECT_EQ(run.All<action::Compute>()[0].round, 0);
  run.Computed(0, 1);
  EXPECT_EQ(run.All<action::Publish>().size(), 1u);
  run.End(0, 1);
  EXPECT_TRUE(run.Sent(0, Message::kVote).empty());
  run.End(1, 1);
  const auto votes = run.Sent(0, Message::kVote);
  ASSERT_EQ(votes.size(), 1u);
  EXPECT_EQ(votes[0].vote().summed_size(), 2);
  EXPECT_EQ(votes[0].vote().matrices(0).sum_squares(), 4);
  run.Decide(v1::COMMIT, 1);
  EXPECT_EQ(run.Sent(0, Message::kDecideAck).size(), 1u);
  EXPECT_EQ(run.Sent(1, Message::kDecided).size(), 1u);
  EXPECT_EQ(run.All<action::Finish>().size(), 1u);
  EXPECT_EQ(run.machine.consumed_step(), 1);
  EXPECT_EQ(run.machine.kept_step(), 1);
  run.Take();
  run.Begin(0, 2);
  EXPECT_TRUE(run.All<action::GrantCredit>().empty());  // the gradient buffers are still in use
  run.machine.OnSettled(1, 0, &run.actions);
  EXPECT_EQ(run.All<action::GrantCredit>().size(), 1u);
}

TEST(RunMachineStep, VoteWaitsForEndPushOfAllAlsoWithoutOwnedMatrices) {  // CASES D12
  RunShape shape;
  shape.servers = 2;
  MachineFixture run(shape, 1);  // owns nothing
  run.JoinAll();
  run.Begin(0, 1);
  run.Begin(1, 1);
  run.End(1, 1);
  EXPECT_TRUE(run.Sent(0, Message::kVote).empty());
  run.End(0, 1);
  EXPECT_EQ(run.Sent(0, Message::kVote).size(), 1u);
}

TEST(RunMachineStep, DisagreementOnCommonFieldsDropsAndNamesBothValues) {
  MachineFixture run;
  run.JoinAll();
  run.Begin(0, 1, 0, MaxNorm(1.5));
  run.Begin(1, 1, 0, MaxNorm(2.5));
  const auto drops = run.Sent(0, Message::kDrop);
  ASSERT_EQ(drops.size(), 1u);
  for (const char* part : {"ranks 0 and 1", "1.5", "2.5"})
    EXPECT_NE(drops[0].drop().reason().find(part), std::string::npos) << drops[0].drop().reason();
}

TEST(RunMachineStep, BadBeginIsRefusedAndChangesNothing) {
  MachineFixture run;
  run.JoinAll();
  const std::string before = run.machine.CanonicalBytes();
  v1::TrainerMessage message = run.From(1);
  message.mutable_begin_step()->set_step(1);
  message.mutable_begin_step()->set_weight(-0.5);
  run.Send(message);
  message.mutable_begin_step()->set_weight(1);
  (*message.mutable_begin_step()->mutable_common()->mutable_groups())[9].set_lr(1);
  run.Send(message);
  run.Begin(1, 1, 0, MaxNorm(0));
  const auto refused = run.Sent(1, Message::kRefused);
  ASSERT_EQ(refused.size(), 3u);
  EXPECT_NE(refused[0].refused().message().find("-0.5"), std::string::npos);
  EXPECT_NE(refused[1].refused().message().find("group 9"), std::string::npos);
  EXPECT_NE(refused[2].refused().message().find("max_grad_norm 0"), std::string::npos);
  EXPECT_EQ(run.machine.CanonicalBytes(), before);
}

TEST(RunMachineStep, LocalSumMustBeFinite) {
  MachineFixture run;
  run.JoinAll();
  run.Begin(1, 1);
  v1::TrainerMessage message = run.From(1);
  message.mutable_end_push()->set_step(1);
  message.mutable_end_push()->set_local_sum_squares(-1);
  run.Send(message);
  EXPECT_EQ(run.Sent(1, Message::kRefused).size(), 1u);
  EXPECT_FALSE(run.machine.attempt().ranks[1].ended);
}

TEST(RunMachineStep, PiecesOfOtherAttemptsRanksAndBlocks) {
  MachineFixture run;
  run.JoinAll();
  EXPECT_EQ(run.Push(0, 1).status().code(), absl::StatusCode::kFailedPrecondition);  // no credit
  run.Begin(0, 1);
  EXPECT_EQ(*run.Push(0, 1), PieceVerdict::kPlace);
  EXPECT_EQ(*run.Push(0, 1), PieceVerdict::kDuplicate);
  EXPECT_EQ(run.machine.counters().duplicate_pieces, 1);
  EXPECT_FALSE(run.Push(0, 1, 1).ok());  // an attempt that is not open yet
  EXPECT_EQ(run.Push(0, 1, 0, 7).status().code(), absl::StatusCode::kInvalidArgument);
  run.Begin(1, 1);
  run.machine.OnStepDeadline(run.now, &run.actions);  // drops: rank 1 pushed nothing
  EXPECT_EQ(*run.Push(0, 1), PieceVerdict::kStale);
  run.Decide(v1::DROP, 1);
  EXPECT_EQ(*run.Push(0, 1), PieceVerdict::kStale);
  EXPECT_EQ(run.machine.counters().stale_pieces, 2);
}

TEST(RunMachineStep, PieceOfAMatrixOwnedElsewhereIsRefused) {
  RunShape shape;
  shape.servers = 2;
  shape.matrices = 2;
  MachineFixture run(shape, 1);
  run.JoinAll();
  run.Begin(0, 1);
  const auto refused = run.Push(0, 1, 0, 0);
  EXPECT_NE(refused.status().message().find("owned by server 0, not by server 1"),
            std::string::npos)
      << refused.status();
  EXPECT_TRUE(run.Push(0, 1, 0, 1).ok());
}

TEST(RunMachineStep, AbsentOnAllRanksIsNotComputed) {
  MachineFixture run;
  run.JoinAll();
  run.Begin(0, 1);
  run.Begin(1, 1);
  run.End(0, 1);
  run.End(1, 1);
  ASSERT_TRUE(run.Push(0, 1, 0, 0, true).ok());
  ASSERT_TRUE(run.Push(1, 1, 0, 0, true).ok());
  EXPECT_TRUE(run.All<action::Compute>().empty());
  EXPECT_EQ(run.All<action::Publish>().size(), 1u);
  ASSERT_EQ(run.Sent(0, Message::kVote).size(), 1u);
  EXPECT_TRUE(run.Sent(0, Message::kVote)[0].vote().matrices(0).absent());
}

// Found by review: an absent matrix was published in round 0 only, so a trainer waited for ever
// for its update of round 1.
TEST(RunMachineStep, AbsentMatrixIsPublishedAgainInRoundOne) {
  RunShape shape;
  shape.matrices = 2;
  MachineFixture run(shape);
  run.JoinAll();
  for (int rank = 0; rank < 2; ++rank) run.Begin(rank, 1, 0, MaxNorm(1));
  for (int rank = 0; rank < 2; ++rank) {
    ASSERT_TRUE(run.Push(rank, 1, 0, 0).ok());
    ASSERT_TRUE(run.Push(rank, 1, 0, 1, true).ok());
    run.End(rank, 1);
  }
  run.Computed(0, 1);
  run.Take();
  run.Rescale(1, 0.5);
  ASSERT_EQ(run.All<action::Publish>().size(), 1u);
  EXPECT_EQ(run.All<action::Publish>()[0].matrix, 1);
  EXPECT_EQ(run.machine.attempt().round, 1);
  ASSERT_EQ(run.All<action::Compute>().size(), 1u);
  EXPECT_EQ(run.All<action::Compute>()[0].scale, 0.5);
  run.Computed(0, 1, 0, 1);
  EXPECT_EQ(run.Sent(0, Message::kVote).back().vote().round(), 1);
  // Commit of a rescaled attempt always means round 1.
  run.Take();
  run.Decide(v1::COMMIT, 1, 0, 0);
  EXPECT_EQ(run.Sent(0, Message::kRefused).size(), 1u);
  EXPECT_EQ(run.machine.consumed_step(), 0);
  run.Decide(v1::COMMIT, 1, 0, 1);
  EXPECT_EQ(run.machine.consumed_step(), 1);
}

TEST(RunMachineStep, RescaleBeforeTheVoteOrUnequalOrOutOfRangeIsRefused) {
  MachineFixture run;
  run.JoinAll();
  run.Rescale(1, 0.5);
  EXPECT_EQ(run.Sent(0, Message::kRefused).size(), 1u);
  run.Collect(1, 0, MaxNorm(1));
  run.Rescale(1, 1.5);
  EXPECT_EQ(run.Sent(0, Message::kRefused).size(), 2u);
  run.Rescale(1, 0.5);
  run.Take();
  run.Rescale(1, 0.5);  // again: what it promised so far
  EXPECT_EQ(run.Sent(0, Message::kVote).size(), 1u);
  run.Rescale(1, 0.25);
  EXPECT_FALSE(run.machine.failure().ok());
}

TEST(RunMachineStep, FailureToComputeDropsInRoundZeroAndVotesFailedInRoundOne) {
  MachineFixture run;
  run.JoinAll();
  for (int rank = 0; rank < 2; ++rank) run.Begin(rank, 1);
  for (int rank = 0; rank < 2; ++rank) (void)run.Push(rank, 1);
  run.Computed(0, 1, 0, 0, absl::ResourceExhaustedError("no workspace of 12 bytes"));
  ASSERT_EQ(run.Sent(0, Message::kDrop).size(), 1u);
  EXPECT_NE(run.Sent(0, Message::kDrop)[0].drop().reason().find("12 bytes"), std::string::npos);
  run.Decide(v1::DROP, 1);
  run.machine.OnSettled(1, 0, &run.actions);
  run.Collect(1, 1, MaxNorm(1));
  run.Rescale(1, 0.5, 1);
  run.Take();
  run.Computed(0, 1, 1, 1, absl::InternalError("lost device"));
  const auto votes = run.Sent(0, Message::kVote);
  ASSERT_EQ(votes.size(), 2u);  // both rounds, in order
  EXPECT_TRUE(votes[1].vote().failed());
  run.Decide(v1::COMMIT, 1, 1, 1);
  EXPECT_EQ(run.machine.consumed_step(), 0) << "a failed round cannot be committed";
  run.Decide(v1::DROP, 1, 1);
  EXPECT_EQ(run.machine.attempt().attempt, 2);
}

// Rule 6: a vote seals; only Decide ends it.
TEST(RunMachineStep, NothingButDecideEndsAVotedAttempt) {
  MachineFixture run;
  run.JoinAll();
  run.Collect(1);
  run.Take();
  run.machine.OnStepDeadline(run.now, &run.actions);
  run.machine.OnDrain(run.now, &run.actions);
  run.Replace(1, 0);
  EXPECT_TRUE(run.Sent(0, Message::kDrop).empty());
  EXPECT_FALSE(run.machine.attempt().drop);
  ASSERT_EQ(run.Sent(1, Message::kAwaiting).size(), 1u);
  EXPECT_NE(run.Sent(1, Message::kAwaiting)[0].awaiting().reason().find("leader"),
            std::string::npos);
  run.Decide(v1::COMMIT, 1);
  EXPECT_EQ(run.machine.consumed_step(), 1);
}

TEST(RunMachineStep, DeadlineNamesWhoIsMissing) {
  MachineFixture run;
  run.JoinAll();
  run.machine.OnStepDeadline(run.now, &run.actions);
  EXPECT_TRUE(run.Sent(0, Message::kDrop).empty()) << "nobody has begun";
  run.Begin(0, 1);
  run.machine.OnStepDeadline(run.now, &run.actions);
  ASSERT_EQ(run.Sent(0, Message::kDrop).size(), 1u);
  const std::string why = run.Sent(0, Message::kDrop)[0].drop().reason();
  for (const char* part : {"BeginStep of rank 1", "\"m0\"", "from rank 0", "EndPush of rank 0"})
    EXPECT_NE(why.find(part), std::string::npos) << why;
}

TEST(RunMachineStep, DeadlineDoesNotDropWhatIsBeingComputed) {
  MachineFixture run;
  run.JoinAll();
  for (int rank = 0; rank < 2; ++rank) {
    run.Begin(rank, 1);
    run.End(rank, 1);
  }
  for (int rank = 0; rank < 2; ++rank) (void)run.Push(rank, 1);
  run.machine.OnStepDeadline(run.now, &run.actions);
  EXPECT_FALSE(run.machine.attempt().drop);
}

// Rule 8.
TEST(RunMachineStep, FirstDecisionIsKeptAndAnUnequalSecondOneFailsTheRun) {
  MachineFixture run;
  run.JoinAll();
  run.Collect(1);
  run.Decide(v1::COMMIT, 1);
  run.Take();
  run.Decide(v1::COMMIT, 1);
  EXPECT_EQ(run.Sent(0, Message::kDecideAck).size(), 1u);
  EXPECT_TRUE(run.All<action::Finish>().empty());
  EXPECT_TRUE(run.machine.failure().ok());
  run.Decide(v1::DROP, 1);
  EXPECT_EQ(run.machine.failure().code(), absl::StatusCode::kAborted);
  EXPECT_EQ(run.Sent(1, Message::kRefused).size(), 1u) << "the run fails loudly";
}

TEST(RunMachineStep, DropIsRecordedWithoutBeginOrVoteAndCommitIsNot) {
  MachineFixture run;
  run.JoinAll();
  run.Decide(v1::COMMIT, 1);
  run.Decide(v1::SKIP, 1);
  EXPECT_EQ(run.Sent(0, Message::kRefused).size(), 2u);
  run.Decide(v1::DROP, 2);
  EXPECT_EQ(run.Sent(0, Message::kRefused).size(), 3u) << "not the open attempt";
  run.Decide(v1::DROP, 1);
  EXPECT_EQ(run.Sent(0, Message::kDecideAck).size(), 1u);
  EXPECT_EQ(run.machine.attempt().attempt, 1);
}

// Found by the model test: the refusal of a repeated Decide failed the leader's own step.
TEST(RunMachineStep, ADecisionOlderThanTheRecordsIsDiscarded) {
  MachineFixture run;
  run.JoinAll();
  for (int32_t attempt = 0; attempt < 3; ++attempt) run.Decide(v1::DROP, 1, attempt);
  run.Take();
  const std::string before = run.machine.CanonicalBytes();
  run.Decide(v1::DROP, 1, 0);
  EXPECT_TRUE(run.actions.empty());
  EXPECT_EQ(run.machine.CanonicalBytes(), before);
}

// Rule 11.
TEST(RunMachineStep, BeginAheadIsHeldWithItsEndAndFreesNothing) {
  MachineFixture run;
  run.JoinAll();
  run.Commit(1);
  run.Collect(2);
  run.Take();
  run.Begin(0, 3);
  run.End(0, 3);
  run.Begin(1, 3);
  EXPECT_TRUE(run.Sent(0, Message::kRefused).empty());
  EXPECT_TRUE(run.All<action::FreeDeltas>().empty());
  run.Decide(v1::COMMIT, 2);
  EXPECT_TRUE(run.machine.attempt().ranks[0].begun);
  EXPECT_TRUE(run.machine.attempt().ranks[0].ended);
  EXPECT_TRUE(run.machine.attempt().ranks[1].begun);
  EXPECT_FALSE(run.machine.attempt().ranks[1].ended);
  ASSERT_EQ(run.All<action::FreeDeltas>().size(), 1u) << "all have begun step 3";
  EXPECT_EQ(run.All<action::FreeDeltas>()[0].step, 2);
}

TEST(RunMachineStep, DeltasAreKeptUntilEveryRankBeganTheNextStep) {
  MachineFixture run;
  run.JoinAll();
  run.Commit(1);
  run.Take();
  run.Begin(0, 2);
  EXPECT_EQ(run.machine.kept_step(), 1);
  run.Begin(1, 2);
  EXPECT_EQ(run.machine.kept_step(), 0);
  EXPECT_EQ(run.All<action::FreeDeltas>().size(), 1u);
}

TEST(RunMachineStep, BeginBehindIsAnsweredWithTheOutcomeOrRefused) {
  MachineFixture run;
  run.JoinAll();
  run.Commit(1);
  run.Commit(2);
  run.Take();
  run.Begin(1, 2);
  ASSERT_EQ(run.Sent(1, Message::kDecided).size(), 1u);
  EXPECT_EQ(run.Sent(1, Message::kDecided)[0].decided().step(), 2);
  run.Begin(1, 1);
  ASSERT_EQ(run.Sent(1, Message::kRefused).size(), 1u);
  EXPECT_NE(run.Sent(1, Message::kRefused)[0].refused().message().find("1"), std::string::npos);
  run.Decide(v1::DROP, 3, 0);
  run.Take();
  run.Begin(1, 3, 0);
  ASSERT_EQ(run.Sent(1, Message::kDecided).size(), 1u);
  EXPECT_EQ(run.Sent(1, Message::kDecided)[0].decided().outcome(), v1::DROP);
}

TEST(RunMachineStep, ArrivedNamesWhatIsHere) {
  RunShape shape;
  shape.matrices = 2;
  MachineFixture run(shape);
  run.JoinAll();
  run.Begin(0, 1);
  (void)run.Push(0, 1, 0, 0);
  (void)run.Push(0, 1, 0, 1, true);
  v1::TrainerMessage query = run.From(0);
  query.mutable_arrived_query()->set_step(1);
  run.Send(query);
  const auto answers = run.Sent(0, Message::kArrived);
  ASSERT_EQ(answers.size(), 1u);
  ASSERT_EQ(answers[0].arrived().parts_size(), 2);
  EXPECT_EQ(answers[0].arrived().parts(0).bounds(1), 4);
  EXPECT_TRUE(answers[0].arrived().parts(1).absent());
}

TEST(RunMachineStep, OnlyTheLeaderDecides) {
  MachineFixture run;
  run.JoinAll();
  run.Collect(1);
  v1::TrainerMessage message = run.From(1);
  message.mutable_decide()->set_step(1);
  message.mutable_decide()->set_outcome(v1::COMMIT);
  run.Send(message);
  EXPECT_EQ(run.machine.consumed_step(), 0);
  ASSERT_EQ(run.Sent(1, Message::kRefused).size(), 1u);
  EXPECT_EQ(run.Sent(1, Message::kRefused)[0].refused().code(),
            static_cast<int>(absl::StatusCode::kPermissionDenied));
}

// Rule 1.
TEST(RunMachineStep, ForeignNamesAreRefusedWithBothValues) {
  MachineFixture run;
  run.JoinAll();
  const std::string before = run.machine.CanonicalBytes();
  v1::TrainerMessage message = run.From(1);
  message.mutable_begin_step()->set_step(1);
  message.mutable_sender()->set_run_uid(5);
  run.Send(message);
  *message.mutable_sender() = run.From(1).sender();
  message.mutable_sender()->set_placement_epoch(4);
  run.Send(message);
  *message.mutable_sender() = run.From(1).sender();
  message.mutable_sender()->mutable_incarnation()->set_generation(3);
  run.Send(message);
  const auto refused = run.Sent(1, Message::kRefused);
  ASSERT_EQ(refused.size(), 3u);
  EXPECT_NE(refused[0].refused().message().find("77"), std::string::npos);
  EXPECT_NE(refused[1].refused().message().find("4"), std::string::npos);
  EXPECT_FALSE(refused[2].refused().fenced());
  message.mutable_sender()->mutable_incarnation()->set_generation(0);
  run.Send(message);
  EXPECT_TRUE(run.Sent(1, Message::kRefused).back().refused().fenced());
  message.mutable_sender()->set_rank(7);
  run.Send(message);  // nobody to tell
  EXPECT_EQ(run.machine.CanonicalBytes(), before);
}

TEST(RunMachineStep, DrainDropsWhatIsOpenAndBeginsNothingNew) {
  MachineFixture run;
  run.JoinAll();
  run.Begin(0, 1);
  run.machine.OnDrain(run.now, &run.actions);
  ASSERT_EQ(run.Sent(0, Message::kDrop).size(), 1u);
  EXPECT_NE(run.Sent(0, Message::kDrop)[0].drop().reason().find("draining"), std::string::npos);
  run.Decide(v1::DROP, 1);
  run.Take();
  run.Begin(0, 1, 1);
  EXPECT_TRUE(run.Sent(0, Message::kDrop).empty()) << "trainers would redo it for ever";
  EXPECT_FALSE(run.machine.attempt().sealed());
  ASSERT_EQ(run.Sent(0, Message::kRefused).size(), 1u);
  const v1::Refused refused = run.Sent(0, Message::kRefused)[0].refused();
  EXPECT_EQ(refused.code(), static_cast<int>(absl::StatusCode::kUnavailable));
  EXPECT_EQ(refused.step(), 1);
  EXPECT_EQ(refused.attempt(), 1);
}

TEST(RunMachineStep, CanonicalBytesTellStatesApartAndCopiesAreEqual) {
  MachineFixture run;
  run.JoinAll();
  const RunMachine copy = run.machine;
  run.Begin(0, 1);
  EXPECT_NE(copy.CanonicalBytes(), run.machine.CanonicalBytes());
  MachineFixture other;
  other.JoinAll();
  EXPECT_EQ(copy.CanonicalBytes(), other.machine.CanonicalBytes());
}

}  // namespace
}  // namespace stiefel
