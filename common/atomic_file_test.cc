#include "common/atomic_file.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <csignal>
#include <filesystem>
#include <fstream>
#include <sstream>

namespace stiefel {
namespace {

using ::testing::HasSubstr;

class AtomicFileTest : public ::testing::Test {
 protected:
  AtomicFileTest()
      : folder_(std::filesystem::path(testing::TempDir()) /
                testing::UnitTest::GetInstance()->current_test_info()->name()) {
    std::filesystem::remove_all(folder_);
    std::filesystem::create_directories(folder_);
  }

  std::string Path(const std::string& name) const { return folder_ / name; }
  std::string Contents(const std::string& name) const {
    std::ifstream file(Path(name));
    std::ostringstream text;
    text << file.rdbuf();
    return text.str();
  }
  int64_t FilesInFolder() const {
    return std::distance(std::filesystem::directory_iterator(folder_), {});
  }

  const std::filesystem::path folder_;
};

TEST_F(AtomicFileTest, AppearsWholeWhenPublished) {
  auto file = AtomicFile::Create(Path("a"), ExistingFile::kRefuse);
  ASSERT_TRUE(file.ok()) << file.status();
  ASSERT_TRUE((*file)->WriteAt(3, "def", 3).ok());
  ASSERT_TRUE((*file)->WriteAt(0, "abc", 3).ok());
  EXPECT_FALSE(std::filesystem::exists(Path("a")));
  ASSERT_TRUE((*file)->Publish().ok());
  EXPECT_EQ(Contents("a"), "abcdef");
  file->reset();
  EXPECT_EQ(FilesInFolder(), 1);
}

TEST_F(AtomicFileTest, AnEmptyPathIsRefusedBeforeTheWork) {
  for (const ExistingFile existing : {ExistingFile::kRefuse, ExistingFile::kReplace}) {
    EXPECT_EQ(AtomicFile::Create("", existing).status(),
              absl::InvalidArgumentError("the path of the file to write is empty"));
  }
}

TEST_F(AtomicFileTest, LeavesNothingBehindUnlessPublished) {
  {
    auto file = AtomicFile::Create(Path("a"), ExistingFile::kRefuse);
    ASSERT_TRUE(file.ok());
    EXPECT_EQ(FilesInFolder(), 1);
  }
  EXPECT_EQ(FilesInFolder(), 0);
}

TEST_F(AtomicFileTest, RefusesAFileThatIsThereOrComesMeanwhile) {
  auto late = AtomicFile::Create(Path("a"), ExistingFile::kRefuse);
  ASSERT_TRUE(late.ok());
  ASSERT_TRUE((*late)->WriteAt(0, "late", 4).ok());
  std::ofstream(Path("a")) << "first";
  EXPECT_EQ((*late)->Publish().code(), absl::StatusCode::kAlreadyExists);
  EXPECT_EQ(Contents("a"), "first");
  EXPECT_EQ(AtomicFile::Create(Path("a"), ExistingFile::kRefuse).status().code(),
            absl::StatusCode::kAlreadyExists);
  late->reset();
  EXPECT_EQ(FilesInFolder(), 1);
}

TEST_F(AtomicFileTest, ReplacesAtOnce) {
  std::ofstream(Path("a")) << "old";
  auto file = AtomicFile::Create(Path("a"), ExistingFile::kReplace);
  ASSERT_TRUE(file.ok()) << file.status();
  ASSERT_TRUE((*file)->WriteAt(0, "new", 3).ok());
  EXPECT_EQ(Contents("a"), "old");
  ASSERT_TRUE((*file)->Publish().ok());
  EXPECT_EQ(Contents("a"), "new");
}

TEST_F(AtomicFileTest, SaysWhyNothingCanBeWritten) {
  const auto nowhere = AtomicFile::Create(Path("none/a"), ExistingFile::kRefuse);
  EXPECT_EQ(nowhere.status().code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(std::string(nowhere.status().message()), HasSubstr("none/a"));
  EXPECT_EQ(AtomicFile::Create("/dev/null", ExistingFile::kReplace).status().code(),
            absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(AtomicFile::Create(folder_, ExistingFile::kReplace).status().code(),
            absl::StatusCode::kInvalidArgument);
}

TEST_F(AtomicFileTest, AWriteThatFailsLeavesThePathAsItWas) {
  std::ofstream(Path("a")) << "old";
  auto file = AtomicFile::Create(Path("a"), ExistingFile::kReplace);
  ASSERT_TRUE(file.ok());
  // A limit on file sizes stands in for a full disk.
  std::signal(SIGXFSZ, SIG_IGN);
  rlimit before;
  ASSERT_EQ(getrlimit(RLIMIT_FSIZE, &before), 0);
  rlimit small = before;
  small.rlim_cur = 4096;
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &small), 0);
  const std::string data(10000, 'x');
  const absl::Status status = (*file)->WriteAt(0, data.data(), 10000);
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &before), 0);
  EXPECT_FALSE(status.ok());
  EXPECT_THAT(std::string(status.message()), HasSubstr("cannot write to"));
  file->reset();
  EXPECT_EQ(Contents("a"), "old");
  EXPECT_EQ(FilesInFolder(), 1);
}

}  // namespace
}  // namespace stiefel
