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

// The factors of a polora pair and the other one's state, as they are before a step.
struct PairOnHost {
  Dense weights, partner_weights;
  std::vector<Dense> partner_state;
};
// Fixed random weights and a fresh state, for tests that only need some pair; the product is
// square. Nothing for other families.
std::optional<PairOnHost> SomePair(const Rule& rule, int64_t rows, int64_t cols);

struct StepOptions {
  bool lazy = false;
  DType delta_dtype = DType::kFp32;
  // WEIGHTS mode. polora reads weights in both modes: where these are not set, those of its pair.
  std::optional<std::vector<float>> weights;
  DType payload_dtype = DType::kBf16;
  std::optional<PairOnHost> pair;  // polora; unset: SomePair()
  bool commit = true;
  int64_t misalign = 0;  // elements by which delta and pieces are shifted
};

// One matrix and its state on a device. REQUIRES: a rule that the backend accepts for the shape.
// `partner` is the shape of a polora matrix's other factor; unset: that of SomePair().
class MatrixOnDevice {
 public:
  MatrixOnDevice(Backend* backend, const Rule& rule, int64_t rows, int64_t cols,
                 std::optional<std::pair<int64_t, int64_t>> partner = std::nullopt);

  Outcome Step(const HostView& view, const StepArgs& args, const StepOptions& options = {});
  MatrixRule& rule() { return *rule_; }

 private:
  DeviceBuffer ToDevice(const void* data, int64_t bytes, int64_t shift = 0);
  std::vector<float> ToHost(const void* device, DType dtype, int64_t elements);

  std::vector<DeviceBuffer> ToDevice(const HostView& view, int64_t misalign, GradientView* device);
  void Commit(const GradientView& gradient, const StepArgs& args, std::vector<DeviceBuffer> staged);

  Backend* const backend_;
  const int64_t rows_, cols_;
  const std::optional<PairOnHost> some_pair_;
  std::unique_ptr<Stream> stream_;
  std::unique_ptr<MatrixRule> rule_;
  std::vector<DeviceBuffer> state_;
  DeviceBuffer workspace_;
};

// Arguments of step `step` (no step skipped before it) with the rule's own lr and weight decay.
StepArgs ArgsOf(const Rule& rule, int64_t phase, int64_t step);

Rule MakeRule(const std::string& preset,
              const std::vector<std::pair<std::string, std::string>>& options = {});

// Every preset, and with small tiles and both factors those of which the preset alone says nothing
// on small matrices. Valid for all shapes.
std::vector<Rule> EveryPreset();

// A step of the reference, with the same pair as MatrixOnDevice.
ReferenceStep StepOf(ReferenceRule* reference, const Rule& rule, const Dense& gradient,
                     const StepArgs& args, const StepOptions& options = {});

Dense ToDense(const std::vector<float>& values, int64_t rows, int64_t cols);
// To fp32 and back: what both sides of a comparison then hold.
Dense Rounded(const Dense& a);

// max |a - b| / max |b|; 0 where both are 0, infinity where `a` is not finite.
double RelativeError(const std::vector<float>& a, const Dense& b);

bool SameBits(const std::vector<float>& a, const std::vector<float>& b);
bool AllFinite(const std::vector<float>& values);
// EXPECTs the same deltas, state and figures to the bit, step by step.
void ExpectSame(const std::vector<Outcome>& a, const std::vector<Outcome>& b,
                const std::string& where);

template <typename T>
class ConformanceTest : public ::testing::Test {
 protected:
  ConformanceTest() : backend_(T::Make(2)) {}
  std::unique_ptr<Backend> MakeBackend(int threads) { return T::Make(threads); }
  const std::unique_ptr<Backend> backend_;
};

}  // namespace stiefel

#endif  // STIEFEL_TESTS_CONFORMANCE_BACKEND_FIXTURE_H_
