#include "kernels/cpu/segment_kernels.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "common/dtype.h"
#include "gtest/gtest.h"

namespace stiefel {
namespace {

const float kInf = std::numeric_limits<float>::infinity();
const float kNan = std::numeric_limits<float>::quiet_NaN();

std::vector<float> Random(int64_t n, uint32_t seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  std::vector<float> x(n);
  for (float& v : x) v = normal(random);
  return x;
}

// Rounds where the kernels round: `volatile` keeps the compiler from contracting.
float Rounded(float v) {
  volatile float r = v;
  return r;
}

class SegmentKernelsTest : public ::testing::TestWithParam<int64_t> {};

// Every instruction set against plain loops, for lengths around those of the registers, at odd
// addresses.
TEST_P(SegmentKernelsTest, AgreeWithPlainLoops) {
  const int64_t n = GetParam();
  const SegmentKernelList list = RunnableSegmentKernels();
  const std::vector<float> gs = Random(n + 1, 1), ms = Random(n + 1, 2), vs = Random(n + 1, 3);
  const float *g = gs.data() + 1, *m = ms.data() + 1;
  std::vector<float> v(n);
  for (int64_t i = 0; i < n; ++i) v[i] = vs[i] * vs[i];
  const SegmentCoefficients c = {0.5f, 0.9f, 0.1f, 0.8f, 0.2f, 0.99f, 0.01f, 1.5f, 2.5f, 1e-3f};
  for (int s = 0; s < list.count; ++s) {
    const SegmentKernels& k = *list.sets[s];
    std::vector<float> new_m(n + 1), new_v(n + 1), u(n + 1), out(n + 1);
    SegmentSums gradient = {}, direction = {};
    double squares = 0, direction_squares = 0;

    k.momentum(c, g, m, new_m.data(), u.data(), n, &gradient, &direction, false);
    for (int64_t i = 0; i < n; ++i) {
      const float clipped = Rounded(g[i] * c.clip);
      const float want_m = Rounded(m[i] * c.m_keep) + Rounded(clipped * c.m_gain);
      const float want_u = Rounded(want_m * c.u_momentum) + Rounded(clipped * c.u_gradient);
      ASSERT_EQ(new_m[i], want_m) << k.name;
      ASSERT_EQ(u[i], want_u) << k.name;
      squares += static_cast<double>(g[i]) * g[i];
      direction_squares += static_cast<double>(want_u) * want_u;
    }
    EXPECT_NEAR(gradient.sum_squares, squares, 1e-12 * squares) << k.name;
    EXPECT_NEAR(direction.sum_squares, direction_squares, 1e-12 * direction_squares) << k.name;
    EXPECT_EQ(gradient.nonfinite + direction.nonfinite, 0);

    k.lion(c, g, m, new_m.data(), u.data(), n, &gradient, &direction, false);
    for (int64_t i = 0; i < n; ++i) {
      const float clipped = Rounded(g[i] * c.clip);
      const float mixed = Rounded(m[i] * c.u_momentum) + Rounded(clipped * c.u_gradient);
      ASSERT_EQ(u[i], mixed > 0 ? 1 : mixed < 0 ? -1 : 0) << k.name;
      ASSERT_EQ(new_m[i], Rounded(m[i] * c.m_keep) + Rounded(clipped * c.m_gain)) << k.name;
    }

    k.adam(c, g, m, v.data(), new_m.data(), new_v.data(), u.data(), n, &gradient, &direction,
           false);
    for (int64_t i = 0; i < n; ++i) {
      const float clipped = Rounded(g[i] * c.clip);
      const float want_v =
          Rounded(v[i] * c.v_keep) + Rounded(Rounded(clipped * c.v_gain) * clipped);
      const float denominator = Rounded(std::sqrt(Rounded(want_v * c.v_correction))) + c.eps;
      ASSERT_EQ(new_v[i], want_v) << k.name;
      ASSERT_EQ(u[i], Rounded(new_m[i] * c.m_correction) / denominator) << k.name;
    }

    SegmentSums applied = {}, decayed = {};
    k.deliver(-0.3f, g, out.data(), n, &applied, false);
    for (int64_t i = 0; i < n; ++i) ASSERT_EQ(out[i], -0.3f * g[i]) << k.name;
    EXPECT_NEAR(applied.sum_squares, squares, 1e-12 * squares) << k.name;
    k.decay(0.7f, m, g, out.data(), n, &decayed, false);
    for (int64_t i = 0; i < n; ++i) ASSERT_EQ(out[i], Rounded(m[i] * 0.7f) + g[i]) << k.name;
    SegmentSums scaled = {};
    k.deliver_scaled(1e-3, -0.3f, g, out.data(), n, &scaled, false);
    double scaled_squares = 0;
    for (int64_t i = 0; i < n; ++i) {
      const float o = static_cast<float>(1e-3 * g[i]);
      ASSERT_EQ(out[i], Rounded(-0.3f * o)) << k.name;
      scaled_squares += static_cast<double>(o) * o;
    }
    EXPECT_NEAR(scaled.sum_squares, scaled_squares, 1e-12 * scaled_squares) << k.name;
    k.scale_wide(1e60, g, out.data(), n);
    for (int64_t i = 0; i < n; ++i) ASSERT_EQ(out[i], static_cast<float>(1e60 * g[i])) << k.name;

    std::vector<uint16_t> half(n + 1), y(n + 1, FloatToBf16(0.25f));
    k.round_bf16(2, g, 3, y.data(), half.data(), n);
    for (int64_t i = 0; i < n; ++i)
      ASSERT_EQ(half[i], FloatToBf16(Rounded(2 * g[i]) + 0.75f)) << k.name;
    k.round_bf16(1, g, 0, nullptr, half.data(), n);
    for (int64_t i = 0; i < n; ++i) ASSERT_EQ(half[i], FloatToBf16(g[i])) << k.name;

    std::vector<double> wide(n + 1, 0.5);
    double dot = 0;
    for (int64_t i = 0; i < n; ++i) dot += 0.5 * g[i];
    EXPECT_NEAR(k.dot_wide(g, wide.data(), n), dot, 1e-12 * (1 + squares)) << k.name;
    k.add_scaled_wide(2, g, wide.data(), n);
    k.add_squares(g, wide.data(), n);
    k.add_abs(g, wide.data(), n);
    double sum_abs = 0;
    for (int64_t i = 0; i < n; ++i) {
      const double x = g[i];
      EXPECT_NEAR(wide[i], 0.5 + 2 * x + x * x + std::fabs(x), 1e-12) << k.name;
      sum_abs += std::fabs(x);
    }
    EXPECT_NEAR(k.sum_abs(g, n), sum_abs, 1e-12 * sum_abs) << k.name;
    SegmentSums of_g = {};
    k.sums(g, n, &of_g);
    float largest = 0;
    for (int64_t i = 0; i < n; ++i) largest = std::max(largest, std::fabs(g[i]));
    EXPECT_EQ(of_g.max_abs, largest) << k.name;
  }
}

TEST_P(SegmentKernelsTest, CountNonfiniteElementsWhereverTheyAre) {
  const int64_t n = GetParam();
  if (n < 3) GTEST_SKIP() << "needs three places";
  std::vector<float> x = Random(n, 4), zero(n, 0.0f), out(n), u(n);
  x[0] = kInf;
  x[n / 2] = kNan;
  x[n - 1] = -kInf;
  const SegmentCoefficients c = {1, 0.9f, 0.1f, 1, 0, 0.9f, 0.1f, 1, 1, 0};
  const SegmentKernelList list = RunnableSegmentKernels();
  for (int s = 0; s < list.count; ++s) {
    const SegmentKernels& k = *list.sets[s];
    SegmentSums sums = {}, gradient = {}, direction = {}, delivered = {}, decayed = {};
    k.sums(x.data(), n, &sums);
    EXPECT_EQ(sums.nonfinite, 3) << k.name;
    k.momentum(c, x.data(), zero.data(), out.data(), u.data(), n, &gradient, &direction, false);
    EXPECT_EQ(gradient.nonfinite, 3) << k.name;
    EXPECT_EQ(direction.nonfinite, 3) << k.name;
    // The new state alone: u takes nothing of it.
    std::vector<float> finite(n, 1.0f);
    direction = {};
    k.momentum({1, 0.9f, 0.1f, 0, 1, 0, 0, 1, 1, 0}, finite.data(), x.data(), out.data(), u.data(),
               n, &gradient, &direction, false);
    EXPECT_EQ(direction.nonfinite, 3) << k.name;
    gradient = {};
    k.lion(c, x.data(), zero.data(), out.data(), u.data(), n, &gradient, &direction, false);
    EXPECT_EQ(gradient.nonfinite, 3) << k.name << ": the sign of what is not finite may be finite";
    k.deliver(1, x.data(), out.data(), n, &delivered, false);
    EXPECT_EQ(delivered.nonfinite, 3) << k.name;
    k.decay(1, zero.data(), x.data(), out.data(), n, &decayed, false);
    EXPECT_EQ(decayed.nonfinite, 3) << k.name;
    std::vector<uint16_t> half(n, 0x3C00);
    half[1] = 0x7C00;
    EXPECT_EQ(k.count_exponent16(half.data(), 0x7C00, n), 1) << k.name;
  }
}

// Stores past the caches give the same bits, also where an output is not aligned.
TEST_P(SegmentKernelsTest, StreamingChangesNothing) {
  const int64_t n = GetParam();
  const std::vector<float> g = Random(n, 1), m = Random(n, 2), v(n, 0.5f);
  const SegmentCoefficients c = {0.5f, 0.9f, 0.1f, 0.8f, 0.2f, 0.99f, 0.01f, 1.5f, 2.5f, 1e-3f};
  const SegmentKernelList list = RunnableSegmentKernels();
  for (int s = 0; s < list.count; ++s) {
    const SegmentKernels& k = *list.sets[s];
    for (const int64_t shift : {0, 1}) {
      alignas(64) float out[2][4][kSegment + 16];
      SegmentSums sums[2][2] = {};
      for (const bool streaming : {false, true}) {
        float* const a = out[streaming][0] + shift;
        float* const b = out[streaming][1] + shift;
        float* const d = out[streaming][2] + shift;
        float* const u = out[streaming][3];
        SegmentSums* const of = sums[streaming];
        k.momentum(c, g.data(), m.data(), a, u, n, &of[0], &of[1], streaming);
        k.deliver_scaled(0.1, 0.3f, u, b, n, &of[1], streaming);
        k.deliver(0.3f, u, d, n, &of[1], streaming);
        k.decay(0.9f, m.data(), b, d, n, &of[1], streaming);
        k.lion(c, g.data(), m.data(), d, u, n, &of[0], &of[1], streaming);
        k.adam(c, g.data(), m.data(), v.data(), d, b, u, n, &of[0], &of[1], streaming);
        k.fence();
      }
      for (int i = 0; i < 4; ++i) {
        const int64_t from = i < 3 ? shift : 0;
        EXPECT_EQ(std::memcmp(out[0][i] + from, out[1][i] + from, n * sizeof(float)), 0)
            << k.name << " output " << i << " shift " << shift;
      }
      EXPECT_EQ(sums[0][1].sum_squares, sums[1][1].sum_squares) << k.name;
    }
  }
}

// adam_weights has the bits of adam, deliver and decay, streaming or not, aligned or not.
TEST_P(SegmentKernelsTest, AdamWithWeightsIsItsParts) {
  const int64_t n = GetParam();
  const std::vector<float> g = Random(n, 1), m = Random(n, 2), v(n, 0.5f), w = Random(n, 3);
  const SegmentCoefficients c = {0.5f, 0.9f, 0.1f, 0.8f, 0.2f, 0.99f, 0.01f, 1.5f, 2.5f, 1e-3f};
  const SegmentKernelList list = RunnableSegmentKernels();
  for (int s = 0; s < list.count; ++s) {
    const SegmentKernels& k = *list.sets[s];
    alignas(64) float want[3][kSegment], got[3][kSegment + 16];
    std::vector<float> u(n), delta(n);
    SegmentSums gradient = {}, direction = {}, of_update = {}, of_weights = {};
    k.adam(c, g.data(), m.data(), v.data(), want[0], want[1], u.data(), n, &gradient, &direction,
           false);
    k.deliver(-0.3f, u.data(), delta.data(), n, &of_update, false);
    k.decay(0.7f, w.data(), delta.data(), want[2], n, &of_weights, false);
    for (const int64_t shift : {0, 1}) {
      for (const int streaming : {0, 1, 2}) {  // nothing, states, all
        SegmentSums of_gradient = {}, of_state = {}, applied = {};
        k.adam_weights(c, {-0.3f, 0.7f, w.data(), got[2] + shift, streaming == 2}, g.data(),
                       m.data(), v.data(), got[0] + shift, got[1] + shift, n, &of_gradient,
                       &of_state, &applied, streaming > 0);
        k.fence();
        for (int i = 0; i < 3; ++i) {
          EXPECT_EQ(std::memcmp(got[i] + shift, want[i], n * sizeof(float)), 0)
              << k.name << " output " << i << " shift " << shift << " streaming " << streaming;
        }
        EXPECT_EQ(of_gradient.sum_squares, gradient.sum_squares) << k.name;
        EXPECT_EQ(applied.sum_squares, of_update.sum_squares) << k.name;
        EXPECT_EQ(of_gradient.nonfinite + of_state.nonfinite + applied.nonfinite, 0) << k.name;
      }
    }
  }
}

TEST_P(SegmentKernelsTest, AdamWithWeightsCountsWhatIsNotFinite) {
  const int64_t n = GetParam();
  if (n < 3) GTEST_SKIP() << "needs three places";
  std::vector<float> g = Random(n, 1), w = Random(n, 2), zero(n, 0.0f), m(n), v(n), new_w(n);
  g[0] = kInf;
  w[n - 1] = kNan;
  const SegmentCoefficients c = {1, 0.9f, 0.1f, 1, 0, 0.9f, 0.1f, 1, 1, 1e-8f};
  const SegmentKernelList list = RunnableSegmentKernels();
  for (int s = 0; s < list.count; ++s) {
    SegmentSums gradient = {}, state = {}, applied = {};
    list.sets[s]->adam_weights(c, {-0.3f, 0.7f, w.data(), new_w.data(), false}, g.data(),
                               zero.data(), zero.data(), m.data(), v.data(), n, &gradient, &state,
                               &applied, false);
    EXPECT_EQ(gradient.nonfinite, 1) << list.sets[s]->name;
    EXPECT_EQ(state.nonfinite, 1) << list.sets[s]->name;
    EXPECT_EQ(applied.nonfinite, 2) << list.sets[s]->name << ": inf / inf, and the weight";
  }
}

INSTANTIATE_TEST_SUITE_P(Lengths, SegmentKernelsTest,
                         ::testing::Values(0, 1, 3, 7, 8, 15, 16, 17, 31, 33, 1000, kSegment));

TEST(SegmentKernelsTest, AdamWithoutEpsGivesZeroForZero) {
  const float zero[3] = {0, 0, 0};
  const SegmentCoefficients c = {1, 0.9f, 0.1f, 1, 0, 0.9f, 0.1f, 1, 1, 0};
  const SegmentKernelList list = RunnableSegmentKernels();
  for (int s = 0; s < list.count; ++s) {
    float m[3], v[3], u[3];
    SegmentSums gradient = {}, direction = {};
    list.sets[s]->adam(c, zero, zero, zero, m, v, u, 3, &gradient, &direction, false);
    for (float x : u) EXPECT_EQ(x, 0) << list.sets[s]->name;
  }
}

}  // namespace
}  // namespace stiefel
