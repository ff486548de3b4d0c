#include "client/layout.h"

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace stiefel {
namespace {

using ::testing::HasSubstr;

std::vector<ParameterSpec> Model() {
  std::vector<ParameterSpec> model(3);
  model[0] = {"a", {7, 3}, *PresetRule("muon")};
  model[1] = {"b", {5}, *PresetRule("adamw")};
  model[2] = {"c", {2, 8}, *PresetRule("sgd")};
  return model;
}

// Rows are cut as FSDP cuts them: every element belongs to one rank, whatever divides what.
TEST(LayoutTest, RowBlocksPartitionEveryParameter) {
  for (const int32_t world : {1, 2, 3, 5, 16}) {
    std::map<std::string, std::vector<Rect>> cover;
    for (int32_t rank = 0; rank < world; ++rank) {
      for (const PushBlock& block : RowPushBlocks(Model(), rank, world)) {
        cover[block.parameter].push_back(block.rect);
      }
    }
    for (const ParameterSpec& p : Model()) {
      EXPECT_TRUE(Gaps(WholeRect(p.rows(), p.cols()), cover[p.name]).empty()) << p.name << world;
      EXPECT_TRUE(Overlaps(cover[p.name]).empty()) << p.name << world;
    }
  }
  EXPECT_EQ(RowPullBlocks(Model(), 15, 16).size(), 3u);  // the last of 16 has the last row of all
  EXPECT_EQ(RowPullBlocks(Model(), 0, 16).size(), 0u);
}

TEST(LayoutTest, BlocksByName) {
  TrainerOptions options;
  options.servers = {"s:1"};
  options.run = "r";
  options.push = {{"a", {0, 4, 0, 3}}, {"a", {4, 7, 0, 3}}, {"b", {0, 1, 0, 5}}};
  const auto layout = Layout::Create(options, Model());
  ASSERT_TRUE(layout.ok()) << layout.status();
  EXPECT_EQ(*layout->PushBlockOf("b"), 2);
  EXPECT_THAT(std::string(layout->PushBlockOf("a").status().message()), HasSubstr("2 blocks"));
  EXPECT_THAT(std::string(layout->PushBlockOf("c").status().message()), HasSubstr("0 blocks"));
  EXPECT_TRUE(absl::IsNotFound(layout->PushBlockOf("d").status()));
  EXPECT_EQ(*layout->PullBlockOf("c"), 2);  // whole parameters by default
  EXPECT_EQ(layout->Describe(layout->push()[1]), "\"a\" [4:7, 0:3]");
}

// A rank may hold nothing of a sharded model (one of 16, of 7 rows), or pull nothing because
// another one pulls for it: that must not turn into whole parameters.
TEST(LayoutTest, NoBlocksCanBeMeant) {
  TrainerOptions options;
  options.servers = {"s:1"};
  options.run = "r";
  options.whole_if_empty = false;
  options.push = RowPushBlocks(Model(), 0, 16);
  ASSERT_TRUE(options.push.empty());
  const auto layout = Layout::Create(options, Model());
  ASSERT_TRUE(layout.ok()) << layout.status();
  EXPECT_EQ(layout->push().size() + layout->pull().size(), 0u);
  EXPECT_EQ(layout->JoinRequest().push_size() + layout->JoinRequest().pull_size(), 0);
}

ParameterSpec Stack(const std::string& name, std::vector<int64_t> shape, int stack_dims,
                    const std::string& preset = "muon") {
  ParameterSpec stack;
  stack.name = name;
  stack.shape = std::move(shape);
  stack.rule = *PresetRule(preset);
  stack.stack_dims = stack_dims;
  return stack;
}

TrainerOptions Options() {
  TrainerOptions options;
  options.servers = {"s:1"};
  options.run = "r";
  return options;
}

// A stack is cut where its matrices end, and every part is a contiguous range of the block.
TEST(LayoutTest, BlocksOfStacksBecomeBlocksOfMatrices) {
  std::vector<ParameterSpec> model = Model();
  model.push_back(Stack("experts", {3, 4, 6}, 1));
  TrainerOptions options = Options();
  options.push = {{"experts", {2, 9, 1, 5}, 3, 2}, {"b", {0, 1, 0, 5}}};
  const auto layout = Layout::Create(options, model);
  ASSERT_TRUE(layout.ok()) << layout.status();
  ASSERT_EQ(layout->matrices().size(), 6u);
  EXPECT_EQ(layout->matrices()[4].name, "experts[1]");
  EXPECT_EQ(layout->parameters()[3].rows(), 12);
  ASSERT_EQ(layout->wire_push().size(), 4u);
  const Rect rects[] = {{2, 4, 1, 5}, {0, 4, 1, 5}, {0, 1, 1, 5}};
  int64_t first = 0;
  for (int w = 0; w < 3; ++w) {
    const WireBlock& wire = layout->wire_push()[w];
    EXPECT_EQ(wire.shard, 3 + w);
    EXPECT_EQ(wire.rect, rects[w]);
    EXPECT_EQ(wire.first, first);
    EXPECT_EQ(wire.block, 0);
    first += wire.elements();
  }
  EXPECT_EQ(first, layout->push()[0].elements());
  EXPECT_EQ(layout->wire_push()[3].block, 1);
  EXPECT_EQ(layout->Describe(layout->wire_push()[1]), "\"experts[1]\" [0:4, 1:5]");

  const v1::JoinRunRequest join = layout->JoinRequest();
  ASSERT_EQ(join.push_size(), 4);
  EXPECT_EQ(join.push(2).parameter(), "experts[2]");
  EXPECT_EQ(join.push(2).reduce_group(), 3);
  EXPECT_EQ(join.push(2).parts(), 2);
  EXPECT_FALSE(join.push(3).has_reduce_group());
  EXPECT_EQ(join.pull_size(), 6);
  EXPECT_EQ(layout->OpenRequest().parameters(5).shape(0), 4);
}

v1::Cuts CutsOf(int32_t matrix, std::vector<int64_t> at) {
  v1::Cuts cuts;
  cuts.set_parameter(matrix);
  cuts.mutable_at()->Assign(at.begin(), at.end());
  return cuts;
}

// Both ends cut blocks alike: the parts lie in the block's shards in order, and make it up.
TEST(LayoutTest, BlocksAreCutAtShardsInBothDirections) {
  TrainerOptions options = Options();
  options.push = {{"a", {1, 7, 0, 3}, {}, 2}, {"c", {0, 2, 2, 8}}};
  auto layout = Layout::Create(options, Model());
  ASSERT_TRUE(layout.ok()) << layout.status();
  const std::string join = layout->JoinRequest().SerializeAsString();
  google::protobuf::RepeatedPtrField<v1::Cuts> cuts;
  *cuts.Add() = CutsOf(0, {2, 3});  // rows of 7 x 3
  *cuts.Add() = CutsOf(2, {4, 7});  // columns of 2 x 8
  ASSERT_TRUE(layout->SetCuts(cuts).ok());
  EXPECT_EQ(layout->JoinRequest().SerializeAsString(), join);
  ASSERT_EQ(layout->shards().size(), 7u);
  EXPECT_EQ(layout->shards()[5].matrix, 2);
  EXPECT_EQ(layout->shards()[5].place, (Rect{0, 2, 4, 7}));

  ASSERT_EQ(layout->wire_push().size(), 6u);
  const Rect rects[] = {{1, 2, 0, 3}, {0, 1, 0, 3}, {0, 4, 0, 3},
                        {0, 2, 2, 4}, {0, 2, 0, 3}, {0, 2, 0, 1}};
  const Rect in_block[] = {{0, 1, 0, 3}, {1, 2, 0, 3}, {2, 6, 0, 3},
                           {0, 2, 0, 2}, {0, 2, 2, 5}, {0, 2, 5, 6}};
  const int64_t first[] = {0, 3, 6, 0, 4, 10};
  const int32_t shard[] = {0, 1, 2, 4, 5, 6};
  for (int w = 0; w < 6; ++w) {
    const WireBlock& wire = layout->wire_push()[w];
    EXPECT_EQ(wire.shard, shard[w]) << w;
    EXPECT_EQ(wire.rect, rects[w]) << w;
    EXPECT_EQ(wire.in_block, in_block[w]) << w;
    EXPECT_EQ(wire.first, first[w]) << w;
    EXPECT_EQ(wire.parts, w < 3 ? 2 : 1);
  }
  EXPECT_FALSE(layout->push()[0].scattered);
  EXPECT_TRUE(layout->push()[1].scattered);
  EXPECT_EQ(layout->Describe(layout->wire_push()[4]), "\"c\" [0:2, 4:7]");
}

TEST(LayoutTest, RefusesCutsThatAreNone) {
  auto layout = Layout::Create(Options(), Model());
  ASSERT_TRUE(layout.ok()) << layout.status();
  google::protobuf::RepeatedPtrField<v1::Cuts> cuts;
  *cuts.Add() = CutsOf(2, {8});
  EXPECT_THAT(std::string(layout->SetCuts(cuts).message()), HasSubstr("2 x 8"));
  *cuts.Mutable(0) = CutsOf(3, {1});
  EXPECT_THAT(std::string(layout->SetCuts(cuts).message()), HasSubstr("matrix 3"));
  std::vector<ParameterSpec> model = Model();
  model[0].rule = *PresetRule("normuon");
  model[0].shards = 2;
  EXPECT_THAT(std::string(Layout::Create(Options(), model).status().message()),
              HasSubstr("row variance"));
}

TEST(LayoutTest, RowBlocksOfStacksAreRowsOfTheStackedView) {
  const std::vector<ParameterSpec> model = {Stack("experts", {3, 4, 6}, 1),
                                            Stack("conv", {8, 3, 2, 2}, 0)};
  const auto blocks = RowPushBlocks(model, 1, 2);
  ASSERT_EQ(blocks.size(), 2u);
  EXPECT_EQ(blocks[0].rect, (Rect{6, 12, 0, 6}));
  EXPECT_EQ(blocks[1].rect, (Rect{4, 8, 0, 12}));
}

TEST(LayoutTest, RefusesShapesAndPairsThatMakeNoSense) {
  const auto refused = [](UpdateMode mode, std::vector<ParameterSpec> model) {
    TrainerOptions options = Options();
    options.mode = mode;
    const absl::Status status = Layout::Create(options, model).status();
    EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
    return std::string(status.message());
  };
  ParameterSpec unsaid = Stack("experts", {3, 4, 6}, 0);
  unsaid.stack_dims.reset();
  EXPECT_THAT(refused(UpdateMode::kDelta, {unsaid}), HasSubstr("stack_dims=1"));
  EXPECT_THAT(refused(UpdateMode::kDelta, {Stack("dw", {8, 1, 3, 3}, 0)}), HasSubstr("depthwise"));
  EXPECT_THAT(refused(UpdateMode::kDelta, {Stack("bias", {7}, 0)}), HasSubstr("1 dimension"));
  EXPECT_THAT(refused(UpdateMode::kDelta, {Stack("a", {2, 3, 4}, 1), Stack("a[1]", {3, 4}, 0)}),
              HasSubstr("a[1]"));
  ParameterSpec a = Stack("a", {2, 4, 20}, 1, "polora"), b = Stack("b", {2, 12, 4}, 1, "polora");
  a.rule.pair = "b";
  b.rule.pair = "a";
  EXPECT_THAT(refused(UpdateMode::kDelta, {a, b}), HasSubstr("WEIGHTS"));
  EXPECT_THAT(refused(UpdateMode::kWeights, {a}), HasSubstr("\"b[0]\" is not registered"));
  TrainerOptions options = Options();
  options.mode = UpdateMode::kWeights;
  const auto layout = Layout::Create(options, {a, b});
  ASSERT_TRUE(layout.ok()) << layout.status();
  EXPECT_EQ(layout->matrices()[1].rule.pair, "b[1]");
  b.rule.pair = "c";
  EXPECT_THAT(refused(UpdateMode::kWeights, {a, b}), HasSubstr("b[0]"));
}

}  // namespace
}  // namespace stiefel
