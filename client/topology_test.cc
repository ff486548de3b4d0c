#include "client/topology.h"

#include <numeric>

#include "common/rect.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace stiefel {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

ParameterSpec Spec(const std::string& name, std::vector<int64_t> shape,
                   const std::string& preset = "sgd", std::optional<int> stack_dims = {}) {
  ParameterSpec spec;
  spec.name = name;
  spec.shape = std::move(shape);
  spec.rule = *PresetRule(preset);
  spec.stack_dims = stack_dims;
  return spec;
}

// "[0:3, 0:4]", with "g1" behind it where it is in reduce group 1, by rank.
std::vector<std::string> Pushes(const Mesh& mesh, const ParameterSpec& parameter,
                                const ParameterSpread& spread) {
  const auto all = BlocksOfMesh(mesh, {parameter}, {spread});
  EXPECT_TRUE(all.ok()) << all.status();
  std::vector<std::string> pushes;
  for (size_t rank = 0; all.ok() && rank < all->size(); ++rank) {
    std::string& text = pushes.emplace_back();
    for (const PushBlock& block : (*all)[rank].push) {
      text += (text.empty() ? "" : " ") + block.rect.DebugString();
      if (block.reduce_group) text += "g" + std::to_string(*block.reduce_group);
    }
  }
  return pushes;
}
std::vector<std::string> Pulls(const Mesh& mesh, const ParameterSpec& parameter,
                               const ParameterSpread& spread) {
  const auto all = BlocksOfMesh(mesh, {parameter}, {spread});
  EXPECT_TRUE(all.ok()) << all.status();
  std::vector<std::string> pulls;
  for (size_t rank = 0; all.ok() && rank < all->size(); ++rank) {
    std::string& text = pulls.emplace_back();
    for (const PullBlock& block : (*all)[rank].pull) {
      text += (text.empty() ? "" : " ") + block.rect.DebugString();
    }
  }
  return pulls;
}

TEST(TopologyTest, DataParallelCopiesDealEqualGradientsAndPushTheirOwnWhole) {
  const Mesh mesh = {{"dp", 3}};
  EXPECT_THAT(Pushes(mesh, Spec("w", {8, 4}), {{"dp", Replicate(Gradients::kEqual)}}),
              ElementsAre("[0:2, 0:4]", "[2:5, 0:4]", "[5:8, 0:4]"));
  EXPECT_THAT(Pushes(mesh, Spec("b", {7}), {{"dp", Replicate(Gradients::kEqual)}}),
              ElementsAre("[0:1, 0:2]", "[0:1, 2:4]", "[0:1, 4:7]"));
  // Fewer rows than copies.
  EXPECT_THAT(Pushes(mesh, Spec("w", {2, 9}), {{"dp", Replicate(Gradients::kEqual)}}),
              ElementsAre("[0:2, 0:3]", "[0:2, 3:6]", "[0:2, 6:9]"));
  for (const Gradients gradients : {Gradients::kEqual, Gradients::kOwn}) {
    EXPECT_THAT(Pulls(mesh, Spec("w", {8, 4}), {{"dp", Replicate(gradients)}}),
                ElementsAre("[0:8, 0:4]", "[0:8, 0:4]", "[0:8, 0:4]"));
  }
  EXPECT_THAT(Pushes(mesh, Spec("w", {8, 4}), {{"dp", Replicate(Gradients::kOwn)}}),
              ElementsAre("[0:8, 0:4]", "[0:8, 0:4]", "[0:8, 0:4]"));
}

// torch.chunk(10 rows, 4) gives 3, 3, 3, 1; of 5 rows 2, 2, 1 and nothing.
TEST(TopologyTest, RowShardsAreCutAsTorchCutsThem) {
  const Mesh mesh = {{"dp", 4}};
  EXPECT_THAT(Pushes(mesh, Spec("w", {10, 4}), {{"dp", ShardRows()}}),
              ElementsAre("[0:3, 0:4]", "[3:6, 0:4]", "[6:9, 0:4]", "[9:10, 0:4]"));
  EXPECT_THAT(Pulls(mesh, Spec("w", {5, 4}), {{"dp", ShardRows()}}),
              ElementsAre("[0:2, 0:4]", "[2:4, 0:4]", "[4:5, 0:4]", ""));
  EXPECT_THAT(Pushes(mesh, Spec("w", {10, 4}), {{"dp", ShardRows({CutMode::kBalanced})}}),
              ElementsAre("[0:2, 0:4]", "[2:5, 0:4]", "[5:7, 0:4]", "[7:10, 0:4]"));
  EXPECT_THAT(Pushes(mesh, Spec("w", {10, 4}), {{"dp", ShardRows(Sizes({1, 0, 7, 2}))}}),
              ElementsAre("[0:1, 0:4]", "", "[1:8, 0:4]", "[8:10, 0:4]"));
  // A 1-D parameter is cut by its elements.
  EXPECT_THAT(Pushes(mesh, Spec("b", {6}), {{"dp", ShardRows()}}),
              ElementsAre("[0:1, 0:2]", "[0:1, 2:4]", "[0:1, 4:6]", ""));
  const auto last = BlocksOfRank(mesh, {Spec("w", {5, 4})}, {{{"dp", ShardRows()}}}, 3);
  ASSERT_TRUE(last.ok()) << last.status();
  TrainerOptions options;
  last->SetIn(&options);
  EXPECT_EQ(options.rank, 3);
  EXPECT_EQ(options.world_size, 4);
  EXPECT_FALSE(options.whole_if_empty) << "a rank that holds nothing must not push everything";
  EXPECT_EQ(last->held[0].rows, 0);
}

TEST(TopologyTest, HybridShardsDealThePushAndOneCopyPulls) {
  const Mesh mesh = {{"replicate", 2}, {"shard", 2}};
  const ParameterSpec w = Spec("w", {8, 4});
  EXPECT_THAT(Pushes(mesh, w, Hsdp("replicate", "shard")),
              ElementsAre("[0:2, 0:4]", "[4:6, 0:4]", "[2:4, 0:4]", "[6:8, 0:4]"));
  EXPECT_THAT(Pulls(mesh, w, Hsdp("replicate", "shard")),
              ElementsAre("[0:4, 0:4]", "[4:8, 0:4]", "", ""));
  EXPECT_THAT(Pulls(mesh, w, Hsdp("replicate", "shard", Pull::kEach)),
              ElementsAre("[0:4, 0:4]", "[4:8, 0:4]", "[0:4, 0:4]", "[4:8, 0:4]"));
  const auto all = BlocksOfMesh(mesh, {w}, {Hsdp("replicate", "shard")});
  ASSERT_TRUE(all.ok()) << all.status();
  for (int32_t rank = 0; rank < 4; ++rank) {
    EXPECT_EQ((*all)[rank].held[0].puller, rank % 2);
    EXPECT_EQ((*all)[rank].held[0].rows, 4);
  }
}

TEST(TopologyTest, TensorParallel) {
  const Mesh mesh = {{"tp", 2}};
  EXPECT_THAT(Pushes(mesh, Spec("w", {4, 6}), {{"tp", ShardCols()}}),
              ElementsAre("[0:4, 0:3]", "[0:4, 3:6]"));
  // Of a convolution [out, in, kh, kw]: 3 input channels are 2 and 1, of 4 columns each.
  EXPECT_THAT(Pushes(mesh, Spec("conv", {4, 3, 2, 2}, "muon", 0), {{"tp", ShardCols()}}),
              ElementsAre("[0:4, 0:8]", "[0:4, 8:12]"));
  // Fused Q, K, V of 8, 4 and 4 rows, and their bias.
  EXPECT_THAT(
      Pushes(mesh, Spec("qkv", {16, 6}), {{"tp", ShardRows(PerSplit({8, 4, 4}))}}),
      ElementsAre("[0:4, 0:6] [8:10, 0:6] [12:14, 0:6]", "[4:8, 0:6] [10:12, 0:6] [14:16, 0:6]"));
  EXPECT_THAT(
      Pushes(mesh, Spec("bias", {16}), {{"tp", ShardRows(PerSplit({8, 4, 4}))}}),
      ElementsAre("[0:1, 0:4] [0:1, 8:10] [0:1, 12:14]", "[0:1, 4:8] [0:1, 10:12] [0:1, 14:16]"));
  EXPECT_THAT(Pushes(mesh, Spec("norm", {6}), {{"tp", Replicate(Gradients::kPartial)}}),
              ElementsAre("[0:1, 0:6]g0", "[0:1, 0:6]g0"));
}

// Context parallel copies are summed, data-parallel ones averaged, whatever their order.
TEST(TopologyTest, SummandsShareAGroupForEachMember) {
  EXPECT_THAT(Pushes({{"dp", 2}, {"cp", 2}}, Spec("w", {4, 4}),
                     {{"dp", Replicate(Gradients::kOwn)}, {"cp", Replicate(Gradients::kPartial)}}),
              ElementsAre("[0:4, 0:4]g0", "[0:4, 0:4]g0", "[0:4, 0:4]g1", "[0:4, 0:4]g1"));
  // Equal copies of summands push parts of their own, each part a group.
  EXPECT_THAT(
      Pushes({{"cp", 2}, {"dp", 2}}, Spec("w", {4, 4}),
             {{"dp", Replicate(Gradients::kEqual)}, {"cp", Replicate(Gradients::kPartial)}}),
      ElementsAre("[0:2, 0:4]g0", "[2:4, 0:4]g1", "[0:2, 0:4]g0", "[2:4, 0:4]g1"));
}

TEST(TopologyTest, ExpertsHaveABlockEach) {
  const ParameterSpec experts = Spec("experts", {3, 4, 6}, "muon", 1);
  EXPECT_THAT(Pushes({{"ep", 2}}, experts, {{"ep", ShardExperts()}}),
              ElementsAre("[0:4, 0:6] [4:8, 0:6]", "[8:12, 0:6]"));
  // Rows of every expert that is held.
  EXPECT_THAT(
      Pushes({{"ep", 2}, {"tp", 2}}, experts, {{"ep", ShardExperts()}, {"tp", ShardRows()}}),
      ElementsAre("[0:2, 0:6] [4:6, 0:6]", "[2:4, 0:6] [6:8, 0:6]", "[8:10, 0:6]", "[10:12, 0:6]"));
  // Layers of experts: the experts of every layer are cut.
  EXPECT_THAT(Pushes({{"ep", 2}}, Spec("w", {2, 2, 1, 6}, "adamw", 2), {{"ep", ShardExperts()}}),
              ElementsAre("[0:1, 0:6] [2:3, 0:6]", "[1:2, 0:6] [3:4, 0:6]"));
}

TEST(TopologyTest, StagesHoldTheirOwnLayersAndTiedOnesAreSummed) {
  const Mesh mesh = {{"pp", 3}, {"dp", 2}};
  const ParameterSpec w = Spec("w", {4, 4});
  EXPECT_THAT(Pushes(mesh, w, {{"pp", Stage(1)}, {"dp", Replicate(Gradients::kEqual)}}),
              ElementsAre("", "", "[0:2, 0:4]", "[2:4, 0:4]", "", ""));
  const ParameterSpread tied = {
      {"pp", Stages({0, 2}, Replicate(Gradients::kPartial, Pull::kFirst))}, {"dp", ShardRows()}};
  EXPECT_THAT(Pushes(mesh, w, tied),
              ElementsAre("[0:2, 0:4]g0", "[2:4, 0:4]g1", "", "", "[0:2, 0:4]g0", "[2:4, 0:4]g1"));
  EXPECT_THAT(Pulls(mesh, w, tied), ElementsAre("[0:2, 0:4]", "[2:4, 0:4]", "", "", "", ""));
  const auto last = BlocksOfRank(mesh, {w}, {tied}, 5);
  ASSERT_TRUE(last.ok()) << last.status();
  EXPECT_EQ(last->held[0].puller, 1);
  EXPECT_EQ(last->push_at[0].rows, 2);
}

// FSDP of what TP cut, and the other way round: the order given is the order of the cuts.
TEST(TopologyTest, CutsNestInTheOrderGiven) {
  const Mesh mesh = {{"dp", 2}, {"tp", 2}};
  EXPECT_THAT(Pushes(mesh, Spec("w", {10, 4}), {{"tp", ShardRows()}, {"dp", ShardRows()}}),
              ElementsAre("[0:3, 0:4]", "[5:8, 0:4]", "[3:5, 0:4]", "[8:10, 0:4]"));
  EXPECT_THAT(Pushes(mesh, Spec("w", {10, 4}), {{"dp", ShardRows()}, {"tp", ShardRows()}}),
              ElementsAre("[0:3, 0:4]", "[3:5, 0:4]", "[5:8, 0:4]", "[8:10, 0:4]"));
  // The six rows of a rank's Q, K, V are cut as the tensor that they are.
  EXPECT_THAT(Pushes(mesh, Spec("qkv", {12, 4}),
                     {{"tp", ShardRows(PerSplit({4, 4, 4}))}, {"dp", ShardRows()}}),
              ElementsAre("[0:2, 0:4] [4:5, 0:4]", "[2:4, 0:4] [6:7, 0:4]",
                          "[5:6, 0:4] [8:10, 0:4]", "[7:8, 0:4] [10:12, 0:4]"));
}

// What a block's view reads of a local tensor is what the rectangle says.
TEST(TopologyTest, BlocksAreViewsOfTheLocalTensor) {
  const Mesh mesh = {{"dp", 2}, {"tp", 2}};
  const ParameterSpec experts = Spec("experts", {2, 4, 6}, "muon", 1);
  const ParameterSpread spread = {{"tp", ShardCols()}, {"dp", Replicate(Gradients::kEqual)}};
  const auto rank3 = BlocksOfRank(mesh, {experts}, {spread}, 3);
  ASSERT_TRUE(rank3.ok()) << rank3.status();
  EXPECT_EQ(rank3->held[0].rows, 8);  // both experts, columns [3, 6)
  EXPECT_EQ(rank3->held[0].cols, 3);
  std::vector<float> local(24);
  std::iota(local.begin(), local.end(), 0.0f);
  // Copy 1 of 2 pushes the lower half of the eight rows: all of expert 1.
  ASSERT_EQ(rank3->push.size(), 1u);
  EXPECT_EQ(rank3->push[0].rect.DebugString(), "[4:8, 3:6]");
  const TensorView view = rank3->push_at[0].View(local.data(), ElementType::kFp32);
  EXPECT_EQ(*static_cast<const float*>(view.data), 12);
  EXPECT_THAT(view.shape, ElementsAre(4, 3));
  EXPECT_THAT(view.strides, ElementsAre(3, 1));
  ASSERT_EQ(rank3->pull.size(), 2u);
  const MutableTensorView second = rank3->pull_at[1].MutableView(local.data(), ElementType::kFp32);
  EXPECT_EQ(second.data, local.data() + 12);
  EXPECT_EQ(rank3->pull[1].rect.DebugString(), "[4:8, 3:6]");

  // Columns dealt over copies are strided in the local tensor.
  const auto strided =
      BlocksOfRank({{"dp", 3}}, {Spec("w", {2, 9})}, {{{"dp", Replicate(Gradients::kEqual)}}}, 1);
  ASSERT_TRUE(strided.ok()) << strided.status();
  EXPECT_EQ(strided->push_at[0].offset, 3);
  EXPECT_EQ(strided->push_at[0].row_stride, 9);
}

// The example of docs/client.md: pipeline x FSDP x tensor parallel.
TEST(TopologyTest, StrategiesMix) {
  const Mesh mesh = {{"pp", 2}, {"dp", 4}, {"tp", 2}};
  const std::vector<ParameterSpec> parameters = {Spec("qkv", {2304, 768}), Spec("proj", {768, 768}),
                                                 Spec("norm", {768})};
  const std::vector<ParameterSpread> spreads = {
      {{"pp", Stage(0)}, {"tp", ShardRows(PerSplit({768, 768, 768}))}, {"dp", ShardRows()}},
      {{"pp", Stage(0)}, {"tp", ShardCols()}, {"dp", ShardRows()}},
      {{"pp", Stage(0)},
       {"tp", Replicate(Gradients::kPartial)},
       {"dp", Replicate(Gradients::kEqual)}},
  };
  const auto all = BlocksOfMesh(mesh, parameters, spreads);
  ASSERT_TRUE(all.ok()) << all.status();
  ASSERT_EQ(all->size(), 16u);
  const BlocksOfOneRank& rank3 = (*all)[3];  // pp 0, dp 1, tp 1
  EXPECT_EQ(rank3.held[0].rows, 288);        // of 1152 rows that tp left, a quarter
  std::vector<std::string> push;
  for (const PushBlock& block : rank3.push) push.push_back(block.rect.DebugString());
  // tp holds the second halves of Q, K and V; local rows 288 to 575 end Q's and begin K's.
  EXPECT_THAT(push, ElementsAre("[672:768, 0:768]", "[1152:1344, 0:768]", "[192:384, 384:768]",
                                "[0:1, 192:384]"));
  EXPECT_EQ(rank3.push_at[1].offset, 96 * 768);
  for (int32_t rank = 8; rank < 16; ++rank) EXPECT_TRUE((*all)[rank].push.empty());
}

TEST(TopologyTest, PartsAreThoseOfTheSpread) {
  ParameterSpread spread = {{"dp", ShardRows()}};
  spread.parts = 4;
  const auto blocks = BlocksOfRank({{"dp", 2}}, {Spec("w", {4, 4})}, {spread}, 0);
  ASSERT_TRUE(blocks.ok()) << blocks.status();
  EXPECT_EQ(blocks->push[0].parts, 4);
}

void ExpectRefused(const Mesh& mesh, const ParameterSpec& parameter, const ParameterSpread& spread,
                   const std::vector<std::string>& texts) {
  const auto blocks = BlocksOfRank(mesh, {parameter}, {spread}, 0);
  EXPECT_EQ(blocks.status().code(), absl::StatusCode::kInvalidArgument) << blocks.status();
  for (const std::string& text : texts) {
    EXPECT_THAT(std::string(blocks.status().message()), HasSubstr(text));
  }
}

TEST(TopologyTest, WhatCannotBeIsRefusedWithTheNumbers) {
  const Mesh mesh = {{"dp", 4}};
  const ParameterSpec w = Spec("w", {10, 4});
  ExpectRefused({{"dp", 4}, {"dp", 2}}, w, {{"dp", ShardRows()}}, {"two entries", "dp"});
  ExpectRefused({{"", 4}}, w, {}, {"no name"});
  ExpectRefused({{"dp", 0}}, w, {{"dp", ShardRows()}}, {"dp", "size 0"});
  ExpectRefused({{"a", int64_t{1} << 40}, {"b", int64_t{1} << 40}}, w, {}, {"ranks"});
  ExpectRefused(mesh, w, {}, {"\"w\"", "\"dp\"", "size 4"});
  ExpectRefused(mesh, w, {{"dp", ShardRows()}, {"dp", ShardRows()}}, {"\"w\"", "dp"});
  const auto unknown =
      BlocksOfRank(mesh, {w}, {{{"dp", ShardRows()}, {"tp", ShardRows()}}}, 0).status();
  EXPECT_TRUE(absl::IsNotFound(unknown)) << unknown;
  EXPECT_THAT(std::string(unknown.message()), AllOf(HasSubstr("\"w\""), HasSubstr("tp")));
  ExpectRefused(mesh, w, {{"dp", ShardRows(Sizes({3, 3, 3, 3}))}}, {"3, 3, 3, 3", "10 rows"});
  ExpectRefused(mesh, w, {{"dp", ShardRows(Sizes({5, 5}))}}, {"5, 5", "4 parts"});
  ExpectRefused(mesh, w, {{"dp", ShardRows(Sizes({-2, 4, 4, 4}))}}, {"-2"});
  ExpectRefused(mesh, w, {{"dp", ShardRows(PerSplit({4, 4}))}}, {"4 + 4", "8 of 10 rows"});
  ExpectRefused(mesh, w, {{"dp", ShardRows(PerSplit({10, 0}))}}, {"split of 0"});
  ExpectRefused(mesh, w, {{"dp", ShardCols(PerSplit({2, 2}))}}, {"ShardRows"});
  ExpectRefused(mesh, w, {{"dp", ShardRows({CutMode::kChunk, {10, 0, 0, 0}, {10}})}},
                {"sizes and splits"});
  ExpectRefused(mesh, w, {{"dp", ShardExperts()}}, {"stack_dims"});
  ExpectRefused(mesh, w, {{"dp", Stage(4)}}, {"coordinate", "4"});
  ExpectRefused(mesh, w, {{"dp", Stages({1, 1}, ShardRows())}}, {"1", "twice"});
  ExpectRefused(mesh, w, {{"dp", Stages({}, ShardRows())}}, {"no coordinate"});
  ExpectRefused(mesh, Spec("b", {8}), {{"dp", ShardCols()}}, {"\"b\"", "columns"});
  ExpectRefused(mesh, Spec("e", {2, 3, 4}, "muon"), {{"dp", ShardRows()}}, {"stack_dims"});
  ParameterSpread none = {{"dp", ShardRows()}};
  none.parts = 0;
  ExpectRefused(mesh, w, none, {"parts = 0"});
  EXPECT_FALSE(BlocksOfRank(mesh, {w}, {}, 0).ok());
  EXPECT_FALSE(BlocksOfRank(mesh, {w}, {{{"dp", ShardRows()}}}, 4).ok());
  // The outer chunks are 5 and 4 rows: ranks 0 and 1 are right, rank 2 is not.
  const Mesh nested = {{"dp", 2}, {"tp", 2}};
  const auto wrong = BlocksOfMesh(nested, {Spec("w", {9, 4})},
                                  {{{"dp", ShardRows()}, {"tp", ShardRows(Sizes({2, 3}))}}});
  EXPECT_THAT(std::string(wrong.status().message()), HasSubstr("rank 2"));
  EXPECT_THAT(std::string(wrong.status().message()), HasSubstr("4 rows"));
}

TEST(TopologyTest, CoverageOfAnyBlocks) {
  const std::vector<ParameterSpec> model = {Spec("w", {10, 4}), Spec("b", {6})};
  const PushBlock b = {"b", {0, 1, 0, 6}};
  EXPECT_TRUE(CheckCoverage(model, {{{"w", {0, 10, 0, 4}}, b}, {b}}).ok());
  const auto refused = [&model](const std::vector<std::vector<PushBlock>>& push) {
    return std::string(CheckCoverage(model, push).message());
  };
  EXPECT_THAT(refused({{{"w", {0, 4, 0, 4}}, b}, {{"w", {5, 10, 0, 4}}}}),
              AllOf(HasSubstr("none of 2 ranks"), HasSubstr("[4:5, 0:4]"), HasSubstr("10 x 4")));
  EXPECT_THAT(refused({{{"w", {0, 10, 0, 4}}, {"w", {3, 4, 0, 1}}, b}}),
              AllOf(HasSubstr("rank 0"), HasSubstr("[3:4, 0:1]")));
  EXPECT_THAT(refused({{{"w", {0, 11, 0, 4}}, b}}), HasSubstr("11"));
  EXPECT_THAT(refused({{{"v", {0, 1, 0, 4}}, b}}), HasSubstr("v"));
}

}  // namespace
}  // namespace stiefel
