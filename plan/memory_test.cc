#include "plan/memory.h"

#include <gtest/gtest.h>

#include <limits>
#include <random>

namespace stiefel {
namespace {

PlanMatrix Matrix(int64_t rows, int64_t cols, const char* preset, DType wire) {
  return PlanMatrix{"w", rows, cols, *PresetRule(preset), wire, wire};
}

int64_t PerElement(const PlanMatrix& matrix, const MemoryOptions& options) {
  const int64_t elements = matrix.rows * matrix.cols;
  const int64_t resident = BytesOfMatrix(matrix, elements, options)->Resident();
  EXPECT_EQ(resident % elements, 0);
  return resident / elements;
}

TEST(BytesOfMatrix, BytesPerParameterAreThoseOfTheDesign) {
  MemoryOptions lazy, twice;
  lazy.staging = Staging::kLazy;
  const PlanMatrix bf16 = Matrix(100, 30, "muon", DType::kBf16);
  EXPECT_EQ(PerElement(bf16, lazy), 4 + 2 + 2);
  EXPECT_EQ(PerElement(bf16, twice), 4 + 4 + 2 + 2);
  EXPECT_EQ(PerElement(Matrix(100, 30, "muon", DType::kFp32), lazy), 4 + 4 + 4);
  EXPECT_EQ(PerElement(Matrix(100, 30, "adamw", DType::kBf16), twice), 8 + 8 + 2 + 2);

  // WEIGHTS: fp32 weights, the staged ones, and a payload only where they are not sent as they are.
  lazy.weights_mode = true;
  EXPECT_EQ(PerElement(bf16, lazy), 4 + 8 + 2 + 2);
  EXPECT_EQ(PerElement(Matrix(100, 30, "muon", DType::kFp32), lazy), 4 + 8 + 4);

  // Blocks that overlap are kept once for each rank.
  EXPECT_EQ(BytesOfMatrix(bf16, 3 * 3000, lazy)->push, 3 * 3000 * 2);
}

// What is small is staged in either way; what is as large as the matrix only with kDouble.
TEST(BytesOfMatrix, SmallStateIsAlwaysStaged) {
  MemoryOptions lazy, twice;
  lazy.staging = Staging::kLazy;
  const PlanMatrix dion3 = Matrix(100, 30, "dion3", DType::kBf16);
  EXPECT_EQ(BytesOfMatrix(dion3, 3000, lazy)->state, 4 * (3000 + 100 + 100));
  EXPECT_EQ(BytesOfMatrix(dion3, 3000, lazy)->staged, 4 * (100 + 100));
  EXPECT_EQ(BytesOfMatrix(dion3, 3000, twice)->staged, 4 * (3000 + 100 + 100));
  EXPECT_EQ(BytesOfMatrix(Matrix(100, 30, "samuon_lite", DType::kBf16), 3000, lazy)->staged,
            4 * 30);
  EXPECT_EQ(BytesOfMatrix(Matrix(4, 30, "polora", DType::kBf16), 120, lazy)->staged, 4 * 30);
}

TEST(WorkspaceBytes, OfARefreshIsThisManyMatrices) {
  for (auto [rows, cols] : {std::pair<int64_t, int64_t>{512, 512}, {513, 545}, {4096, 1024}}) {
    for (const PresetInfo& preset : Presets()) {
      Rule rule = *PresetRule(preset.name);
      if (rule.family != RuleFamily::kSpectral || rule.gain != 1) continue;
      EXPECT_LE(WorkspaceBytes(rule, rows, cols), kMaxRefreshMatrices * 4 * rows * cols)
          << preset.name << " " << rows << " x " << cols;
    }
  }
}

TEST(WorkspaceBytes, PartsNeedLessThanTheWhole) {
  const auto bytes = [](const char* preset, const char* key, const char* value) {
    Rule rule = *PresetRule(preset);
    EXPECT_TRUE(SetOption(rule, key, value).ok());
    return WorkspaceBytes(rule, 3072, 1024);
  };
  const int64_t whole = bytes("muon", "lr", "1");
  EXPECT_LT(bytes("cmuon", "num_heads", "3"), whole * 2 / 3);
  EXPECT_EQ(bytes("himuon", "tile", "256"), whole);  // schedules and overrides may need the whole
  EXPECT_LT(bytes("dion2", "lr", "1"), whole / 2);
  EXPECT_GT(bytes("samuon", "lr", "1"), whole);
}

// A spectral shard keeps its own workspace: 2 x 4 bytes an element, and 7 x 4 m^2.
TEST(BytesOfMatrix, OfAShard) {
  const MemoryOptions options;
  const PlanMatrix whole = Matrix(4096, 1024, "muon", DType::kBf16);
  const PlanMatrix shard = ShardOfMatrix(whole, {0, 2048, 0, 1024}, 2);
  const MatrixBytes bytes = *BytesOfMatrix(shard, 2048 * 1024, options);
  EXPECT_EQ(bytes.state, 4 * 2048 * 1024);
  EXPECT_EQ(bytes.workspace, 0);
  EXPECT_EQ(bytes.held, 8 * 2048 * 1024 + 28 * 1024 * 1024 + 2048 + 2 * 128 + 24 * (2048 + 1024));
  EXPECT_EQ(bytes.Resident(), bytes.state + bytes.staged + bytes.push + bytes.pull + bytes.held);
  // The short side stays that of the whole, however short the shard.
  const PlanMatrix thin = ShardOfMatrix(whole, {0, 1, 0, 1024}, 4096);
  EXPECT_GT(BytesOfMatrix(thin, 1024, options)->held, 28 * 1024 * 1024);
  // An element-wise shard is a matrix like any other.
  const PlanMatrix adam =
      ShardOfMatrix(Matrix(4096, 1024, "adamw", DType::kBf16), {0, 2048, 0, 1024}, 2);
  EXPECT_EQ(BytesOfMatrix(adam, 2048 * 1024, options)->held, 0);
  // The whole is not a shard of itself.
  EXPECT_FALSE(ShardOfMatrix(whole, {0, 4096, 0, 1024}, 1).IsShard());
}

TEST(BytesOfMatrix, RefusesWhatOverflows) {
  const MemoryOptions options;
  // CASES D16, A21
  for (auto [rows, cols] : {std::pair<int64_t, int64_t>{int64_t{1} << 40, int64_t{1} << 22},
                            {int64_t{1} << 40, int64_t{1} << 40},
                            {0, 5},
                            {-4, -4}}) {
    const auto bytes = BytesOfMatrix(Matrix(rows, cols, "adamw", DType::kFp32), 1, options);
    ASSERT_EQ(bytes.status().code(), absl::StatusCode::kInvalidArgument);
    EXPECT_NE(bytes.status().message().find(std::to_string(rows)), absl::string_view::npos);
  }
  for (const PresetInfo& preset : Presets()) {
    const std::string name(preset.name);
    const auto bytes = BytesOfMatrix(
        Matrix(int64_t{1} << 29, int64_t{1} << 29, name.c_str(), DType::kFp32), 1, options);
    EXPECT_EQ(bytes.status().code(), absl::StatusCode::kInvalidArgument) << name;
  }
  // 128 bytes for each of 2^57 tiles.
  PlanMatrix tiny = Matrix(int64_t{1} << 28, int64_t{1} << 29, "himuon", DType::kFp32);
  tiny.rule.tiles = {{1, 1}};
  EXPECT_EQ(BytesOfMatrix(tiny, 1, options).status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_FALSE(BytesOfMatrix(Matrix(4, 4, "adamw", DType::kFp32),
                             std::numeric_limits<int64_t>::max() / 2, options)
                   .ok());
  // 10 TiB is a size like any other: whether it fits is another question.
  EXPECT_TRUE(BytesOfMatrix(Matrix(int64_t{1} << 20, 2621440, "muon", DType::kFp32),
                            int64_t{1} << 41, options)
                  .ok());
}

TEST(MemoryTally, AddsUpTheFormula) {
  MemoryOptions options;
  options.matrices_in_flight = 2;
  options.ranks = 3;
  options.window_bytes = 1000;
  MemoryTally tally(options);
  EXPECT_EQ(tally.Total(), 3000);  // CASES D12: no matrix is fine.
  int64_t resident = 0;
  std::vector<int64_t> workspace;
  for (int64_t size : {10, 40, 20, 30}) {
    const MatrixBytes bytes =
        *BytesOfMatrix(Matrix(size, size, "muon", DType::kBf16), size * size, options);
    tally.Add(bytes);
    resident += bytes.Resident();
    workspace.push_back(bytes.workspace);
  }
  EXPECT_EQ(tally.Total(), 3000 + resident + workspace[1] + workspace[3]);
  EXPECT_EQ(tally.Parts().Resident(), resident);
  EXPECT_EQ(tally.Resident(), resident);
}

// Fits must foretell Total, and Remove must undo Add.
TEST(MemoryTally, FitsAgreesWithTotal) {
  std::mt19937 random(2);
  MemoryOptions options;
  for (int round = 0; round < 300; ++round) {
    options.matrices_in_flight = random() % 4;
    MemoryTally tally(options);
    std::vector<MatrixBytes> held;
    for (int step = 0; step < 12; ++step) {
      if (!held.empty() && random() % 3 == 0) {
        tally.Remove(held.back());
        held.pop_back();
      }
      MatrixBytes next;
      next.state = random() % 50;
      next.push = random() % 50;
      next.held = random() % 50;
      next.workspace = random() % 100;
      MemoryTally with = tally;
      with.Add(next);
      ASSERT_TRUE(tally.Fits(next, with.Total()));
      ASSERT_FALSE(tally.Fits(next, with.Total() - 1));
      tally = with;
      held.push_back(next);
    }
    MemoryTally fresh(options);
    for (const MatrixBytes& bytes : held) fresh.Add(bytes);
    ASSERT_EQ(tally.Total(), fresh.Total());
  }
}

TEST(MemoryTally, NeverWrapsRound) {
  MemoryTally tally((MemoryOptions()));
  MatrixBytes huge;
  huge.state = std::numeric_limits<int64_t>::max() - 10;
  EXPECT_TRUE(tally.Fits(huge, std::numeric_limits<int64_t>::max()));
  tally.Add(huge);
  EXPECT_FALSE(tally.Fits(huge, std::numeric_limits<int64_t>::max()));
  tally.Add(huge);
  EXPECT_EQ(tally.Total(), std::numeric_limits<int64_t>::max());
}

TEST(Staging, Names) {
  EXPECT_EQ(*ParseStaging("lazy"), Staging::kLazy);
  EXPECT_EQ(*ParseStaging(StagingName(Staging::kDouble)), Staging::kDouble);
  EXPECT_EQ(ParseStaging("eager").status().code(), absl::StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace stiefel
