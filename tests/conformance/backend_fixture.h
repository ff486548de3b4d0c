// What the conformance suite runs on: each backend is a type here, and the whole suite runs once
// per type.
#ifndef STIEFEL_TESTS_CONFORMANCE_BACKEND_FIXTURE_H_
#define STIEFEL_TESTS_CONFORMANCE_BACKEND_FIXTURE_H_

#include <cstdint>
#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/backend.h"
#include "kernels/cpu/cpu_backend.h"
#include "kernels/reference/dense.h"
#include "kernels/reference/reference_rule.h"
#include "kernels/rules/matrix_rule.h"

namespace stiefel {

struct CpuUnderTest {
  static std::unique_ptr<Backend> Make(int threads) {
    return std::move(CreateCpuBackend(threads)).value();
  }
};

using BackendsUnderTest = ::testing::Types<CpuUnderTest>;

// A gradient piece on the host; the fixture copies it to the device.
struct HostPiece {
  Rect rect;
  std::vector<double> values;  // row-major over rect; rounded to dtype
  DType dtype = DType::kFp32;
  double weight = 1;
  int32_t group = 0;
};

// The whole matrix as one fp32 piece.
std::vector<HostPiece> WholeGradient(const Dense& g);

struct HostView {
  std::vector<HostPiece> pieces;
  bool mean = true;
  double grad_scale = 1;
};

// What a step delivered, back on the host.
struct Outcome {
  std::vector<float> delta;               // as delivered in delta_dtype
  std::vector<float> weights;             // staged
  std::vector<float> payload;             // as delivered
  std::vector<std::vector<float>> state;  // after the commit
  StepResult result;
};

struct StepOptions {
  bool lazy = false;
  DType delta_dtype = DType::kFp32;
  std::optional<std::vector<float>> weights;  // WEIGHTS mode
  DType payload_dtype = DType::kBf16;
  bool commit = true;
  int64_t misalign = 0;  // elements by which delta and pieces are shifted
};

// One matrix and its state on a device.
class MatrixOnDevice {
 public:
  MatrixOnDevice(Backend* backend, const Rule& rule, int64_t rows, int64_t cols);

  Outcome Step(const HostView& view, const StepArgs& args, const StepOptions& options = {});
  MatrixRule& rule() { return *rule_; }

 private:
  DeviceBuffer ToDevice(const void* data, int64_t bytes, int64_t shift = 0);
  std::vector<float> ToHost(const void* device, DType dtype, int64_t elements);

  Backend* const backend_;
  const int64_t rows_, cols_;
  std::unique_ptr<Stream> stream_;
  std::unique_ptr<MatrixRule> rule_;
  std::vector<DeviceBuffer> state_;
  DeviceBuffer workspace_;
};

// Arguments of step `step` (no step skipped before it) with the rule's own lr and weight decay.
StepArgs ArgsOf(const Rule& rule, int64_t phase, int64_t step);

Rule MakeRule(const std::string& preset,
              const std::vector<std::pair<std::string, std::string>>& options = {});

Dense ToDense(const std::vector<float>& values, int64_t rows, int64_t cols);

// max |a - b| / max |b|; 0 where both are 0.
double RelativeError(const std::vector<float>& a, const Dense& b);

template <typename T>
class ConformanceTest : public ::testing::Test {
 protected:
  ConformanceTest() : backend_(T::Make(2)) {}
  std::unique_ptr<Backend> MakeBackend(int threads) { return T::Make(threads); }
  const std::unique_ptr<Backend> backend_;
};

}  // namespace stiefel

#endif  // STIEFEL_TESTS_CONFORMANCE_BACKEND_FIXTURE_H_
