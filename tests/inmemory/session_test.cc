// The client library against real servers without gRPC: what every public call does and refuses.
// Also run under ThreadSanitizer.
#include <cmath>
#include <limits>

#include "gmock/gmock.h"
#include "tests/inmemory/cluster.h"

namespace stiefel::testing {
namespace {

using ::testing::HasSubstr;

// sgd without momentum: delta = -lr mean(gradient), weights decay first.
TEST(SessionTest, TrainsOnTwoServersWithTwoTrainers) {
  MemoryCluster cluster(2);
  std::vector<ParameterSpec> parameters = {Param("a", {37, 11}), Param("b", {5000}),
                                           Param("c", {64, 64})};
  for (ParameterSpec& p : parameters) {
    ASSERT_OK(SetOption(p.rule, "lr", "0.25"));
    ASSERT_OK(SetOption(p.rule, "weight_decay", "0.5"));
  }
  std::vector<std::vector<std::vector<float>>> weights(2);
  RunRanks(2, [&](int32_t rank) {
    auto trainer = MustConnect(cluster, cluster.Options(rank, 2), parameters);
    ASSERT_NE(trainer, nullptr);
    auto& w = weights[rank];
    for (const ParameterSpec& p : parameters) w.emplace_back(p.rows() * p.cols(), 1.0f);
    for (int64_t step = 1; step <= 4; ++step) {
      ASSERT_EQ(trainer->next_step(), step);
      ASSERT_OK(trainer->Begin(step));
      std::vector<std::vector<float>> gradients;
      for (int p = 0; p < 3; ++p) gradients.push_back(Gradient(w[p].size(), step, rank, p));
      for (int p = 2; p >= 0; --p) ASSERT_OK(trainer->Push(p, View(gradients[p])));
      ASSERT_OK(trainer->EndPush());
      ASSERT_OK(trainer->WaitParameter("b").status());
      const auto outcome = trainer->Wait();
      ASSERT_TRUE(outcome.ok()) << outcome.status();
      EXPECT_EQ(outcome->outcome, Outcome::kCommit);
      EXPECT_EQ(outcome->step, step);
      EXPECT_GT(outcome->grad_norm, 0);
      ASSERT_OK(trainer->ApplyAll({MutableView(&w[0]), MutableView(&w[1]), MutableView(&w[2])}));
      const StepTimings timings = trainer->timings();
      EXPECT_EQ(timings.bytes_pushed, 4 * (37 * 11 + 5000 + 64 * 64));
      EXPECT_EQ(timings.bytes_pulled, timings.bytes_pushed);
      EXPECT_EQ(timings.bytes_staged, 0);
      EXPECT_GT(timings.push_s, 0);
      EXPECT_GE(timings.decide_s, timings.push_s);
      ASSERT_OK(trainer->Done());
    }
    ASSERT_OK(trainer->Close());
  });
  EXPECT_EQ(weights[0], weights[1]);
  for (int p = 0; p < 3; ++p) {
    for (size_t i = 0; i < weights[0][p].size(); ++i) {
      float w = 1;
      for (int64_t step = 1; step <= 4; ++step) {
        const float mean = (Gradient(weights[0][p].size(), step, 0, p)[i] +
                            Gradient(weights[0][p].size(), step, 1, p)[i]) /
                           2;
        w = 0.875f * w - 0.25f * mean;
      }
      ASSERT_NEAR(weights[0][p][i], w, 1e-6) << p << " " << i;
      if (i == 20) break;  // the generator is run anew for each
    }
  }
}

// CASES A18: a strided or wider view gives what its contiguous copy gives. A19, A28: what cannot be
// a gradient of the block is refused with the numbers.
TEST(SessionTest, ViewsAreMadeRightOrRefused) {
  MemoryCluster cluster(1);
  auto trainer = MustConnect(cluster, cluster.Options(0, 1), {Param("w", {3, 5})});
  ASSERT_NE(trainer, nullptr);
  std::vector<float> transposed(15);
  std::vector<double> wide(15);
  for (int i = 0; i < 3; ++i) {
    for (int j = 0; j < 5; ++j) {
      transposed[j * 3 + i] = static_cast<float>(i * 10 + j);
      wide[i * 5 + j] = i * 10 + j;
    }
  }
  const std::vector<TensorView> same = {
      {transposed.data(), ElementType::kFp32, {3, 5}, {1, 3}},
      {wide.data(), ElementType::kFp64, {3, 5}, {}},
      {wide.data(), ElementType::kFp64, {15}, {}},
      {wide.data() + 14, ElementType::kFp64, {15}, {-1}},
  };
  std::vector<std::vector<float>> deltas;
  for (const TensorView& view : same) {
    const int64_t step = trainer->next_step();
    ASSERT_OK(trainer->Begin(step));
    std::vector<float> flat(15);
    EXPECT_STATUS(trainer->Push("w", {flat.data(), ElementType::kComplex64, {3, 5}, {}}),
                  kInvalidArgument, "complex64");
    EXPECT_STATUS(trainer->Push("w", {flat.data(), ElementType::kInt32, {3, 5}, {}}),
                  kInvalidArgument, "int32");
    EXPECT_STATUS(trainer->Push("w", {flat.data(), ElementType::kFp32, {14}, {}}), kInvalidArgument,
                  "[14]");
    EXPECT_STATUS(trainer->Push("w", {flat.data(), ElementType::kFp32, {5, 3}, {}}),
                  kInvalidArgument, "[5, 3]");
    EXPECT_STATUS(trainer->Push("w", {flat.data(), ElementType::kFp32, {-3, -5}, {}}),
                  kInvalidArgument, "-3");
    EXPECT_STATUS(trainer->Push("w", {nullptr, ElementType::kFp32, {3, 5}, {}}), kInvalidArgument,
                  "no data");
    EXPECT_STATUS(trainer->Push("v", View(flat)), kNotFound, "v");
    EXPECT_STATUS(trainer->Push(1, View(flat)), kInvalidArgument, "1");
    ASSERT_OK(trainer->Push("w", view));
    EXPECT_STATUS(trainer->Push("w", view), kFailedPrecondition, "pushed before");
    EXPECT_EQ(trainer->timings().bytes_staged, 15 * 4);
    ASSERT_OK(trainer->EndPush());
    ASSERT_OK(trainer->Wait().status());
    const auto delta = trainer->Delta("w");
    ASSERT_TRUE(delta.ok()) << delta.status();
    const float* bytes = static_cast<const float*>(delta->data);
    deltas.emplace_back(bytes, bytes + 15);
    ASSERT_OK(trainer->Done());
  }
  EXPECT_EQ(deltas[0], deltas[1]);
  EXPECT_EQ(deltas[0], deltas[2]);
  EXPECT_EQ(deltas[0][7], deltas[3][7]);  // reversed: the middle stays
  EXPECT_EQ(deltas[0][0], deltas[3][14]);
}

TEST(SessionTest, CallsOutOfOrderAreRefused) {
  MemoryCluster cluster(1);
  auto trainer = MustConnect(cluster, cluster.Options(0, 1), {Param("w", {8}), Param("v", {8})});
  ASSERT_NE(trainer, nullptr);
  std::vector<float> values(8, 1.0f);
  EXPECT_STATUS(trainer->Push(0, View(values)), kFailedPrecondition, "begun");
  EXPECT_STATUS(trainer->Wait().status(), kFailedPrecondition, "not begun");
  EXPECT_STATUS(trainer->Done(), kFailedPrecondition, "has not ended");
  EXPECT_STATUS(trainer->Begin(2), kFailedPrecondition, "2");
  StepOptions options;
  options.weight = -1;
  EXPECT_STATUS(trainer->Begin(1, options), kInvalidArgument, "-1");
  options.weight = 1;
  options.groups[7].lr = 0.1;
  EXPECT_STATUS(trainer->Begin(1, options), kInvalidArgument, "group 7");
  ASSERT_OK(trainer->Begin(1));
  EXPECT_STATUS(trainer->Begin(1), kFailedPrecondition, "begun");
  ASSERT_OK(trainer->Push("w", View(values)));
  EXPECT_STATUS(trainer->EndPush(), kFailedPrecondition, "block 1");
  EXPECT_STATUS(trainer->EndPush(std::nan("")), kInvalidArgument, "local_finite");
  EXPECT_STATUS(trainer->Apply(0, MutableView(&values)), kFailedPrecondition, "not here yet");
  ASSERT_OK(trainer->PushAbsent("v"));
  ASSERT_OK(trainer->EndPush());
  EXPECT_STATUS(trainer->Push("v", View(values)), kFailedPrecondition, "");
  ASSERT_OK(trainer->Wait().status());
  EXPECT_STATUS(trainer->Delta("v").status(), kNotFound, "no update");
  std::vector<float> untouched(8, 3.0f);
  ASSERT_OK(trainer->Apply("v", MutableView(&untouched)));
  EXPECT_EQ(untouched, std::vector<float>(8, 3.0f));
  ASSERT_OK(trainer->Apply("w", MutableView(&values)));
  EXPECT_STATUS(trainer->Apply("w", MutableView(&values)), kFailedPrecondition, "applied before");
  std::vector<uint16_t> bf16(8);
  EXPECT_STATUS(trainer->Apply("w", {bf16.data(), ElementType::kBf16, {8}, {}}), kInvalidArgument,
                "stochastic");
  ASSERT_OK(trainer->Done());
  ASSERT_OK(trainer->Close());
  EXPECT_STATUS(trainer->Begin(2), kFailedPrecondition, "closed");
}

// A skip, seen from outside: nothing changes, the reason names parameter and rank, and the next
// step works. CASES A6.
TEST(SessionTest, NonFiniteGradientSkipsOnAllRanks) {
  MemoryCluster cluster(2);
  const std::vector<ParameterSpec> parameters = {Param("a", {8, 8}, "muon"), Param("b", {40})};
  RunRanks(2, [&](int32_t rank) {
    auto trainer = MustConnect(cluster, cluster.Options(rank, 2), parameters);
    ASSERT_NE(trainer, nullptr);
    std::vector<std::vector<float>> w = {std::vector<float>(64), std::vector<float>(40)};
    for (int64_t step = 1; step <= 4; ++step) {
      StepOptions options;
      if (step == 3) options.commit = CommitMode::kPerMatrix;
      ASSERT_OK(trainer->Begin(step, options));
      std::vector<std::vector<float>> g = {Gradient(64, step, rank, 0),
                                           Gradient(40, step, rank, 1)};
      if ((step == 2 || step == 3) && rank == 1) g[0][5] = std::numeric_limits<float>::infinity();
      ASSERT_OK(trainer->Push(0, View(g[0])));
      ASSERT_OK(trainer->Push(1, View(g[1])));
      ASSERT_OK(trainer->EndPush());
      const auto outcome = trainer->Wait();
      ASSERT_TRUE(outcome.ok()) << outcome.status();
      const auto before = w;
      ASSERT_OK(trainer->ApplyAll({MutableView(&w[0]), MutableView(&w[1])}));
      if (step == 2) {
        EXPECT_EQ(outcome->outcome, Outcome::kSkip);
        EXPECT_THAT(outcome->reason, HasSubstr("a"));
        EXPECT_THAT(outcome->reason, HasSubstr("rank 1"));
        EXPECT_EQ(w, before);
      } else {
        EXPECT_EQ(outcome->outcome, Outcome::kCommit) << outcome->reason;
        EXPECT_NE(w[1], before[1]);
      }
      if (step == 3) {
        EXPECT_EQ(outcome->skipped, std::vector<std::string>{"a"});
        EXPECT_EQ(w[0], before[0]);
      }
      ASSERT_OK(trainer->Done());
    }
    ASSERT_OK(trainer->Close());
  });
}

// Common fields that differ between ranks drop the attempt with both values; the step is redone.
TEST(SessionTest, DroppedAttemptIsRedone) {
  MemoryCluster cluster(2);
  RunRanks(2, [&](int32_t rank) {
    auto trainer = MustConnect(cluster, cluster.Options(rank, 2), {Param("a", {8, 8})});
    ASSERT_NE(trainer, nullptr);
    const std::vector<float> g(64, 1.0f);
    for (int attempt = 0; attempt < 2; ++attempt) {
      StepOptions options;
      options.groups[0].lr = attempt == 0 ? 0.1 + 0.1 * rank : 0.1;
      ASSERT_OK(trainer->Begin(1, options));
      ASSERT_OK(trainer->Push(0, View(g)));
      ASSERT_OK(trainer->EndPush());
      const auto outcome = trainer->Wait();
      ASSERT_TRUE(outcome.ok()) << outcome.status();
      EXPECT_EQ(outcome->attempt, attempt);
      EXPECT_EQ(outcome->outcome, attempt == 0 ? Outcome::kDrop : Outcome::kCommit);
      if (attempt == 0) {
        EXPECT_THAT(outcome->reason, HasSubstr("0.2"));
      }
      ASSERT_OK(trainer->Done());
    }
    EXPECT_EQ(trainer->next_step(), 2);
    ASSERT_OK(trainer->Close());
  });
}

TEST(SessionTest, ClippingAndNormOverBothServers) {
  MemoryCluster cluster(2);
  auto trainer = MustConnect(cluster, cluster.Options(0, 1), {Param("a", {4}), Param("b", {4})});
  ASSERT_NE(trainer, nullptr);
  const std::vector<float> g(4, 3.0f);
  StepOptions options;
  options.max_grad_norm = 5;
  options.groups[0].lr = 1;
  ASSERT_OK(trainer->Begin(1, options));
  ASSERT_OK(trainer->Push("a", View(g)));
  ASSERT_OK(trainer->Push("b", View(g)));
  ASSERT_OK(trainer->EndPush(/*local_sum_squares=*/28.0));
  const auto outcome = trainer->Wait();
  ASSERT_TRUE(outcome.ok()) << outcome.status();
  EXPECT_DOUBLE_EQ(outcome->grad_norm, 10);  // sqrt(36 + 36 + 28)
  EXPECT_FLOAT_EQ(static_cast<const float*>(trainer->Delta("a")->data)[0], -1.5f);
  ASSERT_OK(trainer->Done());
}

// ---------------------------------------------------------------- WEIGHTS mode

TEST(SessionTest, WeightsModeFromInitToPull) {
  MemoryCluster cluster(2);
  std::vector<ParameterSpec> parameters = {Param("a", {9, 700}), Param("b", {30})};
  for (ParameterSpec& p : parameters) p.pull_dtype = DType::kBf16;
  std::vector<std::vector<uint16_t>> last(2);
  RunRanks(2, [&](int32_t rank) {
    TrainerOptions options = cluster.Options(rank, 2);
    options.mode = UpdateMode::kWeights;
    auto trainer = MustConnect(cluster, options, parameters);
    ASSERT_NE(trainer, nullptr);
    EXPECT_TRUE(trainer->weights_needed());
    const std::vector<float> initial = Gradient(9 * 700, 0, 0, 0);
    if (rank == 0) {
      ASSERT_OK(trainer->InitWeights("a", {0, 4, 0, 700},
                                     {initial.data(), ElementType::kFp32, {4, 700}, {}}));
      EXPECT_TRUE(trainer->weights_needed());
      ASSERT_OK(trainer->InitWeights("b", View(std::vector<float>(30, 1.0f))));
    } else {
      ASSERT_OK(trainer->InitWeights("a", {4, 9, 0, 700},
                                     {initial.data() + 4 * 700, ElementType::kFp32, {5, 700}, {}}));
    }
    EXPECT_STATUS(trainer->InitWeights("a", {0, 10, 0, 700}, View(initial)), kInvalidArgument,
                  "10");
    EXPECT_STATUS(trainer->PullWeights().status(), kFailedPrecondition, "joined with");
    ASSERT_OK(trainer->Begin(1));
    const std::vector<float> ga(9 * 700, 0.5f);
    const std::vector<float> gb(30, 0.5f);
    ASSERT_OK(trainer->Push("a", View(ga)));
    ASSERT_OK(trainer->Push("b", View(gb)));
    ASSERT_OK(trainer->EndPush());
    ASSERT_OK(trainer->Wait().status());
    std::vector<uint16_t> a(9 * 700);
    std::vector<float> b(30);
    ASSERT_OK(trainer->Apply("a", {a.data(), ElementType::kBf16, {9, 700}, {}}));
    ASSERT_OK(trainer->Apply("b", MutableView(&b)));
    EXPECT_EQ(a[100], FloatToBf16(initial[100] - 0.1f * 0.5f));
    EXPECT_EQ(b[3], Bf16ToFloat(FloatToBf16(1.0f - 0.1f * 0.5f)));
    ASSERT_OK(trainer->Done());
    last[rank] = a;
    if (rank == 1) trainer.reset();  // leaves without a word
    if (rank == 0) {
      // Rank 1 comes back with nothing and pulls.
      TrainerOptions again = cluster.Options(1, 2);
      again.mode = UpdateMode::kWeights;
      again.applied_step = std::nullopt;
      auto second = MustConnect(cluster, again, parameters);
      ASSERT_NE(second, nullptr);
      EXPECT_STATUS(second->Begin(1), kFailedPrecondition, "have not been pulled");
      const auto pulled = second->PullWeights();
      ASSERT_TRUE(pulled.ok()) << pulled.status();
      EXPECT_EQ(pulled->step, 1);
      std::vector<uint16_t> fresh(9 * 700);
      ASSERT_OK(second->Apply("a", {fresh.data(), ElementType::kBf16, {9 * 700}, {}}));
      EXPECT_EQ(fresh, a);
      ASSERT_OK(second->Done());
      EXPECT_EQ(second->next_step(), 2);
    }
  });
  EXPECT_EQ(last[0], last[1]);
}

}  // namespace
}  // namespace stiefel::testing
