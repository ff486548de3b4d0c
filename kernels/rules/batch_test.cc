#include "kernels/rules/batch.h"

#include <cstring>
#include <memory>

#include "gtest/gtest.h"
#include "kernels/cpu/cpu_backend.h"

namespace stiefel {
namespace {

struct Matrix {
  Matrix(Backend* backend, const Rule& rule, int64_t rows, int64_t cols)
      : rule(*MatrixRule::Create(rule, rows, cols, backend)),
        gradient_data(rows * cols),
        momentum(rows * cols, 0.5f),
        staged(rows * cols),
        delta(rows * cols) {
    for (size_t i = 0; i < gradient_data.size(); ++i)
      gradient_data[i] = static_cast<float>(i * 7919 % 1009) - 500;
    GradientPiece piece;
    piece.rect = {0, rows, 0, cols};
    piece.data = gradient_data.data();
    gradient.pieces = {piece};
    buffers.state = {momentum.data()};
    buffers.staged_state = {staged.data()};
    buffers.delta = delta.data();
    args.lr = 0.1;
  }

  std::unique_ptr<MatrixRule> rule;
  std::vector<float> gradient_data, momentum, staged, delta;
  GradientView gradient;
  StepArgs args;
  StepBuffers buffers;
  StepResult result;
};

// One large matrix among small ones of several shapes.
std::vector<std::unique_ptr<Matrix>> SomeMatrices(Backend* backend) {
  std::vector<std::unique_ptr<Matrix>> matrices;
  const Rule rule = *PresetRule("muon");
  for (int i = 0; i < 40; ++i)
    matrices.push_back(std::make_unique<Matrix>(backend, rule, 16 + i, 40 - i / 2));
  matrices.push_back(std::make_unique<Matrix>(backend, rule, 300, 200));
  return matrices;
}

TEST(ComputeBatchTest, GivesTheBitsOfEachMatrixAlone) {
  for (const int threads : {1, 4}) {
    const std::unique_ptr<Backend> backend = *CreateCpuBackend(threads);
    const std::unique_ptr<Stream> stream = *backend->CreateStream();
    const auto alone = SomeMatrices(backend.get()), together = SomeMatrices(backend.get());
    int64_t bytes = 0;
    for (const auto& matrix : alone) bytes = std::max(bytes, matrix->rule->WorkspaceBytes());
    std::vector<DeviceBuffer> workspaces;
    for (int i = 0; i < threads; ++i) workspaces.push_back(*backend->Allocate(bytes));
    std::vector<StepJob> jobs;
    for (const auto& matrix : together) {
      jobs.push_back({matrix->rule.get(), &matrix->gradient, &matrix->args, &matrix->buffers,
                      &matrix->result});
    }
    ASSERT_TRUE(ComputeBatch(stream.get(), jobs, &workspaces).ok());
    ASSERT_TRUE(stream->Synchronize().ok());
    for (size_t i = 0; i < alone.size(); ++i) {
      Matrix& m = *alone[i];
      ASSERT_TRUE(
          m.rule->Compute(stream.get(), m.gradient, m.args, m.buffers, &workspaces[0], &m.result)
              .ok());
      EXPECT_EQ(m.delta, together[i]->delta) << i;
      EXPECT_EQ(m.staged, together[i]->staged) << i;
      EXPECT_EQ(m.result.residual, together[i]->result.residual) << i;
      EXPECT_TRUE(together[i]->result.newton_schulz) << i;
    }
  }
}

TEST(ComputeBatchTest, ReturnsTheFirstErrorInJobOrder) {
  const std::unique_ptr<Backend> backend = *CreateCpuBackend(2);
  const std::unique_ptr<Stream> stream = *backend->CreateStream();
  const auto matrices = SomeMatrices(backend.get());
  matrices[3]->args.lr = -3;
  matrices[7]->args.lr = -7;
  std::vector<StepJob> jobs;
  int64_t bytes = 0;
  for (const auto& matrix : matrices) {
    jobs.push_back(
        {matrix->rule.get(), &matrix->gradient, &matrix->args, &matrix->buffers, &matrix->result});
    bytes = std::max(bytes, matrix->rule->WorkspaceBytes());
  }
  std::vector<DeviceBuffer> workspaces;
  for (int i = 0; i < 2; ++i) workspaces.push_back(*backend->Allocate(bytes));
  const absl::Status status = ComputeBatch(stream.get(), jobs, &workspaces);
  EXPECT_NE(status.message().find("lr=-3"), absl::string_view::npos) << status;
}

}  // namespace
}  // namespace stiefel
