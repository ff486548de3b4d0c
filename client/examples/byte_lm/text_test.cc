#include "client/examples/byte_lm/text.h"

#include <sys/stat.h>

#include <cstdlib>
#include <fstream>

#include "gtest/gtest.h"

namespace stiefel::byte_lm {
namespace {

// Byte i is i mod 251, so that a context tells its position.
Text Numbered(int64_t size, int64_t context) {
  std::string bytes(size, 0);
  for (int64_t i = 0; i < size; ++i) bytes[i] = static_cast<char>(i % 251);
  return *Text::Create(bytes, context);
}

TEST(TextTest, TargetFollowsItsContext) {
  const Text text = Numbered(10000, 4);
  const Examples examples = text.TrainingBatch(1, 1, 100, 0, 1);
  ASSERT_EQ(examples.count, 100);
  for (int64_t i = 0; i < 100; ++i) {
    EXPECT_EQ((examples.contexts[i * 4 + 3] + 1) % 251, examples.targets[i]);
  }
}

TEST(TextTest, RanksShareOneBatchOutWithoutOverlap) {
  const Text text = Numbered(10000, 4);
  const Examples whole = text.TrainingBatch(1, 5, 100, 0, 1);
  std::vector<uint8_t> joined;
  for (int rank = 0; rank < 3; ++rank) {
    const Examples part = text.TrainingBatch(1, 5, 100, rank, 3);
    joined.insert(joined.end(), part.contexts.begin(), part.contexts.end());
  }
  EXPECT_EQ(joined, whole.contexts);
  EXPECT_NE(text.TrainingBatch(1, 6, 100, 0, 1).contexts, whole.contexts);
}

TEST(TextTest, HeldOutPartIsTheLastFiftiethAndNeverTrainedOn) {
  std::string bytes(9800, 'a');
  bytes.append(200, 'b');
  const Text text = *Text::Create(bytes, 4);
  ASSERT_EQ(text.held_out_count(), 196);
  const Examples held_out = text.HeldOut(0, 196);
  EXPECT_EQ(held_out.contexts, std::vector<uint8_t>(196 * 4, 'b'));
  for (int step = 1; step <= 50; ++step) {
    const Examples batch = text.TrainingBatch(1, step, 1000, 0, 1);
    ASSERT_EQ(batch.contexts, std::vector<uint8_t>(4000, 'a'));
    ASSERT_EQ(batch.targets, std::vector<uint8_t>(1000, 'a'));
  }
}

TEST(TextTest, ShortTextIsRefusedWithItsSize) {
  const absl::Status status = Text::Create(std::string(200, 'a'), 4).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_NE(status.ToString().find("200 bytes"), std::string::npos) << status;
}

TEST(TextTest, AnExistingFileIsUsedAsItIs) {
  const std::string path = std::string(getenv("TEST_TMPDIR")) + "/some.txt";
  std::ofstream(path) << std::string(5000, 'x');
  EXPECT_EQ(Text::Load(path, 4)->size(), 5000);
}

// The program that prints the text is looked up in PATH; a fake one stands in for it.
TEST(TextTest, MissingOrBrokenProgramIsAnErrorAndLeavesNoFile) {
  const std::string folder = std::string(getenv("TEST_TMPDIR")) + "/bin";
  const std::string path = folder + "/bible.txt";
  mkdir(folder.c_str(), 0755);
  const std::string old_path = getenv("PATH");
  setenv("PATH", folder.c_str(), 1);
  EXPECT_EQ(Text::Load(path, 4).status().code(), absl::StatusCode::kNotFound);

  std::ofstream(folder + "/bible") << "#!/bin/sh\necho In the beginning\n";
  chmod((folder + "/bible").c_str(), 0755);
  const absl::Status status = Text::Load(path, 4).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInternal);
  EXPECT_NE(status.ToString().find("17 bytes"), std::string::npos) << status;
  EXPECT_FALSE(std::ifstream(path).is_open());

  std::ofstream(folder + "/bible") << "#!/bin/sh\nwhile [ ${i:-0} -lt 5000 ]; do i=$((${i:-0}+1)); "
                                   << "echo " << std::string(999, 'y') << "; done\n";
  EXPECT_EQ(Text::Load(path, 4)->size(), 5'000'000);
  EXPECT_TRUE(std::ifstream(path).is_open());
  setenv("PATH", old_path.c_str(), 1);
}

}  // namespace
}  // namespace stiefel::byte_lm
