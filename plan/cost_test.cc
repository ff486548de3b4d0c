#include "plan/cost.h"

#include <gtest/gtest.h>

namespace stiefel {
namespace {

PlanMatrix Matrix(int64_t rows, int64_t cols, const char* preset) {
  return PlanMatrix{"w", rows, cols, *PresetRule(preset), DType::kBf16, DType::kBf16};
}

// Counts the products of the iteration one by one, as a program would run them.
double CountedFlops(double m, double n, PolarForm form, int steps, std::vector<bool> restart,
                    bool symmetric) {
  const double half = symmetric ? 0.5 : 1.0;
  const double gram = 2 * m * m * n * half;   // X X^T
  const double small = 2 * m * m * m * half;  // Products of commuting symmetric m x m matrices.
  const double apply = 2 * m * m * n;         // Q X
  double flops = 0;
  if (form == PolarForm::kStandard) {
    for (int t = 0; t < steps; ++t) flops += gram + small + apply;
    return flops;
  }
  flops += gram;
  bool identity = true;  // Q = I: its product is free.
  for (int t = 0; t < steps; ++t) {
    if (restart[t]) {
      flops += apply + gram;
      identity = true;
    }
    flops += small;                 // Z = b R + c R^2
    if (!identity) flops += small;  // Q Z
    identity = false;
    const bool r_is_needed = t + 1 < steps && !restart[t + 1];
    if (r_is_needed) flops += 2 * small;  // R Z, Z RZ
  }
  return flops + apply;
}

TEST(PolarFlops, AreThoseOfTheProducts) {
  for (auto [rows, cols] : {std::pair<int64_t, int64_t>{64, 64}, {64, 256}, {300, 7}, {1, 5}}) {
    const auto m = static_cast<double>(std::min(rows, cols));
    const auto n = static_cast<double>(std::max(rows, cols));
    for (bool symmetric : {false, true}) {
      EXPECT_EQ(PolarFlops(rows, cols, PolarForm::kStandard, 5, 0, symmetric),
                CountedFlops(m, n, PolarForm::kStandard, 5, {}, symmetric));
      EXPECT_EQ(PolarFlops(rows, cols, PolarForm::kGram, 5, 0, symmetric),
                CountedFlops(m, n, PolarForm::kGram, 5, std::vector<bool>(5, false), symmetric));
      EXPECT_EQ(
          PolarFlops(rows, cols, PolarForm::kGram, 5, 1, symmetric),
          CountedFlops(m, n, PolarForm::kGram, 5, {false, false, true, false, false}, symmetric));
      EXPECT_EQ(
          PolarFlops(rows, cols, PolarForm::kGram, 5, 2, symmetric),
          CountedFlops(m, n, PolarForm::kGram, 5, {false, false, true, false, true}, symmetric));
    }
  }
}

TEST(ChooseForm, TheCheaperOneAndStandardForSquares) {
  Rule rule = *PresetRule("muon");
  const auto form = [&rule](int64_t rows, int64_t cols) {
    return ChooseForm(rule, rows, cols, /*low_precision=*/false).form;
  };
  EXPECT_EQ(form(512, 512), PolarForm::kStandard);
  EXPECT_EQ(form(512, 4096), PolarForm::kGram);
  EXPECT_EQ(form(4096, 512), PolarForm::kGram);
  EXPECT_EQ(form(63, 4096), PolarForm::kStandard);
  EXPECT_EQ(form(512, 640), PolarForm::kStandard) << "saves 2 %";
  rule.steps = 9;  // the last run would be 7 iterations
  EXPECT_EQ(form(512, 4096), PolarForm::kStandard);
  rule.steps = 5;
  rule.form = PolarForm::kGram;
  EXPECT_EQ(form(512, 512), PolarForm::kGram);
  rule.form = PolarForm::kStandard;
  EXPECT_EQ(form(512, 4096), PolarForm::kStandard);
}

TEST(ChooseForm, LowPrecisionPaysForItsSecondRestart) {
  const Rule rule = *PresetRule("muon");
  const FormChoice fp32 = ChooseForm(rule, 100, 140, false);
  const FormChoice bf16 = ChooseForm(rule, 100, 140, true);
  EXPECT_EQ(fp32.form, PolarForm::kGram);
  EXPECT_EQ(bf16.form, PolarForm::kStandard);
  EXPECT_EQ(bf16.gram_flops - fp32.gram_flops, 3 * (100. * 100 * 140 - 100. * 100 * 100));
  EXPECT_EQ(bf16.restarts, (std::vector<int64_t>{2, 4}));
}

TEST(StepCost, RowWiseStepsCostOnlyThePass) {
  const PlanMatrix periodic = Matrix(1024, 1024, "periodic_rowwise_muon");
  const Cost refresh = StepCost(periodic, StepKind::kRefresh);
  const Cost off = StepCost(periodic, StepKind::kOffRefresh);
  const double elements = 1024.0 * 1024.0;
  EXPECT_EQ(off.flops, 8 * elements);
  EXPECT_EQ(off.bytes, (2 + 2 + 8) * elements);  // Gradient and payload in bf16, M in and out.
  EXPECT_EQ(refresh.flops - off.flops,
            PolarFlops(1024, 1024, PolarForm::kStandard, 5, 0, /*symmetric_products=*/true));
  EXPECT_EQ(refresh.bytes - off.bytes, 8 * elements);

  // Without a period both kinds are the refresh; element-wise rules have no product, adamw has two
  // buffers.
  const PlanMatrix muon = Matrix(1024, 1024, "muon");
  EXPECT_EQ(StepCost(muon, StepKind::kOffRefresh).flops, refresh.flops);
  const PlanMatrix adamw = Matrix(1024, 1024, "adamw");
  EXPECT_EQ(StepCost(adamw, StepKind::kRefresh).flops, 8 * elements);
  EXPECT_EQ(StepCost(adamw, StepKind::kRefresh).bytes, (2 + 2 + 16) * elements);
}

double Products(const char* preset, int64_t rows, int64_t cols,
                const std::vector<std::pair<const char*, const char*>>& settings = {},
                StepKind kind = StepKind::kRefresh) {
  Rule rule = *PresetRule(preset);
  for (const auto& [key, value] : settings) EXPECT_TRUE(SetOption(rule, key, value).ok()) << key;
  EXPECT_TRUE(ValidateRule(rule, rows, cols).ok()) << ValidateRule(rule, rows, cols);
  return ProductFlops(rule, rows, cols, kind);
}

TEST(ProductFlops, SplitsAreMatricesOfTheirOwn) {
  const double three = Products("cmuon", 300, 200, {{"splits", "50,100,150"}});
  EXPECT_EQ(three,
            Products("muon", 50, 200) + Products("muon", 100, 200) + Products("muon", 150, 200));
  EXPECT_EQ(Products("cmuon", 300, 200, {{"num_heads", "6"}}), 6 * Products("muon", 50, 200));
  EXPECT_EQ(Products("cmuon", 300, 200, {{"splits", "300"}}), Products("muon", 300, 200));
}

TEST(ProductFlops, TilesAreAsSmallAsTheyAreAtTheEdges) {
  const double tiles = Products("himuon", 130, 200, {{"tile", "64"}});
  EXPECT_EQ(tiles, 6 * Products("himuon", 64, 64) + 2 * Products("himuon", 64, 8) +
                       3 * Products("himuon", 2, 64) + Products("himuon", 2, 8));
  EXPECT_EQ(Products("himuon", 128, 192, {{"tile", "64"}}), 6 * Products("himuon", 64, 64));
  EXPECT_EQ(Products("himuon", 130, 200, {{"tile", "1000"}}), Products("himuon", 130, 200));
  EXPECT_EQ(Products("himuon", 130, 200, {{"tile", "64,100:none"}}),
            Products("himuon", 130, 200, {{"tile", "none"}, {"scale_of", "full"}}));
  // MuonBP: whole at refreshes, tiles in between; row-wise steps have no products.
  const std::vector<std::pair<const char*, const char*>> tile = {{"tile", "64"}};
  EXPECT_EQ(Products("muonbp", 130, 200, tile), Products("muon", 130, 200));
  EXPECT_EQ(Products("muonbp", 130, 200, tile, StepKind::kOffRefresh), tiles);
  EXPECT_EQ(Products("periodic_rowwise_muon", 130, 200, {}, StepKind::kOffRefresh), 0);
}

TEST(ProductFlops, SelectionPaysForWhatItSelects) {
  const std::vector<std::pair<const char*, const char*>> all = {{"select_fraction", "1"},
                                                                {"damping", "1"}};
  EXPECT_EQ(Products("dion2", 400, 300), Products("dion2", 100, 300, all));
  EXPECT_EQ(Products("dion2", 401, 300), Products("dion2", 101, 300, all));
  EXPECT_EQ(Products("dion2", 400, 300, {{"select_axis", "short"}}),
            Products("dion2", 400, 75, all));
  EXPECT_EQ(Products("dion3", 400, 300), Products("dion2", 400, 300));
}

TEST(ProductFlops, OfTheOtherMethods) {
  EXPECT_EQ(Products("turbo_muon", 300, 300), Products("muon", 300, 300, {{"steps", "4"}}));
  EXPECT_EQ(Products("normuon", 300, 200), Products("muon", 300, 200));
  EXPECT_EQ(Products("samuon", 300, 200, {{"gain", "1"}}), Products("muon", 300, 200));
  // One direction costs some passes, not another Newton-Schulz.
  const double lite = Products("samuon_lite", 300, 200), muon = Products("muon", 300, 200);
  EXPECT_EQ(lite - muon, 44. * 300 * 200 + 20. * 500);
  EXPECT_GT(Products("polora", 16, 2000), Products("muon", 16, 2000));
  EXPECT_EQ(Products("adamw", 300, 200), 0);
}

TEST(StepCost, BytesOfTheExtraPasses) {
  const double elements = 128.0 * 256.0;
  const double muon = StepCost(Matrix(128, 256, "muon"), StepKind::kRefresh).bytes;
  const double normuon = StepCost(Matrix(128, 256, "normuon"), StepKind::kRefresh).bytes;
  EXPECT_EQ(normuon - muon, 4 * elements + 8 * 128);  // reads O again; v in and out
  const double dion2 = StepCost(Matrix(128, 256, "dion2"), StepKind::kRefresh).bytes;
  EXPECT_EQ(dion2 - muon, 4 * elements + 8 * 128);  // the norms of U; which were selected
  PlanMatrix capped = Matrix(128, 256, "periodic_rowwise_muon");
  const double free = StepCost(capped, StepKind::kOffRefresh).bytes;
  capped.rule.row_spectral_max = 2;
  EXPECT_EQ(StepCost(capped, StepKind::kOffRefresh).bytes - free, 40 * elements);
}

// Sums over shards are those of the whole plus what each does anew: m^3 products and the traffic of
// docs/ARCHITECTURE.md section 8.
TEST(StepCost, OfShards) {
  const PlanMatrix whole = Matrix(128, 1024, "muon");
  const FormChoice form = ChooseShardedForm(whole.rule, 128, 1024, 512);
  EXPECT_EQ(form.form, PolarForm::kGram);
  ASSERT_EQ(form.restarts.size(), 1u);
  EXPECT_EQ(RefreshSums(whole.rule, 128, 1024, 512), 2);
  for (int64_t shards : {2, 4}) {
    Cost sum;
    for (int64_t i = 0; i < shards; ++i) {
      const int64_t length = 1024 / shards;
      sum += StepCost(ShardOfMatrix(whole, {0, 128, i * length, (i + 1) * length}, shards),
                      StepKind::kRefresh);
    }
    const double m3 = 128.0 * 128 * 128, p = static_cast<double>(shards);
    EXPECT_EQ(sum.flops, 8.0 * 128 * 1024 + (14 * p + 6 * 8) * m3);
    EXPECT_EQ(sum.bytes, StepCost(whole, StepKind::kRefresh).bytes);
    EXPECT_EQ(sum.peer_bytes, 2 * 2 * (p - 1) * 4 * 128 * 128);
    EXPECT_EQ(sum.collectives, 3 * p);
  }
  // Row-wise: rows are cut by column shards, and lie within row shards.
  PlanMatrix wide = Matrix(128, 1024, "periodic_rowwise_muon");
  Cost cost = StepCost(ShardOfMatrix(wide, {0, 128, 0, 512}, 2), StepKind::kOffRefresh);
  EXPECT_EQ(cost.peer_bytes, 129 * 8);
  EXPECT_EQ(cost.collectives, 1);
  PlanMatrix tall = Matrix(1024, 128, "periodic_rowwise_muon");
  cost = StepCost(ShardOfMatrix(tall, {0, 512, 0, 128}, 2), StepKind::kOffRefresh);
  EXPECT_EQ(cost.peer_bytes + cost.collectives, 0);
  tall.rule.row_axis = RowAxis::kShort;
  cost = StepCost(ShardOfMatrix(tall, {0, 512, 0, 128}, 2), StepKind::kOffRefresh);
  EXPECT_EQ(cost.peer_bytes, 129 * 8);
  // Element-wise shards cost their share.
  const PlanMatrix adam = Matrix(1024, 128, "adamw");
  Cost half = StepCost(ShardOfMatrix(adam, {0, 512, 0, 128}, 2), StepKind::kRefresh);
  EXPECT_EQ(2 * half.Units(), StepCost(adam, StepKind::kRefresh).Units());
}

TEST(CycleSteps, LeastCommonMultipleUpToALimit) {
  std::vector<PlanMatrix> matrices;
  EXPECT_EQ(CycleSteps(matrices), 1);
  for (int64_t period : {1, 3, 4}) {
    matrices.push_back(Matrix(8, 8, "periodic_rowwise_muon"));
    matrices.back().rule.period = period;
  }
  EXPECT_EQ(CycleSteps(matrices), 12);
  matrices[0].rule.period = 7;
  EXPECT_EQ(CycleSteps(matrices), kMaxCycleSteps);
  matrices[0].rule.period = 1000000;
  EXPECT_EQ(CycleSteps(matrices), kMaxCycleSteps);
}

}  // namespace
}  // namespace stiefel
