// Thousands of small slices must not cost thousands of messages.
#include <cstdio>

#include "client/topology.h"
#include "tests/inmemory/cluster.h"
#include "tests/topology/drawn_run.h"

namespace stiefel::testing {
namespace {

constexpr int32_t kParameters = 2000;
constexpr int32_t kRanks = 2;
constexpr int64_t kElements = 24;  // of a parameter: slices of 48 bytes

// Everything is pushed before servers grant credit (in WEIGHTS mode they do once they have all
// initial weights), so that how it is packed does not depend on who is faster.
TEST(ChunksTest, ManySmallSlicesTravelTogether) {
  MemoryCluster cluster(2);
  std::vector<ParameterSpec> parameters;
  for (int32_t p = 0; p < kParameters; ++p) {
    parameters.push_back(Param("p" + std::to_string(p), {kElements}));
  }
  const std::vector<ParameterSpread> spreads(kParameters, {{"dp", ShardRows()}});
  std::vector<std::unique_ptr<Trainer>> trainers(kRanks);
  std::vector<BlocksOfOneRank> blocks(kRanks);
  const std::vector<float> ones(kElements / kRanks, 1.0f);
  RunRanks(kRanks, [&](int32_t rank) {
    auto made = BlocksOfRank({{"dp", kRanks}}, parameters, spreads, rank);
    ASSERT_TRUE(made.ok()) << made.status();
    blocks[rank] = *std::move(made);
    TrainerOptions options = cluster.Options(rank, kRanks);
    blocks[rank].SetIn(&options);
    BePatient(&options);
    options.mode = UpdateMode::kWeights;
    options.chunk_bytes = 1 << 20;
    trainers[rank] = MustConnect(cluster, options, parameters);
    ASSERT_NE(trainers[rank], nullptr);
    ASSERT_OK(trainers[rank]->Begin(1));
    for (int32_t b = 0; b < kParameters; ++b) {
      ASSERT_OK(trainers[rank]->Push(b, View(ones)));
    }
    ASSERT_OK(trainers[rank]->EndPush());
    EXPECT_EQ(trainers[rank]->timings().chunks_pushed, 0);
  });
  ASSERT_FALSE(HasFailure());
  RunRanks(kRanks, [&](int32_t rank) {
    for (const PullBlock& block : blocks[rank].pull) {
      ASSERT_OK(trainers[rank]->InitWeights(block.parameter, block.rect, View(ones)));
    }
    ASSERT_OK(trainers[rank]->Wait().status());
    std::vector<float> weights = ones;
    for (int32_t b = 0; b < kParameters; ++b) {
      ASSERT_OK(trainers[rank]->Apply(b, MutableView(&weights)));
      ASSERT_EQ(weights, std::vector<float>(ones.size(), 1.0f - 0.1f));
    }
    const StepTimings timings = trainers[rank]->timings();
    EXPECT_EQ(timings.bytes_pushed, kParameters * kElements / kRanks * 4);
    EXPECT_EQ(timings.bytes_staged, 0);
    // One to each server; two where the credit of one was granted in two parts.
    EXPECT_LE(timings.chunks_pushed, 4);
    std::printf("rank %d: %d slices of %lld bytes: %lld chunks pushed, %lld pulled\n", rank,
                kParameters, static_cast<long long>(kElements / kRanks * 4),
                static_cast<long long>(timings.chunks_pushed),
                static_cast<long long>(timings.chunks_pulled));
    ASSERT_OK(trainers[rank]->Done());
    ASSERT_OK(trainers[rank]->Close());
  });
}

}  // namespace
}  // namespace stiefel::testing
