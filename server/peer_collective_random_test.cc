// Collectives of random groups under random faults, in random orders: every outcome has the bits of
// a plain loop, or is an error; and with real threads.
#include <cstdlib>
#include <iostream>
#include <limits>
#include <map>
#include <thread>

#include "server/peer_collective_testing.h"

namespace stiefel {
namespace {

using testing::AllEnded;
using testing::CollectiveServer;
using testing::Group;
using testing::PlannedCollective;
using testing::ShardChain;
using testing::Simulation;
using Kind = CollectivePart::Kind;

int Cases(int usual, int full) {
  const char* scale = std::getenv("STIEFEL_TEST_SCALE");
  const int cases = scale != nullptr && std::string(scale) == "full" ? full : usual;
  std::cout << cases << " cases\n";
  return cases;
}

struct Drawn {
  int servers;
  std::vector<std::vector<int32_t>> owners;
  std::vector<std::vector<PlannedCollective>> planned;  // by matrix
};

// Servers 1..4, matrices of 1..6 shards with any owners, counts around every bound.
Drawn Draw(std::mt19937_64* random) {
  const auto up_to = [random](int64_t most) {
    return static_cast<int64_t>((*random)() % static_cast<uint64_t>(most + 1));
  };
  constexpr int64_t kCounts[] = {0, 1, 2, 7, 15, 16, 17, 31, 64, 97, 127, 997};
  constexpr int64_t kLarge = 600011;  // several pieces a segment
  Drawn drawn{static_cast<int>(1 + up_to(3)), {}, {}};
  for (int64_t matrices = 1 + up_to(1); matrices > 0; --matrices) {
    std::vector<int32_t> owners(1 + up_to(5));
    for (int32_t& owner : owners) owner = static_cast<int32_t>(up_to(drawn.servers - 1));
    drawn.owners.push_back(std::move(owners));
    std::vector<PlannedCollective> planned(1 + up_to(3));
    for (PlannedCollective& one : planned) {
      one.kind = static_cast<Kind>(up_to(2));
      one.count = up_to(3) == 0 ? up_to(5000) : kCounts[up_to(11)];
      if (up_to(39) == 0) one.count = kLarge;
      one.in_place = one.kind != Kind::kGather && up_to(1) == 0;
    }
    drawn.planned.push_back(std::move(planned));
  }
  return drawn;
}

using Chains = std::vector<std::unique_ptr<ShardChain>>;

Chains StartAll(Simulation* simulation, const Drawn& drawn, int64_t step, int32_t attempt,
                uint64_t seed) {
  Chains all;
  for (size_t matrix = 0; matrix < drawn.owners.size(); ++matrix) {
    Chains chains = simulation->Chains({step, attempt, 0, static_cast<int32_t>(matrix), 0},
                                       drawn.planned[matrix], seed + 100 * matrix);
    for (auto& chain : chains) all.push_back(std::move(chain));
  }
  return all;
}

TEST(PeerCollectiveRandom, SumsAndGathersSurviveABadNetwork) {
  const int cases = Cases(60, 5000);
  for (int seed = 0; seed < cases; ++seed) {
    SCOPED_TRACE(seed);
    std::mt19937_64 random(seed);
    const Drawn drawn = Draw(&random);
    Simulation simulation(seed, drawn.servers, drawn.owners, int64_t{600} * 1000000);
    if (seed % 3 != 0) simulation.peers().set_faults({0.05, 0.1, 0.05, 0.05});
    for (int64_t step = 1; step <= 2; ++step) {
      const Chains chains = StartAll(&simulation, drawn, step, 0, seed);
      ASSERT_TRUE(simulation.RunUntil([&] { return AllEnded(chains); }, 600));
      for (const auto& chain : chains) EXPECT_TRUE(chain->status().ok()) << chain->status();
      for (int i = 0; i < drawn.servers; ++i) simulation[i].collective().Cancel(step, 0);
    }
    ASSERT_TRUE(simulation.RunUntil([&] { return simulation.peers().pending() == 0; }, 60));
  }
}

// An attempt is dropped at any moment, on the servers at different times: its memory is nobody's
// then, and the next attempt is computed as if nothing had been.
TEST(PeerCollectiveRandom, ADroppedAttemptLeavesItsMemoryAlone) {
  const int cases = Cases(60, 5000);
  int dropped = 0;
  for (int seed = 0; seed < cases; ++seed) {
    SCOPED_TRACE(seed);
    std::mt19937_64 random(seed);
    const Drawn drawn = Draw(&random);
    Simulation simulation(seed, drawn.servers, drawn.owners, int64_t{600} * 1000000);
    simulation.peers().set_faults({0.02, 0.1, 0.02, 0.02});
    const Chains old = StartAll(&simulation, drawn, 1, 0, seed);
    for (uint64_t events = random() % 200; events > 0; --events) simulation.Step();
    std::vector<size_t> cancelled;
    for (int i = 0; i < drawn.servers; ++i) {
      simulation[i].collective().Cancel(1, 0);
      size_t at = 0;
      for (const std::vector<int32_t>& owners : drawn.owners) {
        for (const int32_t owner : owners) {
          if (owner == i && !old[at]->ended()) cancelled.push_back(at);
          ++at;
        }
      }
      for (uint64_t events = random() % 20; events > 0; --events) simulation.Step();
    }
    ASSERT_TRUE(simulation.RunUntil([&] { return AllEnded(old); }, 60));
    for (const size_t at : cancelled) old[at]->Scribble();
    const Chains next = StartAll(&simulation, drawn, 1, 1, seed + 50);
    ASSERT_TRUE(simulation.RunUntil([&] { return AllEnded(next); }, 600));
    for (const auto& chain : next) EXPECT_TRUE(chain->status().ok()) << chain->status();
    for (const size_t at : cancelled) EXPECT_TRUE(old[at]->StillScribbled());
    for (const auto& chain : old) dropped += chain->status().ok() ? 0 : 1;
  }
  EXPECT_GT(dropped, cases / 10);  // else this test looks at nothing
  std::cout << dropped << " chains dropped\n";
}

// A server is lost at any moment, for good or as if frozen: the others end within the deadline.
TEST(PeerCollectiveRandom, ALostServerEndsTheOthersInTime) {
  const int cases = Cases(60, 5000);
  int failed = 0;
  for (int seed = 0; seed < cases; ++seed) {
    SCOPED_TRACE(seed);
    std::mt19937_64 random(seed);
    Drawn drawn = Draw(&random);
    if (drawn.servers == 1) continue;
    Simulation simulation(seed, drawn.servers, drawn.owners, int64_t{20} * 1000000);
    const Chains chains = StartAll(&simulation, drawn, 1, 0, seed);
    for (uint64_t events = random() % 100; events > 0; --events) simulation.Step();
    const int lost = static_cast<int>(random() % drawn.servers);
    if (random() % 2 == 0) {
      simulation.peers().Kill(simulation[lost].address());
    } else {
      simulation.peers().Freeze(simulation[lost].address());
    }
    ASSERT_TRUE(simulation.RunUntil([&] { return AllEnded(chains); }, 21 * 5));
    size_t at = 0;
    int here = 0, named = 0;
    for (const std::vector<int32_t>& owners : drawn.owners) {
      for (const int32_t owner : owners) {
        const absl::Status status = chains[at++]->status();
        if (status.ok() || owner == lost) continue;
        ++here;
        const std::string message(status.message());
        if (message.find(absl::StrCat("server ", lost)) != std::string::npos) {
          ++named;
        } else {
          // Who got further waits for one that waits for the lost server.
          EXPECT_NE(message.find("has not begun there"), std::string::npos) << status;
        }
      }
    }
    EXPECT_TRUE(here == 0 || named > 0);
    failed += here;
  }
  EXPECT_GT(failed, cases / 10);
  std::cout << failed << " chains failed\n";
}

// What another owner could ask server `asked`, as often as not with one value that is wrong.
v1::FetchPartRequest HostileQuestion(const Drawn& drawn, int asked, std::mt19937_64* random) {
  constexpr int64_t kMost = std::numeric_limits<int64_t>::max();
  const auto pick = [random](const std::vector<int64_t>& values) {
    return values[(*random)() % values.size()];
  };
  v1::FetchPartRequest request;
  const auto matrix = static_cast<int32_t>((*random)() % drawn.owners.size());
  const std::vector<int32_t>& owners = drawn.owners[matrix];
  request.mutable_sender()->set_run_uid(testing::kRunUid);
  request.mutable_sender()->set_placement_epoch(testing::kEpoch);
  request.mutable_key()->set_step(1);
  request.mutable_key()->set_matrix(matrix);
  request.mutable_key()->set_index(static_cast<int32_t>(pick({0, 1, 2})));
  for (size_t shard = 0; shard < owners.size(); ++shard) {
    if (owners[shard] == asked) {
      request.set_shard(static_cast<int32_t>(shard));
    } else {
      request.mutable_sender()->set_server_index(owners[shard]);
    }
  }
  if ((*random)() % 3 == 0) request.clear_shard();
  request.set_end(pick({1, 4, 64}));
  request.set_wait_seconds(static_cast<double>(pick({0, 1, 5})));
  switch ((*random)() % 16) {
    case 0:
      request.mutable_sender()->set_server_index(static_cast<int32_t>(pick({asked, 4, -1})));
      break;
    case 1:
      request.mutable_key()->set_step(pick({0, 2, -kMost, kMost}));
      break;
    case 2:
      request.mutable_key()->set_matrix(static_cast<int32_t>(pick({-1, 2, 1 << 30})));
      break;
    case 3:
      request.mutable_key()->set_index(static_cast<int32_t>(pick({-1, 3, 1 << 30})));
      break;
    case 4:
      request.set_shard(static_cast<int32_t>(pick({0, 1, 6, -1, 1 << 30})));
      break;
    case 5:
      request.set_begin(pick({-1, 64, 1 << 20, kMost}));
      break;
    case 6:
      request.set_end(pick({-1, 1 << 20, 4 << 20, kMost}));
      break;
    case 7:
      request.set_wait_seconds(static_cast<double>(pick({-1, kMost})));
      break;
    default:
      break;
  }
  return request;
}

// A peer that asks for anything, at any time: it is answered, and the sums do not suffer.
TEST(PeerCollectiveRandom, AHostilePeerIsAnsweredAndChangesNothing) {
  const int cases = Cases(40, 2000);
  std::map<absl::StatusCode, int> answers;
  for (int seed = 0; seed < cases; ++seed) {
    SCOPED_TRACE(seed);
    std::mt19937_64 random(seed);
    const Drawn drawn = Draw(&random);
    Simulation simulation(seed, drawn.servers, drawn.owners, int64_t{600} * 1000000);
    const auto hostile = simulation.peers().Transport("hostile:1");
    const Chains chains = StartAll(&simulation, drawn, 1, 0, seed);
    std::vector<std::unique_ptr<PeerCall>> calls;
    for (int i = 0; i < 100; ++i) {
      const int asked = static_cast<int>(random() % drawn.servers);
      const v1::FetchPartRequest request = HostileQuestion(drawn, asked, &random);
      calls.push_back(hostile->FetchPart(
          simulation[asked].address(), request, 90000000, [](const v1::PeerChunk&) {},
          [&answers](const absl::Status& status) { ++answers[status.code()]; }));
      for (uint64_t events = random() % 4; events > 0; --events) simulation.Step();
    }
    ASSERT_TRUE(simulation.RunUntil([&] { return AllEnded(chains); }, 600));
    for (const auto& chain : chains) EXPECT_TRUE(chain->status().ok()) << chain->status();
    ASSERT_TRUE(simulation.RunUntil([&] { return simulation.peers().pending() == 0; }, 120));
  }
  for (const auto& [code, count] : answers)
    std::cout << absl::StatusCodeToString(code) << " " << count << "\n";
  EXPECT_GT(answers[absl::StatusCode::kOk], cases);
  EXPECT_GT(answers[absl::StatusCode::kInvalidArgument], cases);
  EXPECT_GT(answers[absl::StatusCode::kDeadlineExceeded], cases);
}

// Real threads, for ThreadSanitizer: attempts are dropped while they run, from other threads.
TEST(PeerCollectiveRandom, Threads) {
  const int cases = Cases(6, 300);
  for (int seed = 0; seed < cases; ++seed) {
    SCOPED_TRACE(seed);
    std::mt19937_64 random(seed);
    const Drawn drawn = Draw(&random);
    PeerWorkers workers(2);
    MemoryPeers peers(seed, &RealClock());
    std::vector<std::unique_ptr<CollectiveServer>> servers;
    for (int i = 0; i < drawn.servers; ++i) {
      servers.push_back(std::make_unique<CollectiveServer>(
          Group(drawn.servers, drawn.owners, i), &peers, &workers, &RealClock(), 60000000));
    }
    peers.StartThread();
    for (int32_t attempt = 0; attempt < 6; ++attempt) {
      Chains chains;
      for (size_t matrix = 0; matrix < drawn.owners.size(); ++matrix) {
        const std::vector<int32_t>& owners = drawn.owners[matrix];
        const auto of_matrix = testing::MakeCases(drawn.planned[matrix], owners.size(), seed);
        for (size_t shard = 0; shard < owners.size(); ++shard) {
          chains.push_back(std::make_unique<ShardChain>(
              &servers[owners[shard]]->collective(),
              CollectiveKey{1, attempt, 0, static_cast<int32_t>(matrix), 0}, shard, of_matrix));
          chains.back()->Next();
        }
      }
      const bool drop = attempt % 2 == 0;
      while (!drop && !AllEnded(chains)) {
        std::this_thread::yield();
        for (const auto& server : servers) server->collective().Tick();
      }
      for (const auto& server : servers) server->collective().Cancel(1, attempt);
      while (!AllEnded(chains)) std::this_thread::yield();
      if (drop) continue;
      for (const auto& chain : chains) EXPECT_TRUE(chain->status().ok()) << chain->status();
    }
    for (int i = 0; i < drawn.servers; ++i) peers.Kill(servers[i]->address());
  }
}

}  // namespace
}  // namespace stiefel
