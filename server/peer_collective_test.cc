// What a collective promises, one thing at a time.
#include "server/peer_collective.h"

#include <limits>

#include "gmock/gmock.h"
#include "server/peer_collective_testing.h"

namespace stiefel {
namespace {

using testing::AllEnded;
using ::testing::HasSubstr;
using testing::kEpoch;
using testing::kRunUid;
using testing::PlannedCollective;
using testing::Simulation;
using Kind = CollectivePart::Kind;

constexpr int64_t kTimeout = int64_t{20} * 1000000;

// What a question was answered.
struct Answer {
  int64_t bytes = 0;
  std::optional<absl::Status> status;
};

class RecordingReply final : public PeerReply {
 public:
  explicit RecordingReply(Answer* answer) : answer_(answer) {}
  void Write(v1::PeerChunk chunk) override {
    answer_->bytes += static_cast<int64_t>(chunk.payload().size());
  }
  void Finish(const absl::Status& status) override { answer_->status = status; }
  bool caller_gone() const override { return false; }

 private:
  Answer* const answer_;
};

// Of server 1 to server 0, about matrix 0.
v1::FetchPartRequest Question(int64_t step = 1, int32_t attempt = 0) {
  v1::FetchPartRequest request;
  request.mutable_sender()->set_run_uid(kRunUid);
  request.mutable_sender()->set_placement_epoch(kEpoch);
  request.mutable_sender()->set_server_index(1);
  request.mutable_key()->set_step(step);
  request.mutable_key()->set_attempt(attempt);
  request.set_shard(0);
  request.set_end(64);
  request.set_wait_seconds(2);
  return request;
}

absl::Status Ask(Simulation* simulation, const v1::FetchPartRequest& request) {
  Answer answer;
  (*simulation)[0].collective().OnFetchPart(request, std::make_unique<RecordingReply>(&answer));
  simulation->RunUntil([&] { return answer.status.has_value(); }, 70);
  return answer.status.value_or(absl::UnknownError("never answered"));
}

TEST(PeerSum, SegmentsCoverTheSumAndBeginAtMultiplesOf16) {
  for (const int64_t count : {0, 1, 15, 16, 17, 100, 4096, 99991}) {
    for (int32_t servers = 1; servers <= 7; ++servers) {
      EXPECT_EQ(SegmentBegin(count, servers, 0), 0);
      EXPECT_EQ(SegmentBegin(count, servers, servers), count);
      for (int32_t j = 0; j < servers; ++j) {
        EXPECT_LE(SegmentBegin(count, servers, j), SegmentBegin(count, servers, j + 1));
        EXPECT_EQ(SegmentBegin(count, servers, j) % 16, 0);
        EXPECT_LE(SegmentBegin(count, servers, j + 1) - SegmentBegin(count, servers, j),
                  count / servers + 32);
      }
    }
  }
  const int64_t most = int64_t{1} << 60;
  EXPECT_EQ(SegmentBegin(most, 1024, 512), most / 2);
}

// DESIGN section 8: 2 (p - 1) m^2 values over all servers with one shard on each.
TEST(PeerCollective, SendsWhatTheFormulaSays) {
  constexpr int64_t kSide = 130;
  for (int servers = 1; servers <= 4; ++servers) {
    std::vector<int32_t> owners(servers);
    for (int i = 0; i < servers; ++i) owners[i] = servers - 1 - i;
    Simulation simulation(servers, servers, {owners}, kTimeout);
    const auto chains = simulation.Chains(
        {1, 0, 0, 0, 0}, {{Kind::kSumFp32, kSide * kSide, true}, {Kind::kGather, 48, false}}, 1);
    ASSERT_TRUE(simulation.RunUntil([&] { return AllEnded(chains); }, 60));
    PeerCollective::Sent sent;
    for (int i = 0; i < servers; ++i) {
      EXPECT_TRUE(chains[i]->status().ok()) << chains[i]->status();
      sent.sums += simulation[i].collective().sent().sums;
      sent.gathers += simulation[i].collective().sent().gathers;
    }
    EXPECT_EQ(sent.sums, 4 * 2 * (servers - 1) * kSide * kSide);
    EXPECT_EQ(sent.gathers, servers * (servers - 1) * 48);
  }
}

// Shards of one server are not added before they are sent: the bits would depend on placement.
TEST(PeerCollective, CoResidentShardsAreSentOneByOne) {
  Simulation simulation(1, 2, {{0, 1, 1}}, kTimeout);
  const auto chains = simulation.Chains({1, 0, 0, 0, 0}, {{Kind::kSumFp64, 3200, false}}, 1);
  ASSERT_TRUE(simulation.RunUntil([&] { return AllEnded(chains); }, 60));
  // Server 0 gives shard 0's half and its finished half; server 1 two shards' halves and one.
  EXPECT_EQ(simulation[0].collective().sent().sums, 8 * (1600 + 1600));
  EXPECT_EQ(simulation[1].collective().sent().sums, 8 * (1600 * 2 + 1600));
}

TEST(PeerCollective, AKilledServerIsNamed) {
  Simulation simulation(1, 3, {{0, 1, 2}}, kTimeout);
  simulation.peers().Kill(simulation[2].address());
  const auto chains = simulation.Chains({4, 1, 0, 0, 0}, {{Kind::kSumFp32, 1000, true}}, 1);
  ASSERT_TRUE(simulation.RunUntil([&] { return AllEnded(chains); }, 21));
  for (const int live : {0, 1}) {
    const absl::Status status = chains[live]->status();
    EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable);
    EXPECT_THAT(std::string(status.message()),
                HasSubstr("collective 0 of matrix 0, step 4, attempt 1, round 0"));
    EXPECT_THAT(std::string(status.message()), HasSubstr("server 2 (host-2:1) of shard 2"));
  }
}

TEST(PeerCollective, AFrozenServerIsNamedAndOneThatWakesIsNot) {
  Simulation simulation(1, 3, {{0, 1, 2}}, kTimeout);
  simulation.peers().Freeze(simulation[1].address());
  const auto lost = simulation.Chains({1, 0, 0, 0, 0}, {{Kind::kGather, 100, false}}, 1);
  ASSERT_TRUE(simulation.RunUntil([&] { return lost[0]->ended() && lost[2]->ended(); }, 21));
  EXPECT_EQ(lost[0]->status().code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_THAT(std::string(lost[0]->status().message()),
              HasSubstr("server 1 (host-1:1) of shard 1"));
  for (int i = 0; i < 3; ++i) simulation[i].collective().Cancel(1, 0);

  const auto chains = simulation.Chains({1, 1, 0, 0, 0}, {{Kind::kSumFp32, 999, true}}, 1);
  const int64_t wake_at = simulation.clock().NowMicros() + kTimeout / 2;
  ASSERT_FALSE(simulation.RunUntil([&] { return AllEnded(chains); }, 10));
  EXPECT_GE(simulation.clock().NowMicros(), wake_at);
  simulation.peers().Thaw(simulation[1].address());
  ASSERT_TRUE(simulation.RunUntil([&] { return AllEnded(chains); }, 10));
  for (const auto& chain : chains) EXPECT_TRUE(chain->status().ok()) << chain->status();
}

// A shard that its own server never starts is what the others hear of.
TEST(PeerCollective, AShardThatDoesNotStartIsNamed) {
  Simulation simulation(1, 2, {{0, 1, 1}}, kTimeout);
  float in[64] = {}, out[64] = {};
  std::optional<absl::Status> ended[2];
  simulation[0].collective().Start({}, {Kind::kSumFp32, 0, 64, in, out},
                                   [&](const absl::Status& status) { ended[0] = status; });
  simulation[1].collective().Start({}, {Kind::kSumFp32, 1, 64, in, out},
                                   [&](const absl::Status& status) { ended[1] = status; });
  ASSERT_TRUE(simulation.RunUntil([&] { return ended[0] && ended[1]; }, 21));
  EXPECT_THAT(std::string(ended[0]->message()), HasSubstr("server 1 (host-1:1) of shard 2"));
  EXPECT_THAT(std::string(ended[1]->message()), HasSubstr("not started here: shard 2"));
}

// A process that was frozen does not take its own absence for its peers'.
TEST(PeerCollective, ALateTickMovesTheDeadline) {
  Simulation simulation(1, 2, {{0, 1}}, kTimeout);
  float in[64] = {}, out[64] = {};
  std::optional<absl::Status> first, second;
  simulation[0].collective().Start({}, {Kind::kSumFp32, 0, 64, in, out},
                                   [&](const absl::Status& status) { first = status; });
  simulation.Settle();
  simulation.Tick();
  simulation.Tick(10 * kTimeout);
  simulation.Settle();
  EXPECT_FALSE(first.has_value());
  simulation[1].collective().Start({}, {Kind::kSumFp32, 1, 64, in, out},
                                   [&](const absl::Status& status) { second = status; });
  ASSERT_TRUE(simulation.RunUntil([&] { return first && second; }, 10));
  EXPECT_TRUE(first->ok()) << *first;
  EXPECT_TRUE(second->ok()) << *second;
}

TEST(PeerCollective, AnAttemptThatIsOverIsRefusedWithBothValues) {
  Simulation simulation(1, 2, {{0, 1}}, kTimeout);
  simulation[0].collective().Cancel(7, 2);
  for (const auto& request : {Question(7, 2), Question(7, 1), Question(6, 9)}) {
    const absl::Status status = Ask(&simulation, request);
    EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
    EXPECT_THAT(std::string(status.message()), HasSubstr("step 7, attempt 2"));
    EXPECT_THAT(std::string(status.message()),
                HasSubstr(absl::StrCat("step ", request.key().step(), ", attempt ",
                                       request.key().attempt())));
  }
  EXPECT_EQ(Ask(&simulation, Question(7, 3)).code(), absl::StatusCode::kDeadlineExceeded);
  std::optional<absl::Status> ended;
  simulation[0].collective().Start({7, 2, 0, 0, 0}, {Kind::kGather, 0, 0, nullptr, nullptr},
                                   [&](const absl::Status& status) { ended = status; });
  EXPECT_FALSE(ended.has_value()) << "done on the calling thread";
  simulation.Settle();
  EXPECT_EQ(ended->code(), absl::StatusCode::kCancelled);
}

// One server gives the attempt up: those that wait for it hear it at once, not at the deadline.
TEST(PeerCollective, ACancelEndsThePeersToo) {
  Simulation simulation(1, 2, {{0, 1}}, kTimeout);
  float in[64] = {}, out[64] = {};
  std::optional<absl::Status> ended;
  simulation[1].collective().Start({}, {Kind::kSumFp32, 1, 64, in, out},
                                   [&](const absl::Status& status) { ended = status; });
  simulation.Settle();
  simulation[0].collective().Cancel(0, 0);
  simulation.Settle();
  ASSERT_TRUE(ended.has_value());
  EXPECT_EQ(ended->code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(ended->message()), HasSubstr("server 0 (host-0:1)"));
}

TEST(PeerCollective, QuestionsThatAreWrongAreRefused) {
  Simulation simulation(1, 3, {{0, 1}, {2}}, kTimeout);
  const auto code = [&](const std::function<void(v1::FetchPartRequest*)>& change) {
    v1::FetchPartRequest request = Question();
    change(&request);
    return Ask(&simulation, request).code();
  };
  using Request = v1::FetchPartRequest;
  const auto failed = absl::StatusCode::kFailedPrecondition;
  const auto invalid = absl::StatusCode::kInvalidArgument;
  EXPECT_EQ(code([](Request* r) { r->mutable_sender()->set_run_uid(8); }), failed);
  EXPECT_EQ(code([](Request* r) { r->mutable_sender()->set_placement_epoch(2); }), failed);
  EXPECT_EQ(code([](Request* r) { r->mutable_sender()->set_placement_epoch(4); }),
            absl::StatusCode::kUnavailable);
  for (const int32_t server : {-1, 0, 2, 3, 1 << 30})
    EXPECT_EQ(code([&](Request* r) { r->mutable_sender()->set_server_index(server); }), invalid);
  for (const int32_t matrix : {-1, 1, 2, 1 << 30})
    EXPECT_EQ(code([&](Request* r) { r->mutable_key()->set_matrix(matrix); }), invalid);
  for (const int32_t shard : {-1, 1, 2, 1 << 30})
    EXPECT_EQ(code([&](Request* r) { r->set_shard(shard); }), invalid);
  EXPECT_EQ(code([](Request* r) { r->set_begin(-1); }), invalid);
  EXPECT_EQ(code([](Request* r) { r->set_begin(64); }), invalid);
  EXPECT_EQ(code([](Request* r) { r->set_end(std::numeric_limits<int64_t>::max()); }), invalid);
  EXPECT_EQ(code([](Request* r) { r->mutable_key()->set_index(-1); }), invalid);
  EXPECT_EQ(code([](Request* r) { r->set_wait_seconds(std::nan("")); }),
            absl::StatusCode::kDeadlineExceeded);
  EXPECT_EQ(code([](Request* r) { r->set_wait_seconds(1e300); }),
            absl::StatusCode::kDeadlineExceeded);

  // Ranges beyond what is there are known once it is.
  float in[32] = {}, out[32] = {};
  simulation[0].collective().Start({1, 0, 0, 0, 0}, {Kind::kSumFp32, 0, 32, in, out},
                                   [](const absl::Status&) {});
  simulation.Settle();
  const auto beyond = absl::StatusCode::kOutOfRange;
  EXPECT_EQ(code([](Request* r) { r->set_end(129); }), beyond);
  EXPECT_EQ(code([](Request* r) { r->set_end(128); }), absl::StatusCode::kOk);
  EXPECT_EQ(code([](Request* r) {  // server 1's segment
              r->clear_shard();
              r->set_begin(64);
              r->set_end(128);
            }),
            beyond);
}

TEST(PeerCollective, PartsThatAreWrongAreRefused) {
  Simulation simulation(1, 2, {{0, 1, 0}}, kTimeout);
  float memory[64] = {};
  const auto start = [&](const CollectiveKey& key, const CollectivePart& part) {
    std::optional<absl::Status> ended;
    simulation[0].collective().Start(key, part,
                                     [&](const absl::Status& status) { ended = status; });
    simulation.Settle();
    return ended.value_or(absl::OkStatus()).code();
  };
  const auto invalid = absl::StatusCode::kInvalidArgument;
  CollectiveKey other;
  other.matrix = 1;
  EXPECT_EQ(start(other, {Kind::kSumFp32, 0, 64, memory, memory}), invalid);
  EXPECT_EQ(start({}, {Kind::kSumFp32, 1, 64, memory, memory}), invalid);
  EXPECT_EQ(start({}, {Kind::kSumFp32, 3, 64, memory, memory}), invalid);
  EXPECT_EQ(start({}, {Kind::kSumFp32, 0, -1, memory, memory}), invalid);
  EXPECT_EQ(start({}, {Kind::kSumFp32, 0, 64, nullptr, memory}), invalid);

  std::optional<absl::Status> first;
  simulation[0].collective().Start({}, {Kind::kSumFp32, 0, 64, memory, memory},
                                   [&](const absl::Status& status) { first = status; });
  EXPECT_EQ(start({}, {Kind::kSumFp32, 0, 64, memory, memory}), invalid);  // twice
  EXPECT_FALSE(first.has_value());
  EXPECT_EQ(start({}, {Kind::kSumFp32, 2, 63, memory, memory}), invalid);  // another count
  EXPECT_EQ(first->code(), invalid);
}

// What is kept is bounded: the last collective of a matrix until its attempt is over, and what is
// asked for until nobody waits for it.
TEST(PeerCollective, ForgetsWhatNobodyNeeds) {
  Simulation simulation(1, 2, {{0, 1}}, kTimeout);
  const std::vector<PlannedCollective> planned(5, {Kind::kSumFp32, 100, true});
  const auto chains = simulation.Chains({1, 0, 0, 0, 0}, planned, 1);
  ASSERT_TRUE(simulation.RunUntil([&] { return AllEnded(chains); }, 10));
  for (const int i : {0, 1}) EXPECT_LE(simulation[i].collective().operations(), 2);
  EXPECT_EQ(Ask(&simulation, Question(2)).code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_EQ(simulation[0].collective().operations(), 2);
  simulation.Tick();
  EXPECT_EQ(simulation[0].collective().operations(), 1);
  simulation[0].collective().Cancel(1, 0);
  EXPECT_EQ(simulation[0].collective().operations(), 0);
}

TEST(PeerCollective, GroupsThatAreWrongAreRefused) {
  const auto created = [](const PeerGroup& group, int64_t timeout) {
    return PeerCollective::Create(group, {nullptr, nullptr, nullptr, timeout}).status().code();
  };
  const auto invalid = absl::StatusCode::kInvalidArgument;
  EXPECT_EQ(created(testing::Group(2, {{0}}, 2), kTimeout), invalid);
  EXPECT_EQ(created(testing::Group(2, {{0}, {}}, 0), kTimeout), invalid);
  EXPECT_EQ(created(testing::Group(2, {{0, 2}}, 0), kTimeout), invalid);
  EXPECT_EQ(created(testing::Group(2, {{0, 1}}, 0), 999), invalid);
}

}  // namespace
}  // namespace stiefel
