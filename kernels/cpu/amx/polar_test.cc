#include "kernels/cpu/amx/polar.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <functional>
#include <iostream>
#include <string>
#include <vector>

#include "common/dtype.h"
#include "gtest/gtest.h"
#include "kernels/cpu/amx/support.h"
#include "kernels/cpu/amx/tile_matrix.h"
#include "kernels/reference/dense.h"

namespace stiefel {
namespace {

using Bf16s = std::vector<uint16_t>;

// The fastest emulation that runs here; the same bits as the other one.
const TileKernels& Emulated() {
  return CpuHasAvx512Bf16() ? kEmulatedAvx512TileKernels : kEmulatedTileKernels;
}

std::vector<Coefficients> KellerJordan(int64_t steps) {
  return std::vector<Coefficients>(steps, {3.4445, -4.7750, 2.0315});
}

struct Form {
  int64_t steps = 5;
  bool gram = false;
  std::vector<int64_t> restarts = {};
  bool aol = false;
};

class Workspace {
 public:
  explicit Workspace(int64_t bytes) : memory_(bytes + 64, 0x7F) {}  // NaN until written
  void* data() {
    return memory_.data() + (64 - reinterpret_cast<uintptr_t>(memory_.data()) % 64) % 64;
  }

 private:
  std::vector<char> memory_;
};

// The map of U, rows x cols, times factor. The result has the shape of X: min x max of the two.
Bf16s Polar(const TileKernels& kernels, int threads, const Form& form, const Dense& u,
            double factor = 1) {
  ThreadPool pool(threads);
  const int64_t stride = u.cols + 3;
  std::vector<float> values(u.rows * stride, NAN);
  for (int64_t i = 0; i < u.rows; ++i) {
    for (int64_t j = 0; j < u.cols; ++j) values[i * stride + j] = static_cast<float>(u(i, j));
  }
  Bf16s out(u.rows * u.cols, 0x7FC0);
  PolarPass pass;
  pass.normalise.u = values.data();
  pass.normalise.rows = u.rows;
  pass.normalise.cols = u.cols;
  pass.normalise.stride = stride;
  pass.normalise.transpose = u.rows > u.cols;
  const int64_t m = std::min(u.rows, u.cols), n = std::max(u.rows, u.cols);
  pass.normalise.x = {out.data(), DType::kBf16, m, n, 1};
  const std::vector<Coefficients> coefficients = KellerJordan(form.steps);
  pass.coefficients = coefficients;
  pass.gram = form.gram;
  pass.restarts = form.restarts;
  pass.aol = form.aol;
  Workspace workspace(TilePolarBytes(m, n, form.gram));
  pass.workspace = workspace.data();
  TilePolar(kernels, &pool, pass, factor);
  return out;
}

Dense Doubles(const Bf16s& values, int64_t rows, int64_t cols) {
  Dense a(rows, cols);
  for (size_t i = 0; i < values.size(); ++i) a.values[i] = Bf16ToFloat(values[i]);
  return a;
}

Dense Iterate(Dense x) {
  for (const Coefficients& k : KellerJordan(5)) {
    const Dense gram = Multiply(x, Transpose(x));
    const Dense poly = Combine(k.b, gram, k.c, Multiply(gram, gram));
    x = Combine(k.a, x, 1, Multiply(poly, x));
  }
  return x;
}

// A matrix with the short side's singular values s(i), of unit Frobenius norm.
Dense WithSingularValues(int64_t m, int64_t n, const std::function<double(int64_t)>& s) {
  Dense left = RandomOrthonormalRows(m, m, 1), right = RandomOrthonormalRows(m, n, 2);
  for (int64_t i = 0; i < m; ++i) {
    for (int64_t j = 0; j < n; ++j) right(i, j) *= s(i);
  }
  const Dense a = Multiply(left, right);
  return Scaled(1 / FrobeniusNorm(a), a);
}

std::vector<std::pair<std::string, Dense>> Inputs(int64_t m, int64_t n) {
  const Dense noise = RandomNormal(m, n, 5);
  return {{"normal", Scaled(1 / FrobeniusNorm(noise), noise)},
          {"s = 1/k", WithSingularValues(m, n, [](int64_t i) { return 1.0 / (1.0 + i); })},
          {"rank 8 + 1e-2", WithSingularValues(m, n, [](int64_t i) { return i < 8 ? 1 : 1e-2; })},
          {"rank 8", WithSingularValues(m, n, [](int64_t i) { return i < 8 ? 1 : 0; })}};
}

const Form kForms[] = {{}, {5, true, {2, 4}}};

// The criterion of docs/mathematics.md section 7.
TEST(TilePolarTest, BothFormsMeetTheBf16Criterion) {
  for (const auto& [m, n] :
       {std::pair<int64_t, int64_t>{64, 64}, {64, 200}, {96, 100}, {70, 300}}) {
    for (const auto& [name, u] : Inputs(m, n)) {
      const Dense exact = Iterate(u);
      const std::vector<double> range = SingularValues(exact);
      for (const Form& form : kForms) {
        const Dense o = Doubles(Polar(Emulated(), 2, form, u), m, n);
        const std::vector<double> values = SingularValues(o);
        const double alignment = Inner(o, u) / Inner(exact, u);
        std::cout << m << " x " << n << " " << name << (form.gram ? " gram" : " standard")
                  << ": singular values " << values.back() << ".." << values.front() << " (exact "
                  << range.back() << ".." << range.front() << "), alignment " << alignment << "\n";
        EXPECT_GE(values.back(), range.back() - 0.05);
        EXPECT_LE(values.front(), range.front() + 0.05);
        EXPECT_GE(alignment, 0.98);
        EXPECT_LE(alignment, 1.02);
      }
    }
  }
}

// bf16 errs by some 2^-8 of the largest entry per product; a misplaced block errs by all of it.
TEST(TilePolarTest, AnyShapeAgreesWithPlainLoops) {
  for (const auto& [m, n] : {std::pair<int64_t, int64_t>{1, 1},
                             {1, 70},
                             {5, 7},
                             {31, 33},
                             {32, 32},
                             {33, 64},
                             {65, 130},
                             {200, 300}}) {
    // Well conditioned, so that bf16 is close.
    const Dense u = WithSingularValues(m, n, [](int64_t i) { return 1 + 0.1 * (i % 3); });
    const Dense exact = Iterate(u);
    for (const Form& form : {Form{}, Form{5, true, {2, 4}}, Form{5, true, {1, 2, 3, 4}}}) {
      const Bf16s o = Polar(Emulated(), 3, form, u);
      EXPECT_LT(FrobeniusNorm(Combine(1, Doubles(o, m, n), -1, exact)), 0.04 * FrobeniusNorm(exact))
          << m << " x " << n << (form.gram ? " gram" : " standard");
      // A tall U gives the transpose, which is what X holds anyhow.
      if (m == n) continue;
      EXPECT_EQ(Polar(Emulated(), 3, form, Transpose(u)), o) << m << " x " << n;
    }
  }
}

TEST(TilePolarTest, TheFactorMultipliesExactly) {
  const Dense u = Scaled(0.01, RandomNormal(40, 75, 8));
  // The product is fp64: neither a factor that fp32 cannot hold nor a tiny U loses anything.
  EXPECT_EQ(Polar(Emulated(), 2, {}, Scaled(0x1p-120, u), 0x1p120), Polar(Emulated(), 2, {}, u));
  EXPECT_EQ(Polar(Emulated(), 2, {}, Scaled(0x1p120, u), 0x1p-120), Polar(Emulated(), 2, {}, u));
  Dense broken = u;
  broken(3, 3) = NAN;
  EXPECT_EQ(Polar(Emulated(), 2, {}, broken, 0), Bf16s(40 * 75, 0)) << "zeros whatever u holds";
}

TEST(TilePolarTest, TheSameBitsOnAnyThreads) {
  for (Form form : kForms) {
    for (bool aol : {false, true}) {
      form.aol = aol;
      for (const auto& [m, n] : {std::pair<int64_t, int64_t>{40, 75}, {110, 290}}) {
        const Dense u = RandomNormal(m, n, 1);
        const double factor = 1 / FrobeniusNorm(u);
        const Bf16s o = Polar(Emulated(), 1, form, u, factor);
        EXPECT_EQ(Polar(Emulated(), 4, form, u, factor), o) << m << " x " << n;
      }
    }
  }
}

TEST(TilePolarTest, TheSameBitsFromAnyKernels) {
  if (!CpuHasAvx512Bf16()) GTEST_SKIP() << "no AVX-512 bf16 on this processor";
  for (Form form : kForms) {
    for (bool aol : {false, true}) {
      form.aol = aol;
      const Dense u = RandomNormal(40, 75, 1);
      const double factor = 1 / FrobeniusNorm(u);
      EXPECT_EQ(Polar(kEmulatedTileKernels, 2, form, u, factor),
                Polar(kEmulatedAvx512TileKernels, 2, form, u, factor));
    }
  }
}

TEST(TilePolarTest, AolPreconditionsByRowSums) {
  const int64_t m = 70, n = 150;
  Dense u = RandomNormal(m, n, 4);
  for (int64_t j = 0; j < n; ++j) {
    u(1, j) = 0;
    u(2, j) *= 30;
    u(3, j) = u(0, j);
  }
  u = Scaled(1 / MaxAbs(u), u);
  const Dense gram = Multiply(u, Transpose(u));
  std::vector<double> sums(m, 0.0);
  for (int64_t i = 0; i < m; ++i) {
    for (int64_t j = 0; j < m; ++j) sums[i] += std::fabs(gram(i, j));
  }
  Dense x = u;
  for (int64_t i = 0; i < m; ++i) {
    for (int64_t j = 0; j < n; ++j) x(i, j) *= sums[i] == 0 ? 0 : 1 / std::sqrt(sums[i]);
  }
  const Dense exact = Iterate(x);
  for (Form form : kForms) {
    form.aol = true;
    const Bf16s o = Polar(Emulated(), 2, form, u);
    EXPECT_LT(FrobeniusNorm(Combine(1, Doubles(o, m, n), -1, exact)), 0.06 * FrobeniusNorm(exact));
    for (int64_t j = 0; j < n; ++j) EXPECT_EQ(o[n + j] & 0x7FFF, 0) << "a zero row stays zero";
    // The preconditioned X does not see a power of two.
    EXPECT_EQ(Polar(Emulated(), 2, form, u, 0x1p-5), o);
  }
}

TEST(TilePolarTest, WorkspaceIsAFewTimesTheMatrix) {
  const int64_t wide = 1024 * 4096, square = 1024 * 1024;
  EXPECT_EQ(TilePolarBytes(1024, 4096, false), 8 * wide + 6 * square + 8 * 1024);
  EXPECT_EQ(TilePolarBytes(1024, 4096, true), 8 * wide + 16 * square + 8 * 1024);
  EXPECT_EQ(TilePolarBytes(33, 50, true), 24 * 64 * 64 + 8 * 64);
}

// Inner dimensions long enough for several passes.
TEST(TileProductsTest, LongInnerDimensionsAgreeWithPlainLoops) {
  const int64_t rows = 75, inner = 2200;
  Bf16s x(rows * inner);
  Dense exact = RandomNormal(rows, inner, 6);
  for (size_t i = 0; i < x.size(); ++i) {
    x[i] = FloatToBf16(static_cast<float>(exact.values[i]));
    exact.values[i] = Bf16ToFloat(x[i]);
  }
  const Dense wanted = Multiply(exact, Transpose(exact));
  const int64_t panels = BlocksOf(rows), steps = BlocksOf(inner);
  Workspace memory(2 * panels * steps * kBlockValues * 2);
  auto* data = static_cast<uint16_t*>(memory.data());
  const TileOperand left = {data, panels, steps};
  const TileOperand right = {data + panels * steps * kBlockValues, panels, steps};
  std::fill_n(data, 2 * panels * steps * kBlockValues, uint16_t{0});
  for (int64_t i = 0; i < rows; ++i) {
    for (int64_t j = 0; j < inner; ++j)
      left.At(i / 32, j / 32)[i % 32 * 32 + j % 32] = x[i * inner + j];
  }
  for (int64_t i = 0; i < panels; ++i) {
    for (int64_t j = 0; j < steps; ++j) Emulated().transpose(left.At(i, j), right.At(i, j));
  }
  ThreadPool pool(2);
  for (bool symmetric : {false, true}) {
    std::atomic<int64_t> blocks{0};
    TileProducts(Emulated(), &pool)
        .Multiply(left, right, symmetric, [&](float* block, int64_t i, int64_t j) {
          ++blocks;
          for (int64_t row = 0; row < kBlockSide && i * 32 + row < rows; ++row) {
            for (int64_t col = 0; col < kBlockSide && j * 32 + col < rows; ++col) {
              const float got = block[(row / 16 * 2 + col / 16) * 256 + row % 16 * 16 + col % 16];
              EXPECT_NEAR(got, wanted(i * 32 + row, j * 32 + col), 0.02);
            }
          }
        });
    EXPECT_EQ(blocks, symmetric ? panels * (panels + 1) / 2 : panels * panels);
  }
}

// Only a machine with AMX can show this.
TEST(TilePolarTest, TheHardwareMapsAsTheEmulationDoes) {
  if (!CpuHasAmx()) GTEST_SKIP() << "no AMX on this processor";
  for (const auto& [m, n] : {std::pair<int64_t, int64_t>{33, 70}, {64, 64}, {270, 300}}) {
    const Dense u = WithSingularValues(m, n, [](int64_t i) { return 1 + 0.1 * (i % 3); });
    for (const Form& form : kForms) {
      const Bf16s hardware = Polar(kAmxTileKernels, 3, form, u);
      EXPECT_EQ(Polar(kAmxTileKernels, 1, form, u), hardware);
      const Dense emulated = Doubles(Polar(Emulated(), 3, form, u), m, n);
      const double difference = FrobeniusNorm(Combine(1, Doubles(hardware, m, n), -1, emulated));
      std::cout << m << " x " << n << ": differs by " << difference / FrobeniusNorm(emulated)
                << "\n";
      EXPECT_LT(difference, 0.02 * FrobeniusNorm(emulated));
    }
  }
}

}  // namespace
}  // namespace stiefel
