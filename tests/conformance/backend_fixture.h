// What the conformance suite runs on: each backend is a type here, and the whole suite runs once
// per type.
#ifndef STIEFEL_TESTS_CONFORMANCE_BACKEND_FIXTURE_H_
#define STIEFEL_TESTS_CONFORMANCE_BACKEND_FIXTURE_H_

#include <cstdint>
#include <cstring>
#include <functional>
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

// The state of one matrix on a device, and the memory of its steps, whatever computes them.
class MatrixMemory {
 public:
  // What one step reads and writes.
  struct Step {
    GradientView gradient;
    StepBuffers buffers;
    std::vector<DeviceBuffer> staged;  // state; null data where not staged
    std::vector<DeviceBuffer> others;
  };

  MatrixMemory(Backend* backend, std::vector<StateBuffer> state, int64_t rows, int64_t cols,
               int64_t workspace_bytes);

  Stream* stream() { return stream_.get(); }
  DeviceBuffer* workspace() { return &workspace_; }
  std::unique_ptr<Step> Begin(const HostView& view, const StepOptions& options,
                              const std::optional<PairOnHost>& pair);
  // The end of a step that has been computed: delta or weights and payload, and where `options`
  // commit, which absorbs with `absorb` what was not staged, the state after it.
  using Absorb =
      std::function<absl::Status(Stream*, const GradientView&, const std::vector<float*>&)>;
  void Take(Step* step, const StepOptions& options, const Absorb& absorb, Outcome* outcome);

 private:
  void* ToDevice(const void* data, int64_t bytes, Step* step, int64_t shift = 0);
  void* ToDevice(const Dense& a, Step* step);
  void* Output(int64_t bytes, Step* step, int64_t shift = 0);
  void GradientToDevice(const HostView& view, int64_t misalign, Step* step);
  std::vector<float> ToHost(const void* device, DType dtype, int64_t elements);

  Backend* const backend_;
  const std::vector<StateBuffer> specs_;
  const int64_t rows_, cols_;
  std::unique_ptr<Stream> stream_;
  std::vector<DeviceBuffer> state_;
  DeviceBuffer workspace_;
};

// One matrix and its rule. REQUIRES: a rule that the backend accepts for the shape. `partner` is
// the shape of a polora matrix's other factor; unset: that of SomePair().
class MatrixOnDevice {
 public:
  MatrixOnDevice(Backend* backend, const Rule& rule, int64_t rows, int64_t cols,
                 std::optional<std::pair<int64_t, int64_t>> partner = std::nullopt);

  Outcome Step(const HostView& view, const StepArgs& args, const StepOptions& options = {});
  MatrixRule& rule() { return *rule_; }

 private:
  const std::optional<PairOnHost> some_pair_;
  const std::unique_ptr<MatrixRule> rule_;
  MatrixMemory memory_;
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
