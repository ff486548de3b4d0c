#include "kernels/polar/newton_schulz.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"

namespace stiefel {
namespace {

// Below this short side bf16 has no accuracy to offer and the Gram form no time to save.
constexpr int64_t kMinShortSide = 64;
constexpr int kStandardSquares = 2, kGramSquares = 5;

int64_t SquareBytes(const PolarPlan& plan) {
  return (plan.m * plan.m * DTypeSize(plan.compute) + 63) / 64 * 64;
}

// Flops in units of m^3, symmetric products counted half (docs/RULES.md section 2).
double StandardCost(double aspect, double steps) { return steps * (3 * aspect + 1); }
double GramCost(double aspect, double steps, double restarts) {
  return 4 * steps + 3 * aspect - 3 + 3 * (aspect - 1) * restarts;
}

// Iterations in a row, without a restart, that the Gram form does without losing digits that the
// standard form keeps: measured, 10 of them cost singular values of 1e-3 a relative 2e-4.
constexpr int64_t kMaxGramRun = 3;

// The Gram form's many small products run less evenly than their flops say: it must win by a tenth.
bool GramPays(const PolarPlan& plan, const std::vector<int64_t>& restarts) {
  const double aspect = static_cast<double>(plan.n) / static_cast<double>(plan.m);
  const double steps = static_cast<double>(plan.coefficients.size());
  const int64_t last_run =
      static_cast<int64_t>(plan.coefficients.size()) - (restarts.empty() ? 0 : restarts.back());
  return plan.m >= kMinShortSide && last_run <= kMaxGramRun &&
         GramCost(aspect, steps, static_cast<double>(restarts.size())) <
             0.9 * StandardCost(aspect, steps);
}

GemmArgs Product(const MatrixView& a, const MatrixView& b, const MatrixView& c, bool symmetric) {
  GemmArgs args;
  args.a = a;
  args.b = b;
  args.c = c;
  args.symmetric = symmetric;
  return args;
}

// C = alpha A B + beta D
GemmArgs Product(const MatrixView& a, const MatrixView& b, double alpha, double beta,
                 const MatrixView& d, const MatrixView& c, bool symmetric) {
  GemmArgs args = Product(a, b, c, symmetric);
  args.d = d;
  args.alpha = static_cast<float>(alpha);
  args.beta = static_cast<float>(beta);
  return args;
}

// C = X X^T
GemmArgs GramOf(const MatrixView& x, const MatrixView& c) {
  GemmArgs args = Product(x, x, c, /*symmetric=*/true);
  args.transpose_b = true;
  return args;
}

// A = X X^T;  B = b A + c A^2;  X <- a X + B X
MatrixView Standard(Stream* stream, const PolarPlan& plan, MatrixView x, MatrixView spare,
                    MatrixView* squares) {
  const MatrixView &gram = squares[0], &poly = squares[1];
  for (const Coefficients& k : plan.coefficients) {
    stream->Gemm(GramOf(x, gram));
    stream->Gemm(Product(gram, gram, k.c, k.b, gram, poly, true));
    stream->Gemm(Product(poly, x, 1, k.a, x, spare, false));
    std::swap(x, spare);
  }
  return x;
}

// R = X X^T, Q = I; at a restart X <- Q X and again. Z = b R + c R^2;  Q <- Q Z + a Q;  R <- (Z +
// a) R (Z + a). All of R, Z and Q are polynomials of the same R, so every product is symmetric.
MatrixView Gram(Stream* stream, const PolarPlan& plan, MatrixView x, MatrixView spare,
                MatrixView* squares) {
  MatrixView r = squares[0], z = squares[1], rz = squares[2], q = squares[3], next_q = squares[4];
  bool q_is_identity = true;
  const auto restarts_at = [&](int64_t t) {
    return std::find(plan.restarts.begin(), plan.restarts.end(), t) != plan.restarts.end();
  };
  stream->Gemm(GramOf(x, r));
  const int64_t steps = static_cast<int64_t>(plan.coefficients.size());
  for (int64_t t = 0; t < steps; ++t) {
    if (t > 0 && restarts_at(t)) {
      stream->Gemm(Product(q, x, spare, false));
      std::swap(x, spare);
      stream->Gemm(GramOf(x, r));
      q_is_identity = true;
    }
    const Coefficients& k = plan.coefficients[t];
    stream->Gemm(Product(r, r, k.c, k.b, r, z, true));
    if (q_is_identity) {
      stream->AddDiagonal(z, static_cast<float>(k.a), q);
    } else {
      stream->Gemm(Product(q, z, 1, k.a, q, next_q, true));
      std::swap(q, next_q);
    }
    q_is_identity = false;
    if (t + 1 < steps && !restarts_at(t + 1)) {
      stream->Gemm(Product(r, z, 1, k.a, r, rz, true));
      stream->Gemm(Product(z, rz, 1, k.a, rz, r, true));
    }
  }
  stream->Gemm(Product(q, x, spare, false));
  return spare;
}

}  // namespace

absl::StatusOr<PolarPlan> MakePolarPlan(const Rule& rule, int64_t rows, int64_t cols,
                                        const DeviceInfo& device) {
  PolarPlan plan;
  plan.coefficients = PolarCoefficients(rule);
  plan.m = std::min(rows, cols);
  plan.n = std::max(rows, cols);
  if (rule.compute == ComputeType::kBf16 && !device.has_bf16) {
    return absl::InvalidArgumentError(absl::StrCat("compute=bf16: this ", device.kind, " (",
                                                   device.instruction_set,
                                                   ") has no bf16 products"));
  }
  const bool bf16 =
      rule.compute == ComputeType::kBf16 ||
      (rule.compute == ComputeType::kAuto && device.fast_bf16 && plan.m >= kMinShortSide);
  plan.compute = bf16 ? DType::kBf16 : DType::kFp32;
  const std::vector<int64_t> restarts = GramRestarts(rule, bf16);
  plan.gram =
      rule.form == PolarForm::kGram || (rule.form == PolarForm::kAuto && GramPays(plan, restarts));
  if (plan.gram) plan.restarts = restarts;
  return plan;
}

int64_t PolarWorkspaceBytes(const PolarPlan& plan) {
  return (plan.gram ? kGramSquares : kStandardSquares) * SquareBytes(plan);
}

MatrixView EnqueuePolar(Stream* stream, const PolarPlan& plan, MatrixView x, MatrixView spare,
                        void* workspace) {
  MatrixView squares[kGramSquares];
  for (int i = 0; i < (plan.gram ? kGramSquares : kStandardSquares); ++i) {
    squares[i] = {static_cast<char*>(workspace) + i * SquareBytes(plan), plan.compute, plan.m,
                  plan.m, 1};
  }
  return plan.gram ? Gram(stream, plan, x, spare, squares)
                   : Standard(stream, plan, x, spare, squares);
}

std::string DescribePolar(const PolarPlan& plan) {
  return absl::StrCat("newton-schulz ", plan.gram ? "gram " : "standard ",
                      std::string(DTypeName(plan.compute)));
}

}  // namespace stiefel
