// What a step takes of memory: allocations in the steady state, and the workspace as a multiple of
// the matrix.
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <new>
#include <string>
#include <utility>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/cpu/cpu_backend.h"
#include "kernels/rules/batch.h"
#include "kernels/rules/matrix_rule.h"

namespace {
std::atomic<int64_t> allocations{0};

void* Counted(std::size_t bytes, std::size_t alignment) {
  ++allocations;
  void* data = alignment <= alignof(std::max_align_t)
                   ? std::malloc(bytes)
                   : std::aligned_alloc(alignment, (bytes + alignment - 1) / alignment * alignment);
  if (data == nullptr) std::abort();
  return data;
}
}  // namespace

void* operator new(std::size_t bytes) { return Counted(bytes, 0); }
void* operator new(std::size_t bytes, const std::nothrow_t&) noexcept { return Counted(bytes, 0); }
void* operator new(std::size_t bytes, std::align_val_t alignment) {
  return Counted(bytes, static_cast<std::size_t>(alignment));
}
void operator delete(void* data) noexcept { std::free(data); }
void operator delete(void* data, std::size_t) noexcept { std::free(data); }
void operator delete(void* data, std::align_val_t) noexcept { std::free(data); }
void operator delete(void* data, std::size_t, std::align_val_t) noexcept { std::free(data); }

namespace stiefel {
namespace {

using Options = std::vector<std::pair<std::string, std::string>>;

Rule MakeRule(const std::string& preset, const Options& options = {}) {
  Rule rule = *PresetRule(preset);
  for (const auto& [key, value] : options) {
    const absl::Status status = SetOption(rule, key, value);
    EXPECT_TRUE(status.ok()) << status;
  }
  return rule;
}

// One matrix with all that its steps need, and a gradient in one piece.
struct Matrix {
  Matrix(Backend* backend, const Rule& rule, int64_t rows, int64_t cols)
      : rule(*MatrixRule::Create(rule, rows, cols, backend)) {
    const auto zeros = [&](int64_t elements) {
      memory.push_back(*backend->Allocate(elements * static_cast<int64_t>(sizeof(float))));
      std::fill_n(memory.back().as<float>(), elements, 0.0f);
      return memory.back().as<float>();
    };
    for (const StateBuffer& state : this->rule->State()) {
      buffers.state.push_back(zeros(state.rows * state.cols));
      buffers.staged_state.push_back(zeros(state.rows * state.cols));
    }
    float* g = zeros(rows * cols);
    for (int64_t i = 0; i < rows * cols; ++i) g[i] = static_cast<float>(i * 7919 % 1000 - 500);
    GradientPiece piece;
    piece.rect = {0, rows, 0, cols};
    piece.data = g;
    gradient.pieces = {piece};
    buffers.delta = zeros(rows * cols);
    args.lr = 0.1;
  }

  StepJob Job() { return {rule.get(), &gradient, &args, &buffers, &result}; }

  std::unique_ptr<MatrixRule> rule;
  std::vector<DeviceBuffer> memory;
  GradientView gradient;
  StepArgs args;
  StepBuffers buffers;
  StepResult result;
};

// The gradient's cutting, the figures on the host, and closures; nothing that grows with the
// matrix. Where the map runs in bf16, its residual is a product that oneDNN allocates objects for.
constexpr int64_t kAllocationsOfAStep = 48;

TEST(RuleMemoryTest, AStepAllocatesLittleWhateverTheMatrix) {
  const std::unique_ptr<Backend> backend = *CreateCpuBackend(/*threads=*/1);
  const std::unique_ptr<Stream> stream = *backend->CreateStream();
  for (const auto& [preset, options, kind] :
       std::vector<std::tuple<std::string, Options, StepKind>>{
           {"muon", {{"form", "standard"}}, StepKind::kRefresh},
           {"muon", {{"form", "gram"}}, StepKind::kRefresh},
           {"periodic_rowwise_muon", {}, StepKind::kOffRefresh},
           {"turbo_muon", {}, StepKind::kRefresh},
           {"normuon", {}, StepKind::kRefresh},
           {"dion3", {}, StepKind::kRefresh},
           {"himuon", {{"tile", "32"}}, StepKind::kRefresh},
           {"muon", {{"num_heads", "4"}}, StepKind::kRefresh},
           {"adamw", {}, StepKind::kRefresh}}) {
    for (const auto& [rows, cols] : {std::pair<int64_t, int64_t>{48, 96}, {192, 640}}) {
      Matrix matrix(backend.get(), MakeRule(preset, options), rows, cols);
      matrix.args.kind = kind;
      matrix.args.step = 2;  // of the steps whose spectral norm is not measured
      DeviceBuffer workspace = *backend->Allocate(matrix.rule->WorkspaceBytes());
      int64_t before = 0;
      for (int i = 0; i < 3; ++i) {  // the first two warm up
        before = allocations;
        ASSERT_TRUE(matrix.rule
                        ->Compute(stream.get(), matrix.gradient, matrix.args, matrix.buffers,
                                  &workspace, &matrix.result)
                        .ok());
      }
      const int64_t taken = allocations - before;
      printf("%s %ld x %ld: %ld allocations\n", preset.c_str(), rows, cols, taken);
      EXPECT_LE(taken, kAllocationsOfAStep) << preset << " " << rows << " x " << cols;
    }
  }
}

// As matrix_rule.h states it, in units of the matrix in fp32, and a little for figures.
TEST(RuleMemoryTest, WorkspaceIsTheStatedMultipleOfTheMatrix) {
  const std::unique_ptr<Backend> backend = *CreateCpuBackend(/*threads=*/4);
  const auto multiple = [&](const Rule& rule, int64_t rows, int64_t cols) {
    const auto made = MatrixRule::Create(rule, rows, cols, backend.get());
    return static_cast<double>((*made)->WorkspaceBytes()) / (4.0 * rows * cols);
  };
  const Options fp32 = {{"compute", "fp32"}};
  for (const auto& [rows, cols] :
       {std::pair<int64_t, int64_t>{1024, 1024}, {512, 2048}, {2048, 512}, {768, 3072}}) {
    const double m_over_n = static_cast<double>(std::min(rows, cols)) / std::max(rows, cols);
    const double elements = static_cast<double>(rows * cols);
    const auto with = [](const char* preset, const Options& options) {
      Options all = {{"compute", "fp32"}, {"form", "standard"}};
      all.insert(all.end(), options.begin(), options.end());
      return MakeRule(preset, all);
    };
    EXPECT_NEAR(multiple(with("muon", {}), rows, cols), 2 + 2 * m_over_n, 0.01);
    EXPECT_NEAR(multiple(with("muon", {{"form", "gram"}}), rows, cols), 2 + 5 * m_over_n, 0.01);
    EXPECT_LE(multiple(with("himuon", {{"tile", "256"}}), rows, cols), 2.01);
    EXPECT_LE(multiple(with("muonbp", {{"tile", "256"}}), rows, cols), 2.01 + 2 * m_over_n);
    const double k = static_cast<double>(rows) / 4, m = std::min(k, static_cast<double>(cols));
    const double rest = std::max(2 * m * m, 34.0 * cols);
    EXPECT_NEAR(multiple(with("dion3", {}), rows, cols), 1.25 + rest / elements, 0.02);
    EXPECT_LE(multiple(with("samuon", {}), rows, cols), 2.4 + 2.4 * m_over_n);
  }
  EXPECT_LT(multiple(MakeRule("adamw"), 1024, 1024), 0.01);
}

TEST(RuleMemoryTest, ABatchAllocatesLittleForEachMatrix) {
  const std::unique_ptr<Backend> backend = *CreateCpuBackend(/*threads=*/2);
  const std::unique_ptr<Stream> stream = *backend->CreateStream();
  std::vector<Matrix> matrices;
  std::vector<StepJob> jobs;
  constexpr int64_t kMatrices = 50;
  for (int64_t i = 0; i < kMatrices; ++i)
    matrices.emplace_back(backend.get(), MakeRule("muon"), 64, 64);
  int64_t bytes = 0;
  for (Matrix& matrix : matrices) {
    jobs.push_back(matrix.Job());
    bytes = std::max(bytes, matrix.rule->WorkspaceBytes());
  }
  std::vector<DeviceBuffer> workspaces;
  for (int i = 0; i < 2; ++i) workspaces.push_back(*backend->Allocate(bytes));
  int64_t before = 0;
  for (int i = 0; i < 3; ++i) {
    before = allocations;
    ASSERT_TRUE(ComputeBatch(stream.get(), jobs, &workspaces).ok());
  }
  EXPECT_LE(allocations - before, 20 + kMatrices * kAllocationsOfAStep);
}

}  // namespace
}  // namespace stiefel
