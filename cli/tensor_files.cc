#include "cli/tensor_files.h"

#include <gtest/gtest.h>

#include <cstring>
#include <filesystem>
#include <fstream>
#include <sstream>

#include "common/dtype.h"
#include "common/safetensors/reader.h"
#include "common/safetensors/writer.h"

namespace stiefel {
namespace {

std::string Encode(const TestTensor& tensor, int64_t bytes) {
  std::string raw(bytes, '\0');
  const int64_t n = static_cast<int64_t>(tensor.values.size());
  const std::vector<float> floats(tensor.values.begin(), tensor.values.end());
  if (tensor.dtype == "F64") std::memcpy(raw.data(), tensor.values.data(), bytes);
  if (tensor.dtype == "F32") std::memcpy(raw.data(), floats.data(), bytes);
  if (tensor.dtype == "F16" || tensor.dtype == "BF16") {
    const DType to = tensor.dtype == "F16" ? DType::kFp16 : DType::kBf16;
    Convert(floats.data(), DType::kFp32, raw.data(), to, n);
  }
  return raw;
}

}  // namespace

void WriteTensors(const std::string& path, const std::vector<TestTensor>& tensors) {
  const std::vector<TensorSpec> specs = [&] {
    std::vector<TensorSpec> all;
    for (const TestTensor& t : tensors) all.push_back({t.name, t.dtype, t.shape});
    return all;
  }();
  auto writer = SafetensorsWriter::Create(path, specs, {}, ExistingFile::kReplace);
  ASSERT_TRUE(writer.ok()) << writer.status();
  for (size_t i = 0; i < tensors.size(); ++i) {
    const int64_t elements = *TensorElements(tensors[i].shape);
    const std::string raw = Encode(tensors[i], elements * *TensorDTypeBytes(tensors[i].dtype));
    ASSERT_TRUE((*writer)->Write(i, 0, raw.data(), static_cast<int64_t>(raw.size())).ok());
  }
  const absl::Status published = (*writer)->Publish();
  ASSERT_TRUE(published.ok()) << published;
}

std::map<std::string, TestTensor> ReadTensors(const std::string& path) {
  std::map<std::string, TestTensor> tensors;
  const auto reader = SafetensorsReader::Open(path);
  EXPECT_TRUE(reader.ok()) << reader.status();
  if (!reader.ok()) return tensors;
  for (const TensorInfo& info : (*reader)->index().tensors()) {
    const auto values = (*reader)->ReadDoubles(info);
    EXPECT_TRUE(values.ok()) << values.status();
    if (values.ok()) tensors[info.name] = {info.name, info.dtype, info.shape, *values};
  }
  return tensors;
}

std::string TestFolder() {
  const auto* test = testing::UnitTest::GetInstance()->current_test_info();
  const auto folder = std::filesystem::path(testing::TempDir()) / test->name();
  std::filesystem::remove_all(folder);
  std::filesystem::create_directories(folder);
  return folder;
}

std::string FileBytes(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::ostringstream text;
  text << file.rdbuf();
  return text.str();
}

}  // namespace stiefel
