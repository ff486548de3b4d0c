// Small safetensors files for tests.
#ifndef STIEFEL_CLI_TENSOR_FILES_H_
#define STIEFEL_CLI_TENSOR_FILES_H_

#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace stiefel {

struct TestTensor {
  std::string name;
  std::string dtype = "F64";  // F64, F32, F16 or BF16; or any other, of zeros
  std::vector<int64_t> shape;
  std::vector<double> values;  // rounded to dtype
};

// Writes them, or fails the running test.
void WriteTensors(const std::string& path, const std::vector<TestTensor>& tensors);

// All tensors of a file, by name; fails the running test where it cannot be read.
std::map<std::string, TestTensor> ReadTensors(const std::string& path);

// An empty folder of the running test's own.
std::string TestFolder();

// The bytes of a file.
std::string FileBytes(const std::string& path);

}  // namespace stiefel

#endif  // STIEFEL_CLI_TENSOR_FILES_H_
