#include "kernels/polar/newton_schulz.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "common/dtype.h"
#include "gtest/gtest.h"
#include "kernels/cpu/amx/tile_kernels.h"
#include "kernels/cpu/cpu_backend.h"
#include "kernels/reference/dense.h"

namespace stiefel {
namespace {

using Settings = std::vector<std::pair<std::string, std::string>>;

Rule Muon(const Settings& options = {}) {
  Rule rule = *PresetRule("muon");
  for (const auto& [key, value] : options) {
    const absl::Status status = SetOption(rule, key, value);
    EXPECT_TRUE(status.ok()) << status;
  }
  return rule;
}

std::string Method(const Rule& rule, int64_t rows, int64_t cols, bool has_bf16, bool fast_bf16) {
  DeviceInfo device;
  device.has_bf16 = has_bf16;
  device.fast_bf16 = fast_bf16;
  const absl::StatusOr<PolarPlan> plan = MakePolarPlan(rule, rows, cols, device);
  return plan.ok() ? DescribePolar(*plan) : std::string(plan.status().message());
}

TEST(PolarPlanTest, AutoChoosesTheCheaperFormAndTheFasterPrecision) {
  EXPECT_EQ(Method(Muon(), 768, 768, true, false), "newton-schulz standard fp32");
  EXPECT_EQ(Method(Muon(), 768, 3072, true, false), "newton-schulz gram fp32");
  EXPECT_EQ(Method(Muon(), 3072, 768, true, false), "newton-schulz gram fp32");
  EXPECT_EQ(Method(Muon(), 3072, 768, true, true), "newton-schulz gram bf16");
  // Small matrices gain nothing, and their accuracy in bf16 has no bound.
  EXPECT_EQ(Method(Muon(), 63, 3072, true, true), "newton-schulz standard fp32");
  EXPECT_EQ(Method(Muon({{"coefficients", "convergent"}}), 768, 3072, true, false),
            "newton-schulz standard fp32");
}

TEST(PolarPlanTest, OptionsDecideOverAuto) {
  EXPECT_EQ(Method(Muon({{"form", "gram"}}), 5, 5, true, false), "newton-schulz gram fp32");
  EXPECT_EQ(Method(Muon({{"form", "standard"}}), 64, 640, true, false),
            "newton-schulz standard fp32");
  EXPECT_EQ(Method(Muon({{"compute", "fp32"}}), 768, 768, true, true),
            "newton-schulz standard fp32");
  EXPECT_EQ(Method(Muon({{"compute", "bf16"}}), 768, 768, true, false),
            "newton-schulz standard bf16");
}

TEST(PolarPlanTest, WhatTheDeviceLacksIsRefusedWithTheReason) {
  EXPECT_NE(Method(Muon({{"compute", "bf16"}}), 768, 768, false, false).find("no bf16"),
            std::string::npos);
  for (const char* compute : {"fp16", "tf32"}) {
    const std::string message = Method(Muon({{"compute", compute}}), 768, 768, true, false);
    EXPECT_NE(message.find(std::string("no ") + compute), std::string::npos) << message;
    EXPECT_NE(message.find("it has fp32 and bf16"), std::string::npos) << message;
  }
}

TEST(PolarPlanTest, WorkspaceHoldsTheSquaresOfTheBatch) {
  const PolarPlan standard = *MakePolarPlan(Muon({{"form", "standard"}}), 100, 300, DeviceInfo());
  const PolarPlan gram = *MakePolarPlan(Muon({{"form", "gram"}}), 300, 100, DeviceInfo());
  EXPECT_EQ(PolarWorkspaceBytes(standard), 2 * 40000);
  EXPECT_EQ(PolarWorkspaceBytes(gram), 5 * 40000);
  EXPECT_EQ(PolarWorkspaceBytes(gram, 3), 3 * 5 * 40000);
}

TEST(PolarPlanTest, TheExplanationNamesBothCostsAndTheReason) {
  const PolarPlan plan = *MakePolarPlan(Muon(), 3072, 768, DeviceInfo());
  EXPECT_EQ(ExplainPolar(plan),
            "768 x 3072: newton-schulz gram fp32 restarts 2, 5 iterations; Gflop standard 29.44, "
            "gram 17.21; the Gram form saves more than a tenth");
  const PolarPlan square = *MakePolarPlan(Muon(), 100, 100, DeviceInfo());
  EXPECT_NE(ExplainPolar(square).find("would save less than a tenth"), std::string::npos);
}

// On the CPU backend.
class PolarTest : public testing::Test {
 protected:
  // The polar map of a batch of m x n units, fp32, one after the other.
  std::vector<float> Polar(const Rule& rule, int64_t m, int64_t n, std::vector<float> x) {
    const int64_t batch = static_cast<int64_t>(x.size()) / (m * n);
    const PolarPlan plan = *MakePolarPlan(rule, m, n, backend_->Info());
    DeviceBuffer workspace = *backend_->Allocate(PolarWorkspaceBytes(plan, batch));
    std::vector<float> spare(x.size());
    std::unique_ptr<Stream> stream = *backend_->CreateStream();
    const MatrixView result =
        EnqueuePolar(stream.get(), plan, {x.data(), DType::kFp32, m, n, batch},
                     {spare.data(), DType::kFp32, m, n, batch}, workspace.data());
    EXPECT_TRUE(stream->Synchronize().ok());
    return result.data == x.data() ? x : spare;
  }

  std::unique_ptr<Backend> backend_ = *CreateCpuBackend(3);
};

std::vector<float> Floats(const Dense& a, double factor = 1) {
  std::vector<float> values(a.values.size());
  for (size_t i = 0; i < values.size(); ++i) values[i] = static_cast<float>(a.values[i] * factor);
  return values;
}

Dense Doubles(const std::vector<float>& values, int64_t rows, int64_t cols) {
  return Dense(rows, cols, std::vector<double>(values.begin(), values.end()));
}

// X <- a X + (b A + c A^2) X, plain fp64 loops.
Dense Iterate(const std::vector<Coefficients>& coefficients, Dense x) {
  for (const Coefficients& k : coefficients) {
    const Dense gram = Multiply(x, Transpose(x));
    const Dense poly = Combine(k.b, gram, k.c, Multiply(gram, gram));
    x = Combine(k.a, x, 1, Multiply(poly, x));
  }
  return x;
}

double LargestDifference(const Dense& a, const Dense& b) {
  return MaxAbs(Combine(1, a, -1, b)) / MaxAbs(b);
}

TEST_F(PolarTest, ABatchGivesEachUnitTheBitsThatItGetsAlone) {
  for (const char* normalise : {"frobenius", "aol"}) {
    for (const char* form : {"standard", "gram"}) {
      const Rule rule = Muon({{"form", form}, {"normalise", normalise}, {"compute", "fp32"}});
      for (const auto& [m, n, batch] :
           {std::tuple<int64_t, int64_t, int64_t>{1, 7, 5}, {64, 65, 7}, {200, 420, 2}}) {
        std::vector<float> all, expected;
        for (int64_t i = 0; i < batch; ++i) {
          const Dense u = RandomNormal(m, n, 10 + i);
          const std::vector<float> unit = Floats(u, 1 / FrobeniusNorm(u));
          all.insert(all.end(), unit.begin(), unit.end());
          const std::vector<float> alone = Polar(rule, m, n, unit);
          expected.insert(expected.end(), alone.begin(), alone.end());
        }
        const std::vector<float> together = Polar(rule, m, n, all);
        EXPECT_EQ(std::memcmp(together.data(), expected.data(), all.size() * sizeof(float)), 0)
            << normalise << " " << form << " " << m << " x " << n << " x " << batch;
      }
    }
  }
}

TEST_F(PolarTest, BothFormsAgreeWithPlainLoops) {
  for (const auto& [m, n] : {std::pair<int64_t, int64_t>{1, 1}, {3, 5}, {70, 300}, {200, 200}}) {
    const Dense u = RandomNormal(m, n, m);
    const std::vector<float> x = Floats(u, 1 / FrobeniusNorm(u));
    for (const Settings& settings : {Settings{{"form", "standard"}}, Settings{{"form", "gram"}},
                                     Settings{{"form", "gram"}, {"restarts", "1,3"}},
                                     Settings{{"form", "gram"}, {"restarts", "none"}}}) {
      Rule rule = Muon(settings);
      rule.compute = ComputeType::kFp32;
      const Dense expected = Iterate(PolarCoefficients(rule), Doubles(x, m, n));
      EXPECT_LT(LargestDifference(Doubles(Polar(rule, m, n, x), m, n), expected), 3e-4)
          << m << " x " << n << " " << DescribeRule(rule);
    }
  }
}

// Rows of very different lengths, among them zero, tiny and equal ones.
Dense RaggedRows(int64_t m, int64_t n) {
  Dense u = RandomNormal(m, n, 3);
  for (int64_t j = 0; j < n; ++j) {
    u(1, j) = 0;
    u(2, j) *= 1e-6;
    u(3, j) = u(0, j);
    u(4, j) *= 20;
  }
  return u;
}

TEST_F(PolarTest, AolAgreesWithPlainLoops) {
  for (const auto& [m, n] : {std::pair<int64_t, int64_t>{6, 9}, {100, 260}}) {
    const Dense u = Doubles(Floats(RaggedRows(m, n)), m, n);
    const Dense gram = Multiply(u, Transpose(u));
    std::vector<double> sums(m, 0.0);
    for (int64_t i = 0; i < m; ++i) {
      for (int64_t j = 0; j < m; ++j) sums[i] += std::fabs(gram(i, j));
    }
    const double largest = *std::max_element(sums.begin(), sums.end());
    Dense x = u;
    for (int64_t i = 0; i < m; ++i) {
      const double s = sums[i] == 0 ? 0 : 1 / std::sqrt(std::max(sums[i], 1e-7 * largest));
      for (int64_t j = 0; j < n; ++j) x(i, j) *= s;
    }
    for (const char* form : {"standard", "gram"}) {
      Rule rule = *PresetRule("turbo_muon");
      ASSERT_TRUE(SetOption(rule, "form", form).ok());
      rule.compute = ComputeType::kFp32;
      const std::vector<float> o = Polar(rule, m, n, Floats(u));
      const Dense expected = Iterate(PolarCoefficients(rule), x);
      EXPECT_LT(LargestDifference(Doubles(o, m, n), expected), 3e-4) << form << " " << m;
      for (int64_t j = 0; j < n; ++j) EXPECT_EQ(o[n + j], 0) << "a zero row stays zero";
      // The preconditioned X does not see a power of two.
      EXPECT_EQ(Polar(rule, m, n, Floats(u, 0x1p-9)), o);
    }
  }
}

// What a machine with AMX does, with its tile unit in software: normalisation, map and scale in
// one.
TEST(FusedPolarTest, TheDevicesOwnKernelsTakeTheWholeMap) {
  std::unique_ptr<Backend> backend = *CreateCpuBackend(2, &kEmulatedTileKernels);
  std::unique_ptr<Stream> stream = *backend->CreateStream();
  for (const auto& [rows, cols] : {std::pair<int64_t, int64_t>{64, 150}, {150, 64}}) {
    for (const char* form : {"standard", "gram"}) {
      const Rule rule = Muon({{"form", form}});
      const PolarPlan plan = *MakePolarPlan(rule, rows, cols, backend->Info());
      EXPECT_EQ(DescribePolar(plan), std::string("newton-schulz ") + form + " bf16");
      EXPECT_NE(ExplainPolar(plan).find("fused kernels"), std::string::npos);
      const Dense u = RandomNormal(rows, cols, 5);
      std::vector<float> values = Floats(u);
      std::vector<uint16_t> x(rows * cols);
      DeviceBuffer workspace = *backend->Allocate(PolarWorkspaceBytes(plan));
      DirectionStats figures = {FrobeniusNorm(u) * FrobeniusNorm(u), MaxAbs(u), 0};
      NormalisePass normalise;
      normalise.u = values.data();
      normalise.rows = rows;
      normalise.cols = normalise.stride = cols;
      normalise.transpose = rows > cols;
      normalise.x = {x.data(), DType::kBf16, plan.m, plan.n, 1};
      normalise.figures = &figures;
      const MatrixView o =
          EnqueueNormalisedPolar(stream.get(), plan, normalise, MatrixView(), workspace.data());
      ASSERT_TRUE(stream->Synchronize().ok());
      ASSERT_EQ(o.data, x.data());
      Dense got(plan.m, plan.n);
      for (size_t i = 0; i < x.size(); ++i) got.values[i] = Bf16ToFloat(x[i]);
      const Dense exact = Iterate(
          plan.coefficients, Scaled(1 / FrobeniusNorm(u), normalise.transpose ? Transpose(u) : u));
      EXPECT_LT(FrobeniusNorm(Combine(1, got, -1, exact)), 0.05 * FrobeniusNorm(exact))
          << rows << " x " << cols << " " << form;
    }
  }
}

}  // namespace
}  // namespace stiefel
