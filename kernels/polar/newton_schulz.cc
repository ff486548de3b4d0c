#include "kernels/polar/newton_schulz.h"

#include <algorithm>
#include <cassert>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "common/status.h"

namespace stiefel {
namespace {

// Below this short side bf16 has no accuracy to offer.
constexpr int64_t kMinBf16ShortSide = 64;
constexpr int kStandardSquares = 2, kGramSquares = 5;

int64_t SquareBytes(const PolarPlan& plan, int64_t batch) {
  return (batch * plan.m * plan.m * DTypeSize(plan.compute) + 63) / 64 * 64;
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

absl::StatusOr<DType> ComputeOf(const Rule& rule, int64_t short_side, const DeviceInfo& device) {
  const auto lacks = [&device](const char* type) {
    return absl::InvalidArgumentError(absl::StrCat(
        "compute=", type, ": this ", device.kind, " (", device.instruction_set, ") has no ", type,
        " products; it has fp32", device.has_bf16 ? " and bf16" : ""));
  };
  switch (rule.compute) {
    case ComputeType::kAuto:
      return device.fast_bf16 && short_side >= kMinBf16ShortSide ? DType::kBf16 : DType::kFp32;
    case ComputeType::kBf16:
      if (!device.has_bf16) return lacks("bf16");
      return DType::kBf16;
    case ComputeType::kFp16:
      return lacks("fp16");
    case ComputeType::kTf32:
      return lacks("tf32");
    case ComputeType::kFp32:
      break;
  }
  return DType::kFp32;
}

}  // namespace

absl::StatusOr<PolarPlan> MakePolarPlan(const Rule& rule, int64_t rows, int64_t cols,
                                        const DeviceInfo& device) {
  PolarPlan plan;
  plan.coefficients = PolarCoefficients(rule);
  plan.normalise = rule.normalise;
  plan.m = std::min(rows, cols);
  plan.n = std::max(rows, cols);
  STIEFEL_ASSIGN_OR_RETURN(plan.compute, ComputeOf(rule, plan.m, device));
  plan.choice = ChooseForm(rule, rows, cols, /*low_precision=*/plan.compute == DType::kBf16);
  if (plan.compute == DType::kBf16) plan.fused_bytes = device.fused_polar_bytes;
  return plan;
}

PolarPlan MakeShardPolarPlan(const Rule& rule, int64_t rows, int64_t cols, int64_t length,
                             int64_t longest) {
  PolarPlan plan;
  plan.coefficients = PolarCoefficients(rule);
  plan.choice = ChooseShardedForm(rule, rows, cols, longest);
  plan.normalise = rule.normalise;
  plan.m = std::min(rows, cols);
  plan.n = length;
  return plan;
}

int64_t PolarWorkspaceBytes(const PolarPlan& plan, int64_t batch) {
  if (plan.fused_bytes != nullptr) return plan.fused_bytes(plan.m, plan.n, plan.gram());
  return (plan.gram() ? kGramSquares : kStandardSquares) * SquareBytes(plan, batch);
}

MatrixView EnqueueNormalisedPolar(Stream* stream, const PolarPlan& plan,
                                  const NormalisePass& normalise, const MatrixView& spare,
                                  void* workspace) {
  if (plan.fused_bytes == nullptr) {
    stream->Run(normalise);
    return EnqueuePolar(stream, plan, normalise.x, spare, workspace);
  }
  PolarPass pass;
  pass.normalise = normalise;
  pass.coefficients = plan.coefficients;
  pass.gram = plan.gram();
  if (plan.gram()) pass.restarts = plan.choice.restarts;
  pass.aol = plan.normalise == Normalise::kAol;
  pass.workspace = workspace;
  stream->Run(pass);
  return normalise.x;
}

MatrixView EnqueuePolar(Stream* stream, const PolarPlan& plan, MatrixView x, MatrixView spare,
                        void* workspace) {
  assert(plan.fused_bytes == nullptr);
  PolarIterations iterations(plan, x, spare, workspace);
  do iterations.EnqueueGram(stream);
  while (!iterations.Advance(stream, iterations.gram()));
  return iterations.x();
}

PolarIterations::PolarIterations(const PolarPlan& plan, const MatrixView& x,
                                 const MatrixView& spare, void* workspace)
    : plan_(plan), x_(x), spare_(spare) {
  static_assert(kSquares == kGramSquares);
  for (int i = 0; i < (plan.gram() ? kGramSquares : kStandardSquares); ++i) {
    squares_[i] = {static_cast<char*>(workspace) + i * SquareBytes(plan, x.batch), plan.compute,
                   plan.m, plan.m, x.batch};
  }
}

void PolarIterations::EnqueueGram(Stream* stream) const {
  GemmArgs args = Product(x_, x_, gram(), /*symmetric=*/true);
  args.transpose_b = true;
  stream->Gemm(args);
}

bool PolarIterations::Advance(Stream* stream, const MatrixView& whole) {
  const MatrixView r =
      next_ == 0 && plan_.normalise == Normalise::kAol ? Precondition(stream, whole) : whole;
  if (plan_.gram()) {
    Gram(stream, r);
  } else {
    Standard(stream, r);
  }
  return next_ == static_cast<int64_t>(plan_.coefficients.size());
}

// AOL, in place.
MatrixView PolarIterations::Precondition(Stream* stream, const MatrixView& whole) const {
  if (whole.data != gram().data) stream->Convert(whole, gram());
  stream->Run(AolPass{gram(), x_});
  return gram();
}

// One iteration: A = X X^T;  B = b A + c A^2;  X <- a X + B X
void PolarIterations::Standard(Stream* stream, const MatrixView& gram) {
  const MatrixView& poly = squares_[1];
  const Coefficients& k = plan_.coefficients[next_++];
  stream->Gemm(Product(gram, gram, k.c, k.b, gram, poly, true));
  stream->Gemm(Product(poly, x_, 1, k.a, x_, spare_, false));
  std::swap(x_, spare_);
  last_ = gram;
}

bool PolarIterations::RestartsAt(int64_t t) const {
  const std::vector<int64_t>& restarts = plan_.choice.restarts;
  return std::find(restarts.begin(), restarts.end(), t) != restarts.end();
}

// R = X X^T, Q = I; until a restart or the end Z = b R + c R^2;  Q <- Q Z + a Q;  R <- (Z + a) R (Z
// + a); then X <- Q X. All of R, Z and Q are polynomials of the same R, so every product is
// symmetric.
void PolarIterations::Gram(Stream* stream, MatrixView r) {
  const MatrixView &next_r = squares_[0], &z = squares_[1], &rz = squares_[2];
  MatrixView q = squares_[3], next_q = squares_[4];
  const auto steps = static_cast<int64_t>(plan_.coefficients.size());
  for (bool q_is_identity = true;; q_is_identity = false) {
    const Coefficients& k = plan_.coefficients[next_++];
    stream->Gemm(Product(r, r, k.c, k.b, r, z, true));
    if (q_is_identity) {
      stream->AddDiagonal(z, static_cast<float>(k.a), q);
    } else {
      stream->Gemm(Product(q, z, 1, k.a, q, next_q, true));
      std::swap(q, next_q);
    }
    if (next_ == steps || RestartsAt(next_)) break;
    stream->Gemm(Product(r, z, 1, k.a, r, rz, true));
    stream->Gemm(Product(z, rz, 1, k.a, rz, next_r, true));
    r = next_r;
  }
  stream->Gemm(Product(q, x_, spare_, false));
  std::swap(x_, spare_);
  last_ = r;
}

// The last iteration multiplied X by Z + a, so that O O^T = (Z + a) R (Z + a).
void PolarIterations::EnqueueResidual(Stream* stream, StepStats* stats) const {
  const MatrixView& z = squares_[1];
  stream->AddDiagonal(z, static_cast<float>(plan_.coefficients.back().a), z);
  stream->Residual(last_, z, stats);
}

int64_t PolarGrams(const PolarPlan& plan) {
  return static_cast<int64_t>(plan.gram() ? 1 + plan.choice.restarts.size()
                                          : plan.coefficients.size());
}

std::string DescribePolar(const PolarPlan& plan) {
  return absl::StrCat("newton-schulz ", plan.gram() ? "gram " : "standard ",
                      std::string(DTypeName(plan.compute)));
}

std::string ExplainPolar(const PolarPlan& plan) {
  const std::string restarts =
      plan.gram() && !plan.choice.restarts.empty()
          ? absl::StrCat(" restarts ", absl::StrJoin(plan.choice.restarts, ","))
          : "";
  return absl::StrFormat(
      "%d x %d: %s%s%s, %d iterations; Gflop standard %.4g, gram %.4g; %s", plan.m, plan.n,
      DescribePolar(plan), restarts, plan.fused_bytes == nullptr ? "" : ", fused kernels",
      static_cast<int64_t>(plan.coefficients.size()), plan.choice.standard_flops * 1e-9,
      plan.choice.gram_flops * 1e-9, plan.choice.reason);
}

}  // namespace stiefel
