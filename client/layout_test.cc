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

}  // namespace
}  // namespace stiefel
