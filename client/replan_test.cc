#include "client/replan.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <set>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace stiefel {
namespace {

using ::testing::HasSubstr;

MoveShard Shard(const std::string& name, int64_t rows, int64_t cols,
                const std::string& preset = "muon") {
  MoveShard shard;
  shard.shard.name = name;
  shard.shard.rows = rows;
  shard.shard.cols = cols;
  shard.shard.rule = *PresetRule(preset);
  shard.pushed_elements = rows * cols;
  return shard;
}

MoveServer Server(const std::string& address, int64_t memory = int64_t{1} << 40) {
  MoveServer server;
  server.address = address;
  server.memory_bytes = memory;
  return server;
}

// Twelve equal matrices dealt over `servers` servers.
MoveRequest Request(int servers, int shards = 12) {
  MoveRequest request;
  for (int s = 0; s < servers; ++s) request.servers.push_back(Server(absl::StrCat("s", s)));
  for (int i = 0; i < shards; ++i) {
    request.shards.push_back(Shard(absl::StrCat("m", i), 64, 64));
    request.owners.push_back(i % servers);
  }
  request.max_bytes = int64_t{1} << 40;
  return request;
}

std::vector<int> Counts(const std::vector<int32_t>& owners, size_t servers) {
  std::vector<int> counts(servers, 0);
  for (const int32_t owner : owners) ++counts[owner];
  return counts;
}

TEST(PlanMoveTest, WithoutACauseNothingMoves) {
  const auto plan = PlanMove(Request(3));
  ASSERT_TRUE(plan.ok()) << plan.status();
  EXPECT_EQ(plan->owners, Request(3).owners);
  EXPECT_EQ(plan->shards_moved, 0);
  EXPECT_EQ(plan->bytes_moved, 0);
  EXPECT_TRUE(plan->complete);
}

TEST(PlanMoveTest, ADrainedServerIsEmptiedAndTheRestStays) {
  MoveRequest request = Request(3);
  request.servers[1].drain = true;
  const auto plan = PlanMove(request);
  ASSERT_TRUE(plan.ok()) << plan.status();
  EXPECT_TRUE(plan->complete);
  EXPECT_EQ(plan->shards_moved, 4);
  EXPECT_EQ(plan->bytes_moved, 4 * 64 * 64 * 4);  // momentum alone
  EXPECT_EQ(Counts(plan->owners, 3), (std::vector<int>{6, 0, 6}));
  for (size_t i = 0; i < request.owners.size(); ++i) {
    if (request.owners[i] == 1) continue;
    EXPECT_EQ(plan->owners[i], request.owners[i]) << i;
  }
}

TEST(PlanMoveTest, BytesAreBoundedAndRepeatedCallsComplete) {
  MoveRequest request = Request(3);
  request.servers[1].drain = true;
  request.max_bytes = 64 * 64 * 4 * 2 + 1;  // two of four
  int moves = 0;
  for (bool complete = false; !complete; ++moves) {
    const auto plan = PlanMove(request);
    ASSERT_TRUE(plan.ok()) << plan.status();
    ASSERT_GT(plan->shards_moved, 0);
    EXPECT_LE(plan->bytes_moved, request.max_bytes);
    request.owners = plan->owners;
    complete = plan->complete;
    ASSERT_LT(moves, 10);
  }
  EXPECT_EQ(moves, 2);
  request.max_bytes = 1;  // one shard may always move
  request.servers[2].drain = true;
  const auto plan = PlanMove(request);
  ASSERT_TRUE(plan.ok()) << plan.status();
  EXPECT_EQ(plan->shards_moved, 1);
  EXPECT_FALSE(plan->complete);
}

TEST(PlanMoveTest, AnAddedServerTakesAFairShare) {
  MoveRequest request = Request(2);
  request.servers.push_back(Server("new"));
  request.servers[2].fill = true;
  const auto plan = PlanMove(request);
  ASSERT_TRUE(plan.ok()) << plan.status();
  EXPECT_TRUE(plan->complete);
  EXPECT_EQ(Counts(plan->owners, 3), (std::vector<int>{4, 4, 4}));
  EXPECT_EQ(plan->shards_moved, 4);
  request.servers[2].speed = 2;
  EXPECT_EQ(Counts(PlanMove(request)->owners, 3), (std::vector<int>{3, 3, 6}));
}

TEST(PlanMoveTest, AServerIsReplaced) {
  MoveRequest request = Request(2);
  request.servers[0].drain = true;
  request.servers.push_back(Server("new"));
  request.servers[2].fill = true;
  const auto plan = PlanMove(request);
  ASSERT_TRUE(plan.ok()) << plan.status();
  EXPECT_EQ(Counts(plan->owners, 3), (std::vector<int>{0, 6, 6}));
  EXPECT_EQ(plan->shards_moved, 6);
}

TEST(PlanMoveTest, PairsMoveTogether) {
  MoveRequest request = Request(2, 0);
  for (int i = 0; i < 6; ++i) {
    MoveShard a = Shard(absl::StrCat("a", i), 4, 32, "adamw");
    MoveShard b = Shard(absl::StrCat("b", i), 32, 4, "adamw");
    a.with = 2 * i + 1;
    b.with = 2 * i;
    request.shards.push_back(a);
    request.shards.push_back(b);
    request.owners.insert(request.owners.end(), {i % 2, i % 2});
  }
  request.servers[0].drain = true;
  request.servers.push_back(Server("new"));
  request.max_bytes = 1;
  const auto plan = PlanMove(request);
  ASSERT_TRUE(plan.ok()) << plan.status();
  EXPECT_EQ(plan->shards_moved, 2);
  for (int i = 0; i < 6; ++i) EXPECT_EQ(plan->owners[2 * i], plan->owners[2 * i + 1]);
}

TEST(PlanMoveTest, RefusalsSayTheNumbers) {
  MoveRequest request = Request(2);
  request.servers[0].drain = request.servers[1].drain = true;
  auto plan = PlanMove(request);
  EXPECT_EQ(plan.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(plan.status().message()), HasSubstr("all 2 servers"));
  request.servers[1].drain = false;
  request.servers[1].memory_bytes = 300000;
  request.max_bytes = 1;  // refused before the first of many moves, not after some
  plan = PlanMove(request);
  EXPECT_EQ(plan.status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(plan.status().message()), HasSubstr("64 x 64"));
  EXPECT_THAT(std::string(plan.status().message()), HasSubstr("s1 "));
  request.owners[0] = 2;
  EXPECT_EQ(PlanMove(request).status().code(), absl::StatusCode::kInvalidArgument);
}

// Whatever is drained and added: shards stay unless there is a cause, the bound holds, and repeated
// moves come to an end with nothing on drained servers.
TEST(PlanMoveTest, RandomRequestsComeToAnEnd) {
  const char* scale = std::getenv("STIEFEL_TEST_SCALE");
  const int rounds = scale != nullptr && std::strcmp(scale, "full") == 0 ? 3000 : 60;
  std::mt19937_64 random(5);
  int64_t moves = 0;
  for (int round = 0; round < rounds; ++round) {
    MoveRequest request;
    const int servers = 2 + static_cast<int>(random() % 4);
    for (int s = 0; s < servers; ++s) {
      request.servers.push_back(Server(absl::StrCat("s", s)));
      request.servers[s].speed = 1 + static_cast<double>(random() % 3);
      if (s > 0) request.servers[s].drain = random() % 3 == 0;
      request.servers[s].fill = !request.servers[s].drain && random() % 3 == 0;
    }
    const int shards = 1 + static_cast<int>(random() % 20);
    for (int i = 0; i < shards; ++i) {
      MoveShard shard = Shard(absl::StrCat("m", i), 8 << (random() % 4), 8 << (random() % 4),
                              random() % 2 == 0 ? "muonbp" : "adamw");
      shard.phase = static_cast<int64_t>(random() % shard.shard.rule.period);
      request.shards.push_back(shard);
      request.owners.push_back(static_cast<int32_t>(random() % servers));
    }
    request.max_bytes = 1 << (8 + random() % 8);
    for (int i = 0;; ++i) {
      ASSERT_LT(i, 200) << "round " << round;
      const auto plan = PlanMove(request);
      ASSERT_TRUE(plan.ok()) << plan.status();
      int64_t moved = 0;
      for (int s = 0; s < shards; ++s) {
        if (plan->owners[s] == request.owners[s]) continue;
        ++moved;
        EXPECT_FALSE(request.servers[plan->owners[s]].drain);
        EXPECT_TRUE(request.servers[request.owners[s]].drain ||
                    request.servers[plan->owners[s]].fill);
      }
      EXPECT_EQ(plan->shards_moved, moved);
      EXPECT_TRUE(moved <= 1 || plan->bytes_moved <= request.max_bytes);
      request.owners = plan->owners;
      moves += moved > 0;
      if (plan->complete) break;
      ASSERT_GT(moved, 0);
    }
    for (const int32_t owner : request.owners) EXPECT_FALSE(request.servers[owner].drain);
  }
  std::printf("%d requests, %lld moves\n", rounds, static_cast<long long>(moves));
}

}  // namespace
}  // namespace stiefel
