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

Bf16s Polar(const TileKernels& kernels, int threads, const Form& form, int64_t m, int64_t n,
            const Bf16s& x) {
  ThreadPool pool(threads);
  Bf16s in = x, out(x.size(), 0x7FC0);
  PolarPass pass;
  const int64_t batch = static_cast<int64_t>(x.size()) / (m * n);
  pass.x = {in.data(), DType::kBf16, m, n, batch};
  pass.out = {out.data(), DType::kBf16, m, n, batch};
  pass.coefficients = KellerJordan(form.steps);
  pass.gram = form.gram;
  pass.restarts = form.restarts;
  pass.aol = form.aol;
  Workspace workspace(TilePolarBytes(pass));
  pass.workspace = workspace.data();
  TilePolar(kernels, &pool, pass);
  EXPECT_EQ(in, x) << "x is kept";
  return out;
}

Bf16s Rounded(const Dense& a, double factor = 1) {
  Bf16s values(a.values.size());
  for (size_t i = 0; i < values.size(); ++i)
    values[i] = FloatToBf16(static_cast<float>(a.values[i] * factor));
  return values;
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

// The criterion of docs/RULES.md section 7.
TEST(TilePolarTest, BothFormsMeetTheBf16Criterion) {
  for (const auto& [m, n] :
       {std::pair<int64_t, int64_t>{64, 64}, {64, 200}, {96, 100}, {70, 300}}) {
    for (const auto& [name, u] : Inputs(m, n)) {
      const Bf16s x = Rounded(u);
      const Dense exact = Iterate(u);
      const std::vector<double> range = SingularValues(exact);
      for (const Form& form : kForms) {
        const Dense o = Doubles(Polar(Emulated(), 2, form, m, n, x), m, n);
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
                             {270, 300}}) {
    // Well conditioned, so that bf16 is close.
    const Dense u = WithSingularValues(m, n, [](int64_t i) { return 1 + 0.1 * (i % 3); });
    const Bf16s x = Rounded(u);
    const Dense exact = Iterate(Doubles(x, m, n));
    for (const Form& form : {Form{}, Form{5, true, {2, 4}}, Form{5, true, {1, 2, 3, 4}}}) {
      const Dense o = Doubles(Polar(Emulated(), 3, form, m, n, x), m, n);
      EXPECT_LT(FrobeniusNorm(Combine(1, o, -1, exact)), 0.04 * FrobeniusNorm(exact))
          << m << " x " << n << (form.gram ? " gram" : " standard");
    }
  }
}

// Three units alone and together, on one thread and on four.
void ExpectTheSameBits(const Form& form, int64_t m, int64_t n) {
  SCOPED_TRACE(std::to_string(m) + " x " + std::to_string(n) + (form.gram ? " gram" : " standard"));
  Bf16s all, alone;
  for (uint64_t seed : {1, 2, 3}) {
    const Dense u = RandomNormal(m, n, seed);
    const Bf16s x = Rounded(u, 1 / FrobeniusNorm(u));
    const Bf16s o = Polar(Emulated(), 1, form, m, n, x);
    EXPECT_EQ(Polar(Emulated(), 4, form, m, n, x), o);
    all.insert(all.end(), x.begin(), x.end());
    alone.insert(alone.end(), o.begin(), o.end());
  }
  EXPECT_EQ(Polar(Emulated(), 2, form, m, n, all), alone);
}

TEST(TilePolarTest, TheSameBitsOnAnyThreadsAndInAnyBatch) {
  for (Form form : kForms) {
    ExpectTheSameBits(form, 40, 75);
    form.aol = true;
    ExpectTheSameBits(form, 100, 140);
    // Too large to be computed side by side.
    ExpectTheSameBits({1, form.gram, {}, false}, 32, 8200);
  }
}

TEST(TilePolarTest, TheSameBitsFromAnyKernels) {
  if (!CpuHasAvx512Bf16()) GTEST_SKIP() << "no AVX-512 bf16 on this processor";
  for (Form form : kForms) {
    for (bool aol : {false, true}) {
      form.aol = aol;
      const Dense u = RandomNormal(40, 75, 1);
      const Bf16s x = Rounded(u, 1 / FrobeniusNorm(u));
      EXPECT_EQ(Polar(kEmulatedTileKernels, 2, form, 40, 75, x),
                Polar(kEmulatedAvx512TileKernels, 2, form, 40, 75, x));
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
  const Bf16s x = Rounded(u);
  u = Doubles(x, m, n);
  const Dense gram = Multiply(u, Transpose(u));
  std::vector<double> sums(m, 0.0);
  for (int64_t i = 0; i < m; ++i) {
    for (int64_t j = 0; j < m; ++j) sums[i] += std::fabs(gram(i, j));
  }
  for (int64_t i = 0; i < m; ++i) {
    for (int64_t j = 0; j < n; ++j) u(i, j) *= sums[i] == 0 ? 0 : 1 / std::sqrt(sums[i]);
  }
  const Dense exact = Iterate(u);
  for (Form form : kForms) {
    form.aol = true;
    const Bf16s o = Polar(Emulated(), 2, form, m, n, x);
    EXPECT_LT(FrobeniusNorm(Combine(1, Doubles(o, m, n), -1, exact)), 0.06 * FrobeniusNorm(exact));
    for (int64_t j = 0; j < n; ++j) EXPECT_EQ(o[n + j] & 0x7FFF, 0) << "a zero row stays zero";
    // The preconditioned X does not see a power of two.
    EXPECT_EQ(Polar(Emulated(), 2, form, m, n, Rounded(Doubles(x, m, n), 0x1p-5)), o);
  }
}

TEST(TilePolarTest, WorkspaceIsAFewTimesTheMatrix) {
  PolarPass pass;
  pass.x = {nullptr, DType::kBf16, 1024, 4096, 1};
  const int64_t wide = 1024 * 4096, square = 1024 * 1024;
  EXPECT_EQ(TilePolarBytes(pass), 8 * wide + 6 * square + 8 * 1024);
  pass.gram = true;
  EXPECT_EQ(TilePolarBytes(pass), 8 * wide + 16 * square + 8 * 1024);
  pass.x = {nullptr, DType::kBf16, 33, 50, 3};
  EXPECT_EQ(TilePolarBytes(pass), 3 * (24 * 64 * 64 + 8 * 64));
}

// Inner dimensions long enough for several passes.
TEST(TileProductsTest, LongInnerDimensionsAgreeWithPlainLoops) {
  const int64_t rows = 75, inner = 2200;
  const Bf16s x = Rounded(RandomNormal(rows, inner, 6));
  const Dense exact = Doubles(x, rows, inner);
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
      const Bf16s x = Rounded(u);
      const Bf16s hardware = Polar(kAmxTileKernels, 3, form, m, n, x);
      EXPECT_EQ(Polar(kAmxTileKernels, 1, form, m, n, x), hardware);
      const Dense emulated = Doubles(Polar(Emulated(), 3, form, m, n, x), m, n);
      const double difference = FrobeniusNorm(Combine(1, Doubles(hardware, m, n), -1, emulated));
      std::cout << m << " x " << n << ": differs by " << difference / FrobeniusNorm(emulated)
                << "\n";
      EXPECT_LT(difference, 0.02 * FrobeniusNorm(emulated));
    }
  }
}

}  // namespace
}  // namespace stiefel
