#include "plan/placement.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <map>
#include <numeric>
#include <random>

#include "plan/cost.h"
#include "plan/model.h"
#include "plan/shards.h"

namespace stiefel {
namespace {

using ::testing::HasSubstr;

PlanMatrix Matrix(int64_t rows, int64_t cols, const char* preset) {
  return PlanMatrix{"w", rows, cols, *PresetRule(preset)};
}

PlanRequest Request(std::vector<PlanMatrix> matrices, size_t servers) {
  PlanRequest request;
  request.matrices = std::move(matrices);
  request.servers.resize(servers);
  return request;
}

PlanRequest RealModel(const std::string& name, size_t servers, const std::string& preset = "") {
  ModelOverrides overrides;
  overrides.preset = preset;
  return Request(Matrices(*ReadModel("plan/models/" + name + ".json", overrides)), servers);
}

// Every shard as a matrix of its own, in the order of Plan::owners.
struct Placed {
  PlanMatrix matrix;
  int64_t phase = 0;
};

std::vector<Placed> PlacedShards(const PlanRequest& request, const Plan& plan) {
  std::vector<Placed> placed;
  for (const PlanShard& shard : ShardsOfPlan(request.matrices, plan.cuts)) {
    const auto count = static_cast<int64_t>(plan.cuts[shard.matrix].size()) + 1;
    placed.push_back({ShardOfMatrix(request.matrices[shard.matrix], shard.rect, count),
                      plan.phases[shard.matrix]});
  }
  return placed;
}

// The stated bound, for each set of matrices that refresh together.
void ExpectBound(const PlanRequest& request, const Plan& plan) {
  const auto p = static_cast<double>(request.servers.size());
  std::map<std::pair<int64_t, int64_t>, std::vector<double>> loads;
  std::map<std::pair<int64_t, int64_t>, double> dearest;
  const std::vector<Placed> shards = PlacedShards(request, plan);
  ASSERT_EQ(plan.owners.size(), shards.size());
  for (size_t i = 0; i < shards.size(); ++i) {
    ASSERT_GE(plan.owners[i], 0);
    ASSERT_LT(plan.owners[i], static_cast<int32_t>(request.servers.size()));
    const std::pair<int64_t, int64_t> set(shards[i].matrix.rule.period, shards[i].phase);
    const double cost = StepCost(shards[i].matrix, StepKind::kRefresh).Units();
    loads[set].resize(request.servers.size(), 0);
    loads[set][plan.owners[i]] += cost;
    dearest[set] = std::max(dearest[set], cost);
  }
  for (const auto& [set, load] : loads) {
    const double mean = std::accumulate(load.begin(), load.end(), 0.0) / p;
    EXPECT_LE(*std::max_element(load.begin(), load.end()), mean + (1 - 1 / p) * dearest[set])
        << "period " << set.first << " phase " << set.second;
  }
}

// Slowest server / mean, at the worst step of the cycle.
double WorstBalance(const PlanRequest& request, const Plan& plan) {
  double worst = 1;
  for (int64_t step = 1; step <= CycleSteps(request.matrices); ++step) {
    std::vector<double> loads(request.servers.size(), 0);
    const std::vector<Placed> shards = PlacedShards(request, plan);
    for (size_t i = 0; i < shards.size(); ++i) {
      const PlanMatrix& matrix = shards[i].matrix;
      loads[plan.owners[i]] +=
          StepCost(matrix, KindAtStep(matrix.rule, shards[i].phase, step)).Units();
    }
    const double sum = std::accumulate(loads.begin(), loads.end(), 0.0);
    worst = std::max(worst, *std::max_element(loads.begin(), loads.end()) *
                                static_cast<double>(loads.size()) / sum);
  }
  return worst;
}

TEST(MakePlan, LargeModelsAreLevelOnManyServers) {
  const struct {
    const char* name;
    size_t servers;
  } cases[] = {{"llama3_8b", 8}, {"mixtral_like", 16}};
  for (const auto& model : cases) {
    const PlanRequest request = RealModel(model.name, model.servers);
    const Plan plan = *MakePlan(request);
    ExpectBound(request, plan);
    const double balance = WorstBalance(request, plan);
    printf("%s on %zu servers: max/mean %.4f\n", model.name, model.servers, balance);
    EXPECT_LE(balance, 1.05) << model.name;
  }
}

TEST(MakePlan, RealModelsAreWithinTheBoundAndLevelAtEveryStep) {
  for (const char* name : {"gpt2_124m", "llama3_8b", "mixtral_like"}) {
    for (size_t servers : {1, 2, 3, 8}) {
      const PlanRequest request = RealModel(name, servers);
      const Plan plan = *MakePlan(request);
      ExpectBound(request, plan);
      const double balance = WorstBalance(request, plan);
      printf("%s on %zu servers: max/mean %.4f\n", name, servers, balance);
      // GPT-2 has 16 hidden matrices a residue, of which 8 servers can at best get two each.
      EXPECT_LE(balance, servers == 8 ? 1.5 : 1.2) << name << " on " << servers;
    }
  }
}

TEST(MakePlan, RandomModelsAreWithinTheBound) {
  std::mt19937 random(11);
  for (int round = 0; round < 300; ++round) {
    std::vector<PlanMatrix> matrices;
    for (size_t i = 0, n = random() % 40; i < n; ++i) {
      const char* presets[] = {"periodic_rowwise_muon", "muon", "adamw"};
      matrices.push_back(Matrix(1 + random() % 800, 1 + random() % 800, presets[random() % 3]));
      if (matrices.back().rule.period > 1) matrices.back().rule.period = 2 + random() % 3;
    }
    const PlanRequest request = Request(matrices, 1 + random() % 6);
    ExpectBound(request, *MakePlan(request));
  }
}

TEST(MakePlan, LocalImprovementLevelsWhatTheDealLeaves) {
  // Largest first alone gives 5+3+3 | 5+4 = 11 to 9 of these five; a swap gives 5+5 | 4+3+3.
  std::vector<PlanMatrix> matrices;
  for (int64_t cost : {5, 5, 4, 3, 3}) matrices.push_back(Matrix(1000 * cost, 1000, "adamw"));
  const PlanRequest request = Request(matrices, 2);
  EXPECT_DOUBLE_EQ(WorstBalance(request, *MakePlan(request)), 1.0);
}

TEST(MakePlan, IsDeterministicAndBlindToNames) {
  for (const char* name : {"gpt2_124m", "mixtral_like"}) {
    PlanRequest request = RealModel(name, 5);
    const Plan plan = *MakePlan(request);
    const Plan again = *MakePlan(request);
    EXPECT_EQ(again.owners, plan.owners);
    for (size_t i = 0; i < request.matrices.size(); ++i) {
      request.matrices[i].name = std::to_string(i * 7919 % 1000);
    }
    const Plan renamed = *MakePlan(request);
    EXPECT_EQ(renamed.owners, plan.owners);
    EXPECT_EQ(renamed.cuts, plan.cuts);
    EXPECT_EQ(renamed.phases, plan.phases);
  }
}

TEST(MakePlan, PhasesDoNotDependOnTheServers) {
  const Plan one = *MakePlan(RealModel("llama3_8b", 1));
  EXPECT_EQ(MakePlan(RealModel("llama3_8b", 7))->phases, one.phases);
}

// Factors of `count` products among other matrices, the partners far apart.
std::vector<PlanMatrix> Pairs(int count, std::mt19937* random) {
  std::vector<PlanMatrix> matrices;
  const auto factor = [&](int i, const char* mine, const char* other, int64_t rows, int64_t cols) {
    matrices.push_back(Matrix(rows, cols, "polora"));
    matrices.back().name = mine + std::to_string(i);
    matrices.back().rule.pair = other + std::to_string(i);
  };
  std::vector<int64_t> ranks;
  for (int i = 0; i < count; ++i) {
    ranks.push_back(1 + static_cast<int64_t>((*random)() % 16));
    factor(i, "a", "b", ranks[i], 17 + static_cast<int64_t>((*random)() % 500));
  }
  for (int i = 0; i < 10; ++i) matrices.push_back(Matrix(1 + (*random)() % 200, 100, "muon"));
  for (int i = 0; i < count; ++i) {
    factor(i, "b", "a", 17 + static_cast<int64_t>((*random)() % 500), ranks[i]);
  }
  return matrices;
}

TEST(MakePlan, APairStaysOnOneServer) {
  std::mt19937 random(5);
  for (int round = 0; round < 50; ++round) {
    const int count = 1 + static_cast<int>(random() % 12);
    PlanRequest request = Request(Pairs(count, &random), 2 + random() % 5);
    const auto plan = MakePlan(request);
    ASSERT_TRUE(plan.ok()) << plan.status();
    for (int i = 0; i < count; ++i) {
      ASSERT_EQ(plan->owners[i], plan->owners[count + 10 + i]) << "round " << round;
    }
    EXPECT_EQ(std::count(plan->owners.begin(), plan->owners.end(), -1), 0);
    // Other names, the same places.
    for (PlanMatrix& matrix : request.matrices) {
      matrix.name = "x" + matrix.name;
      if (!matrix.rule.pair.empty()) matrix.rule.pair = "x" + matrix.rule.pair;
    }
    EXPECT_EQ(MakePlan(request)->owners, plan->owners);
  }
}

TEST(MakePlan, APairFitsOrNot) {
  std::mt19937 random(6);
  PlanRequest request = Request(Pairs(1, &random), 2);
  request.matrices.erase(request.matrices.begin() + 1, request.matrices.end() - 1);
  MemoryTally one(request.memory);
  one.Add(*BytesOfMatrix(request.matrices[0], request.matrices[0].rows * request.matrices[0].cols,
                         request.memory));
  for (ServerSpec& server : request.servers) server.memory_bytes = one.Total() + 100;
  const absl::Status status = MakePlan(request).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(status.message()), HasSubstr("no server has room for a0"));
  EXPECT_THAT(std::string(status.message()), HasSubstr(" and b0 ("));
}

TEST(MakePlan, APairWithoutItsPartnerIsRefused) {
  std::mt19937 random(7);
  PlanRequest request = Request(Pairs(2, &random), 2);
  request.matrices.pop_back();
  const absl::Status status = MakePlan(request).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(status.message()), HasSubstr("a1: its other factor, pair=\"b1\""));
}

// CASES D12
TEST(MakePlan, MoreServersThanMatrices) {
  const PlanRequest request = Request(std::vector<PlanMatrix>(3, Matrix(64, 64, "muon")), 8);
  const Plan plan = *MakePlan(request);
  EXPECT_EQ(std::set<int32_t>(plan.owners.begin(), plan.owners.end()).size(), 3u);
  EXPECT_TRUE(MakePlan(Request({}, 2))->owners.empty());
}

TEST(MakePlan, AFasterServerGetsMore) {
  PlanRequest request = Request(std::vector<PlanMatrix>(40, Matrix(256, 256, "muon")), 2);
  request.servers[1].speed = 3;
  const Plan plan = *MakePlan(request);
  EXPECT_EQ(std::count(plan.owners.begin(), plan.owners.end(), 1), 30);
}

TEST(MakePlan, RespectsMemory) {
  PlanRequest request = Request(std::vector<PlanMatrix>(10, Matrix(256, 256, "muon")), 3);
  MemoryTally two(request.memory);
  const MatrixBytes bytes = *BytesOfMatrix(request.matrices[0], 256 * 256, request.memory);
  two.Add(bytes);
  two.Add(bytes);
  request.servers[0].memory_bytes = two.Total();
  const Plan plan = *MakePlan(request);
  EXPECT_EQ(std::count(plan.owners.begin(), plan.owners.end(), 0), 2);
}

TEST(MakePlan, PlacesBySizeWhereCostWouldLeaveNoRoom) {
  // By cost the four spectral matrices go first and spread; then no server has room for the large
  // element-wise one.
  std::vector<PlanMatrix> matrices(4, Matrix(512, 512, "muon"));
  matrices.push_back(Matrix(512, 1600, "sgd"));
  PlanRequest request = Request(matrices, 2);
  MemoryTally most(request.memory);
  for (size_t i = 0; i < 4; ++i) most.Add(*BytesOfMatrix(matrices[i], 512 * 512, request.memory));
  const MatrixBytes large = *BytesOfMatrix(matrices[4], 512 * 1600, request.memory);
  for (ServerSpec& server : request.servers) {
    server.memory_bytes = std::max(most.Total(), large.Resident());
  }
  const absl::StatusOr<Plan> plan = MakePlan(request);
  ASSERT_TRUE(plan.ok()) << plan.status();
  for (int32_t server : {0, 1}) {
    MemoryTally tally(request.memory);
    for (size_t i = 0; i < matrices.size(); ++i) {
      if (plan->owners[i] != server) continue;
      tally.Add(*BytesOfMatrix(matrices[i], matrices[i].rows * matrices[i].cols, request.memory));
    }
    EXPECT_LE(tally.Total(), request.servers[server].memory_bytes);
  }
}

TEST(MakePlan, CutsAnElementwiseMatrixToTheFairPart) {
  PlanRequest request = Request({Matrix(int64_t{1} << 14, 4096, "adamw")}, 4);
  Plan plan = *MakePlan(request);
  EXPECT_EQ(plan.cuts[0], (std::vector<int64_t>{4096, 8192, 12288}));
  EXPECT_DOUBLE_EQ(WorstBalance(request, plan), 1);
  // Not into pieces that are not worth their messages, and not where it is told otherwise.
  request.matrices[0].rows = 512;
  EXPECT_EQ(MakePlan(request)->cuts[0].size(), 1);
  request.matrices[0].rows = 64;
  EXPECT_TRUE(MakePlan(request)->cuts[0].empty());
  request.matrices[0].rows = int64_t{1} << 14;
  request.forced_shards = {1};
  EXPECT_TRUE(MakePlan(request)->cuts[0].empty());
}

TEST(MakePlan, CutsASpectralMatrixWhereThatShortensTheCycle) {
  // One long matrix among small ones: cut. A square one of the same short side: its small products
  // would be done by both owners, so that only a little is gained.
  std::vector<PlanMatrix> matrices(8, Matrix(1024, 1024, "muon"));
  matrices.push_back(Matrix(2048, 65536, "muon"));
  PlanRequest request = Request(matrices, 4);
  Plan plan = *MakePlan(request);
  ExpectBound(request, plan);
  EXPECT_GE(plan.cuts[8].size(), 1u);
  const double cut = WorstBalance(request, plan);
  request.forced_shards.assign(9, 1);
  EXPECT_LT(cut, 0.7 * WorstBalance(request, *MakePlan(request)));
  // Rules whose matrices cannot be cut stay whole.
  request.forced_shards.clear();
  request.matrices[8] = Matrix(2048, 65536, "dion2");
  EXPECT_TRUE(MakePlan(request)->cuts[8].empty());
}

// A request whose memory is short by a random factor, of random models.
PlanRequest ShortOfMemory(std::mt19937* random) {
  std::vector<PlanMatrix> matrices;
  const char* presets[] = {"periodic_rowwise_muon", "muon", "adamw", "dion2", "normuon"};
  for (size_t i = 0, n = 1 + (*random)() % 12; i < n; ++i) {
    matrices.push_back(
        Matrix(1 + (*random)() % 900, 1 + (*random)() % 900, presets[(*random)() % 5]));
  }
  PlanRequest request = Request(matrices, 1 + (*random)() % 6);
  MemoryTally all(request.memory);
  for (const PlanMatrix& matrix : matrices) {
    all.Add(*BytesOfMatrix(matrix, matrix.rows * matrix.cols, request.memory));
  }
  const auto p = static_cast<double>(request.servers.size());
  for (ServerSpec& server : request.servers) {
    server.speed = 1 + (*random)() % 3;
    server.memory_bytes = static_cast<int64_t>(static_cast<double>(all.Total()) / p *
                                               (0.5 + 0.1 * ((*random)() % 20)));
  }
  return request;
}

TEST(MakePlan, KeepsToTheMemoryOfEveryServer) {
  const char* scale = std::getenv("STIEFEL_TEST_SCALE");
  const int rounds = scale != nullptr && std::string(scale) == "full" ? 5000 : 200;
  std::mt19937 random(12);
  int planned = 0, cut = 0;
  for (int round = 0; round < rounds; ++round) {
    const PlanRequest request = ShortOfMemory(&random);
    const absl::StatusOr<Plan> plan = MakePlan(request);
    if (!plan.ok()) {
      ASSERT_EQ(plan.status().code(), absl::StatusCode::kResourceExhausted) << plan.status();
      continue;
    }
    ++planned;
    const std::vector<Placed> shards = PlacedShards(request, *plan);
    ASSERT_EQ(plan->owners.size(), shards.size());
    std::vector<MemoryTally> tallies(request.servers.size(), MemoryTally(request.memory));
    for (size_t i = 0; i < shards.size(); ++i) {
      const PlanMatrix& matrix = shards[i].matrix;
      tallies[plan->owners[i]].Add(
          *BytesOfMatrix(matrix, matrix.rows * matrix.cols, request.memory));
      if (!matrix.IsShard()) continue;
      ++cut;
      ASSERT_TRUE(ValidateSharding(matrix.rule, matrix.whole_rows, matrix.whole_cols).ok());
    }
    for (size_t s = 0; s < tallies.size(); ++s) {
      ASSERT_LE(tallies[s].Total(), request.servers[s].memory_bytes) << "round " << round;
    }
    for (size_t i = 0; i < request.matrices.size(); ++i) {
      ASSERT_TRUE(
          ValidateCuts(request.matrices[i].rows, request.matrices[i].cols, plan->cuts[i]).ok());
    }
  }
  printf("%d requests, %d planned, with %d shards of cut matrices\n", rounds, planned, cut);
  EXPECT_GT(planned, rounds / 4);
  EXPECT_LT(planned, rounds);
  EXPECT_GT(cut, 0);
}

TEST(MakePlan, CutsWhatIsTooLargeForOneServer) {
  PlanRequest request = Request({Matrix(1 << 16, 1024, "muon"), Matrix(64, 64, "muon")}, 3);
  const int64_t needs =
      BytesOfMatrix(request.matrices[0], int64_t{1} << 26, request.memory)->Resident();
  for (ServerSpec& server : request.servers) server.memory_bytes = needs;
  const Plan plan = *MakePlan(request);
  EXPECT_GE(plan.cuts[0].size(), 1u);
  EXPECT_TRUE(plan.cuts[1].empty());
  // A rule that cannot be cut is refused as before.
  request.matrices[0] = Matrix(1 << 16, 1024, "dion2");
  EXPECT_EQ(MakePlan(request).status().code(), absl::StatusCode::kResourceExhausted);
}

TEST(MakePlan, CutsWhatItIsToldTo) {
  std::mt19937 random(8);
  for (int round = 0; round < 100; ++round) {
    const char* presets[] = {"periodic_rowwise_muon", "muon", "adamw"};
    std::vector<PlanMatrix> matrices;
    for (size_t i = 0, n = 1 + random() % 12; i < n; ++i) {
      matrices.push_back(Matrix(8 + random() % 300, 8 + random() % 300, presets[random() % 3]));
    }
    PlanRequest request = Request(matrices, 1 + random() % 5);
    for (const PlanMatrix& matrix : matrices) {
      request.forced_shards.push_back(1 + static_cast<int64_t>(random() % 6));
      request.forced_shards.back() =
          std::min(request.forced_shards.back(), std::max(matrix.rows, matrix.cols));
    }
    const Plan plan = *MakePlan(request);
    for (size_t i = 0; i < matrices.size(); ++i) {
      ASSERT_EQ(plan.cuts[i].size() + 1, request.forced_shards[i]);
      ASSERT_TRUE(ValidateCuts(matrices[i].rows, matrices[i].cols, plan.cuts[i]).ok());
    }
    ExpectBound(request, plan);
  }
  PlanRequest request = Request({Matrix(8, 8, "dion2")}, 2);
  request.forced_shards = {2};
  EXPECT_THAT(std::string(MakePlan(request).status().message()), HasSubstr("w: a 8 x 8 matrix"));
  request.forced_shards = {1, 1};
  EXPECT_EQ(MakePlan(request).status().code(), absl::StatusCode::kInvalidArgument);
}

// CASES D16
TEST(MakePlan, RefusesWhatDoesNotFitWithTheNumbers) {
  PlanRequest request = Request({Matrix(int64_t{1} << 20, 2621440, "muon")}, 2);  // 10 TiB in fp32.
  request.forced_shards = {1};
  request.matrices[0].name = "giant";
  request.servers[1].memory_bytes = int64_t{1} << 40;
  request.servers[0].memory_bytes = int64_t{1} << 30;
  const absl::Status status = MakePlan(request).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  for (const char* part : {"giant", "1048576 x 2621440", "server 1", "1099511627776", "lazy"}) {
    EXPECT_THAT(std::string(status.message()), HasSubstr(part));
  }
  // Without any limit ten of these still pass what int64 can count.
  request =
      Request(std::vector<PlanMatrix>(10, Matrix(int64_t{1} << 28, int64_t{1} << 28, "muon")), 1);
  EXPECT_EQ(MakePlan(request).status().code(), absl::StatusCode::kResourceExhausted);
}

TEST(MakePlan, RefusesBadRequests) {
  const auto code = [](const PlanRequest& request) { return MakePlan(request).status().code(); };
  const std::vector<PlanMatrix> good = {Matrix(8, 8, "muon")};
  EXPECT_EQ(code(Request(good, 0)), absl::StatusCode::kInvalidArgument);
  for (double speed : {0.0, -1.0, std::numeric_limits<double>::infinity(), std::nan("")}) {
    PlanRequest request = Request(good, 1);
    request.servers[0].speed = speed;
    EXPECT_EQ(code(request), absl::StatusCode::kInvalidArgument) << speed;
  }
  PlanRequest request = Request(good, 1);
  request.servers[0].memory_bytes = 0;
  EXPECT_EQ(code(request), absl::StatusCode::kInvalidArgument);
  request = Request(good, 1);
  request.push_copies = 0;
  EXPECT_EQ(code(request), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(code(Request({Matrix(0, 8, "muon")}, 1)), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(code(Request({Matrix(int64_t{1} << 40, int64_t{1} << 40, "muon")}, 1)),
            absl::StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace stiefel
