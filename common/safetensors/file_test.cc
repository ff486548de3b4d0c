// Reader and writer, on files.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <cmath>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <thread>

#include "absl/strings/str_cat.h"
#include "common/dtype.h"
#include "common/safetensors/reader.h"
#include "common/safetensors/writer.h"

namespace stiefel {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

class SafetensorsFileTest : public ::testing::Test {
 protected:
  SafetensorsFileTest()
      : folder_(std::filesystem::path(testing::TempDir()) /
                testing::UnitTest::GetInstance()->current_test_info()->name()) {
    std::filesystem::remove_all(folder_);
    std::filesystem::create_directories(folder_);
  }

  std::string Path(const std::string& name) const { return folder_ / name; }
  std::string WriteBytes(const std::string& name, const std::string& bytes) const {
    std::ofstream(Path(name), std::ios::binary) << bytes;
    return Path(name);
  }
  std::string Contents(const std::string& name) const {
    std::ifstream file(Path(name), std::ios::binary);
    std::ostringstream text;
    text << file.rdbuf();
    return text.str();
  }

  const std::filesystem::path folder_;
};

std::string Length(uint64_t length) {
  std::string bytes(8, '\0');
  std::memcpy(bytes.data(), &length, 8);
  return bytes;
}

TEST_F(SafetensorsFileTest, RoundTripInPiecesFromManyThreads) {
  const int64_t n = 300000;
  std::vector<float> a(n);
  for (int64_t i = 0; i < n; ++i) a[i] = static_cast<float>(i) / 7;
  std::vector<std::string> files;
  for (int reversed = 0; reversed < 2; ++reversed) {
    const std::string name = absl::StrCat("t", reversed);
    auto writer = SafetensorsWriter::Create(Path(name), {{"a", "F32", {3, n / 3}}, {"s", "U8", {}}},
                                            {{"step", "7"}}, ExistingFile::kRefuse);
    ASSERT_TRUE(writer.ok()) << writer.status();
    std::vector<std::thread> threads;
    for (int64_t t = 0; t < 4; ++t) {
      threads.emplace_back([&, t] {
        const int64_t piece = reversed ? 3 - t : t, bytes = n;
        const char* data = reinterpret_cast<const char*>(a.data()) + piece * bytes;
        EXPECT_TRUE((*writer)->Write(0, piece * bytes, data, bytes).ok());
      });
    }
    for (std::thread& thread : threads) thread.join();
    ASSERT_TRUE((*writer)->Write(1, 0, "x", 1).ok());
    ASSERT_TRUE((*writer)->Publish().ok());
    files.push_back(Contents(name));
  }
  EXPECT_EQ(files[0], files[1]);

  auto reader = SafetensorsReader::Open(Path("t0"));
  ASSERT_TRUE(reader.ok()) << reader.status();
  EXPECT_EQ((*reader)->index().metadata().at("step"), "7");
  const TensorInfo* tensor = (*reader)->index().Find("a");
  ASSERT_NE(tensor, nullptr);
  EXPECT_THAT(tensor->shape, ElementsAre(3, n / 3));
  EXPECT_EQ(*(*reader)->ReadFloats(*tensor), a);
  EXPECT_EQ(*(*reader)->ReadDoubles(*tensor), std::vector<double>(a.begin(), a.end()));
  float two[2];
  ASSERT_TRUE((*reader)->Read(*tensor, 4 * 1000, two, 8).ok());
  EXPECT_EQ(two[1], a[1001]);
  EXPECT_FALSE((*reader)->Read(*tensor, 4 * n - 4, two, 8).ok());
  EXPECT_FALSE((*reader)->Read(*tensor, -4, two, 4).ok());
  const auto other = (*reader)->ReadFloats(*(*reader)->index().Find("s"));
  EXPECT_THAT(std::string(other.status().message()), HasSubstr("dtype U8"));
}

TEST_F(SafetensorsFileTest, ReadsEveryFloatingType) {
  const double f64[] = {1.0 / 3, -1e300};
  const float f32[] = {1.5f, -3e38f};
  const uint16_t f16[] = {FloatToFp16(1.5f), FloatToFp16(-65504)};
  const uint16_t bf16[] = {FloatToBf16(1.5f), 0x7F80};  // infinity
  auto writer = SafetensorsWriter::Create(
      Path("t"), {{"d", "F64", {2}}, {"f", "F32", {2}}, {"h", "F16", {2}}, {"b", "BF16", {2}}}, {},
      ExistingFile::kRefuse);
  ASSERT_TRUE(writer.ok());
  ASSERT_TRUE((*writer)->Write(0, 0, f64, 16).ok());
  ASSERT_TRUE((*writer)->Write(1, 0, f32, 8).ok());
  ASSERT_TRUE((*writer)->Write(2, 0, f16, 4).ok());
  ASSERT_TRUE((*writer)->Write(3, 0, bf16, 4).ok());
  ASSERT_TRUE((*writer)->Publish().ok());
  auto reader = SafetensorsReader::Open(Path("t"));
  ASSERT_TRUE(reader.ok()) << reader.status();
  const auto doubles = [&](const char* name) {
    return (*reader)->ReadDoubles(*(*reader)->index().Find(name)).value();
  };
  const auto floats = [&](const char* name) {
    return (*reader)->ReadFloats(*(*reader)->index().Find(name)).value();
  };
  EXPECT_THAT(doubles("d"), ElementsAre(1.0 / 3, -1e300));
  EXPECT_THAT(floats("d"), ElementsAre(1.0f / 3, -INFINITY));
  EXPECT_THAT(doubles("f"), ElementsAre(1.5, double{-3e38f}));
  EXPECT_THAT(floats("h"), ElementsAre(1.5f, -65504.0f));
  EXPECT_THAT(doubles("h"), ElementsAre(1.5, -65504.0));
  EXPECT_THAT(floats("b"), ElementsAre(1.5f, INFINITY));
}

TEST_F(SafetensorsFileTest, PublishesOnlyWhatIsWhole) {
  auto writer =
      SafetensorsWriter::Create(Path("t"), {{"a", "U8", {10}}}, {}, ExistingFile::kRefuse);
  ASSERT_TRUE(writer.ok());
  EXPECT_FALSE((*writer)->Write(1, 0, "x", 1).ok());
  EXPECT_FALSE((*writer)->Write(0, 9, "xy", 2).ok());
  ASSERT_TRUE((*writer)->Write(0, 0, "01234", 5).ok());
  EXPECT_THAT(std::string((*writer)->Write(0, 4, "45", 2).message()), HasSubstr("written before"));
  const absl::Status early = (*writer)->Publish();
  EXPECT_EQ(early.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(early.message()), HasSubstr("bytes 5..10 were never written"));
  EXPECT_FALSE(std::filesystem::exists(Path("t")));
  ASSERT_TRUE((*writer)->Write(0, 5, "56789", 5).ok());
  EXPECT_TRUE((*writer)->Publish().ok());
}

TEST_F(SafetensorsFileTest, RefusesHostileFiles) {
  const std::string json = R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}})";
  const struct {
    std::string bytes;
    const char* part;
  } cases[] = {
      {"", "0 bytes are too few"},
      {"1234567", "7 bytes are too few"},
      {Length(uint64_t{1} << 63), "a header of 9223372036854775808 bytes"},
      {Length(~uint64_t{0}) + json, "18446744073709551615"},
      {Length(100000001) + json, "the format allows 100000000"},
      {Length(100000000) + json, "truncated"},
      {Length(json.size() + 1) + json, "truncated"},
      {Length(json.size()) + json + "1234567", "truncated"},
      {Length(json.size()) + json + "123456789", "fill 8 bytes, but the file has 9"},
      {Length(json.size() - 1) + json + "12345678", "no JSON"},
      {Length(0), "does not begin with {"},
      {"PK\x03\x04 a torch checkpoint, say", "Is it a safetensors file?"},
  };
  for (const auto& c : cases) {
    const auto reader = SafetensorsReader::Open(WriteBytes("hostile", c.bytes));
    EXPECT_EQ(reader.status().code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(reader.status().message()), HasSubstr(c.part));
    EXPECT_THAT(std::string(reader.status().message()), HasSubstr("hostile"));
  }
}

TEST_F(SafetensorsFileTest, RefusesWhatIsNoFile) {
  EXPECT_EQ(SafetensorsReader::Open(Path("none")).status().code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(std::string(SafetensorsReader::Open(folder_).status().message()),
              HasSubstr("not a regular file"));
  ASSERT_EQ(mkfifo(Path("pipe").c_str(), 0600), 0);
  EXPECT_THAT(std::string(SafetensorsReader::Open(Path("pipe")).status().message()),
              HasSubstr("not a regular file"));
}

TEST_F(SafetensorsFileTest, AFileThatShrinksIsAnError) {
  const std::string json = R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}})";
  auto reader = SafetensorsReader::Open(WriteBytes("t", Length(json.size()) + json + "12345678"));
  ASSERT_TRUE(reader.ok()) << reader.status();
  std::filesystem::resize_file(Path("t"), 8 + json.size() + 4);
  EXPECT_EQ((*reader)->ReadFloats((*reader)->index().tensors()[0]).status().code(),
            absl::StatusCode::kDataLoss);
}

}  // namespace
}  // namespace stiefel
