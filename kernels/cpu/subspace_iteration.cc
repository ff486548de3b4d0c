#include "kernels/cpu/subspace_iteration.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "common/status.h"
#include "kernels/cpu/blocks.h"
#include "kernels/cpu/gemm.h"
#include "kernels/cpu/row_gram.h"
#include "kernels/cpu/segment_kernels.h"
#include "kernels/cpu/symmetric_eigen.h"

namespace stiefel {
namespace {

// The residual to reach, beside lambda_1; and how much better than the best so far a round must be
// for the iteration to be getting anywhere: rounding of large matrices may stop it before the goal.
constexpr double kGoal = 1e-6, kProgress = 0.7;
constexpr int kMaxRounds = 40, kMaxIdleRounds = 2;

// A filter grows the first direction at most this much more than the last one wanted, so that the
// last keeps its digits beside it.
constexpr double kMaxSpread = 1e4;
constexpr int kMaxDegree = 16;

// A filter is meant to end this much below the goal: it is a little weaker than lambda, which is
// not exact either, says.
constexpr double kMargin = 4;

// A basis vector of which the others leave less than this is rounding.
constexpr double kDependent = 1e-6;

// Beyond these exponents products of U in fp32 would overflow or lose digits.
constexpr int kMaxExponent = 90;

class SubspaceIteration {
 public:
  SubspaceIteration(ThreadPool* pool, const LeadingPairsPass& pass, int exponent);

  absl::Status Run();
  RitzPairs Pairs() const { return {y_, z_}; }

 private:
  void Start();
  void FillRandom(int64_t vector, uint64_t seed);
  void Orthonormalise();
  void ReplaceDependent(int64_t vector);
  absl::Status RayleighRitz();
  absl::Status Rotate(float* in, int64_t size, float* out);
  // w = X X^T y, by way of `image` = X^T y where that is not known yet.
  absl::Status Image(float* y, float* image);
  absl::Status Preimage(float* image, float* w);
  absl::Status Multiply(float* in, bool along_rows, float* out);
  double Residual() const;
  int Degree(double residual) const;
  absl::Status Filter(int degree);

  ThreadPool* const pool_;
  const LeadingPairsPass& pass_;
  const SegmentKernels& kernels_;
  const int64_t m_, n_, count_, size_;  // short side, long side, pairs wanted, vectors
  float operand_factor_ = 1;            // their product is 2^-exponent
  float product_factor_ = 1;

  double *basis_, *gram_, *rotation_, *lambda_;
  float *rotation32_, *y_, *w_, *previous_, *z_, *spare_;
};

SubspaceIteration::SubspaceIteration(ThreadPool* pool, const LeadingPairsPass& pass, int exponent)
    : pool_(pool),
      pass_(pass),
      kernels_(BestSegmentKernels()),
      m_(std::min(pass.rows, pass.cols)),
      n_(std::max(pass.rows, pass.cols)),
      count_(pass.count),
      size_(SubspaceSize(m_, pass.count)) {
  const int half = std::abs(exponent) > kMaxExponent ? exponent / 2 : 0;
  operand_factor_ = std::ldexp(1.0f, -half);
  product_factor_ = std::ldexp(1.0f, half - exponent);
  char* at = static_cast<char*>(pass.scratch);
  const auto take = [&at](int64_t elements, auto* type) {
    auto* piece = reinterpret_cast<decltype(type)>(at);
    at += CeilDiv(elements * static_cast<int64_t>(sizeof(*type)), 64) * 64;
    return piece;
  };
  double* const wide = nullptr;
  float* const narrow = nullptr;
  basis_ = take(size_ * m_, wide);
  gram_ = take(size_ * size_, wide);
  rotation_ = take(size_ * size_, wide);
  lambda_ = take(size_, wide);
  rotation32_ = take(size_ * size_, narrow);
  y_ = take(size_ * m_, narrow);
  w_ = take(size_ * m_, narrow);
  previous_ = take(size_ * m_, narrow);
  z_ = take(size_ * n_, narrow);
  spare_ = take(size_ * n_, narrow);
}

// Evenly distributed, a function of the seed and the vector alone.
void SubspaceIteration::FillRandom(int64_t vector, uint64_t seed) {
  uint64_t state = seed + 0x9E3779B97F4A7C15u * static_cast<uint64_t>(vector + 1);
  for (int64_t j = 0; j < m_; ++j) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    uint64_t bits = state ^ (state >> 33);
    bits *= 0xFF51AFD7ED558CCDu;
    basis_[vector * m_ + j] = static_cast<double>(bits >> 40) / (1 << 24) - 0.5;
  }
}

void SubspaceIteration::Start() {
  for (int64_t i = 0; i < size_; ++i) {
    double* row = basis_ + i * m_;
    if (i < count_) std::copy_n(pass_.start + i * m_, m_, row);
    const double squares = i < count_ ? Dot(row, row, m_) : 0;
    if (!(squares > 0) || !std::isfinite(squares)) FillRandom(i, 1);
  }
}

// A pseudo-random vector orthogonal to those before, which are orthonormal.
void SubspaceIteration::ReplaceDependent(int64_t vector) {
  FillRandom(vector, 2);
  double* row = basis_ + vector * m_;
  for (int pass = 0; pass < 2; ++pass) {
    for (int64_t i = 0; i < vector; ++i) {
      const double* other = basis_ + i * m_;
      const double dot = Dot(other, row, m_);
      for (int64_t j = 0; j < m_; ++j) row[j] -= dot * other[j];
    }
    const double norm = std::sqrt(Dot(row, row, m_));
    for (int64_t j = 0; j < m_; ++j) row[j] /= norm;
  }
}

// Modified Gram-Schmidt, twice, since the first time leaves what rounding of close vectors does.
void SubspaceIteration::Orthonormalise() {
  for (int64_t i = 0; i < size_; ++i) {
    double* row = basis_ + i * m_;
    const double norm = std::sqrt(Dot(row, row, m_));
    for (int64_t j = 0; norm > 0 && j < m_; ++j) row[j] /= norm;
  }
  for (int pass = 0; pass < 2; ++pass) {
    for (int64_t i = 0; i < size_; ++i) {
      double* row = basis_ + i * m_;
      const double norm = std::sqrt(Dot(row, row, m_));
      if (norm > kDependent) {
        for (int64_t j = 0; j < m_; ++j) row[j] /= norm;
      } else {
        ReplaceDependent(i);
      }
      const int64_t rest = size_ - i - 1;
      ForIndices(pool_, rest, 2 * rest * m_, [&](int64_t k) {
        double* other = row + (k + 1) * m_;
        const double dot = Dot(row, other, m_);
        for (int64_t j = 0; j < m_; ++j) other[j] -= dot * row[j];
      });
    }
  }
  std::copy_n(basis_, size_ * m_, y_);
}

absl::Status SubspaceIteration::Multiply(float* in, bool along_rows, float* out) {
  const int64_t inner = along_rows ? pass_.rows : pass_.cols;
  GemmArgs args;
  args.a = {in, DType::kFp32, size_, inner, 1};
  args.b = {const_cast<float*>(pass_.u), DType::kFp32, pass_.rows, pass_.cols, 1};
  args.c = {out, DType::kFp32, size_, along_rows ? pass_.cols : pass_.rows, 1};
  args.transpose_b = !along_rows;
  args.alpha = product_factor_;
  if (operand_factor_ == 1) return CpuGemm(pool_, args);
  kernels_.scale(operand_factor_, in, in, size_ * inner);
  const absl::Status status = CpuGemm(pool_, args);
  kernels_.scale(1 / operand_factor_, in, in, size_ * inner);
  return status;
}

absl::Status SubspaceIteration::Image(float* y, float* image) {
  return Multiply(y, pass_.rows <= pass_.cols, image);
}

absl::Status SubspaceIteration::Preimage(float* image, float* w) {
  return Multiply(image, pass_.rows > pass_.cols, w);
}

absl::Status SubspaceIteration::Rotate(float* in, int64_t size, float* out) {
  GemmArgs args;
  args.a = {rotation32_, DType::kFp32, size_, size_, 1};
  args.b = {in, DType::kFp32, size_, size, 1};
  args.c = {out, DType::kFp32, size_, size, 1};
  return CpuGemm(pool_, args);
}

absl::Status SubspaceIteration::RayleighRitz() {
  STIEFEL_RETURN_IF_ERROR(Image(y_, z_));
  RowGram(pool_, z_, size_, n_, gram_);
  if (!SymmetricEigen(gram_, size_, lambda_, rotation_)) {
    return absl::InternalError("subspace iteration: products of a finite matrix are not finite");
  }
  std::copy_n(rotation_, size_ * size_, rotation32_);
  STIEFEL_RETURN_IF_ERROR(Rotate(y_, m_, w_));
  STIEFEL_RETURN_IF_ERROR(Rotate(z_, n_, spare_));
  std::swap(y_, w_);
  std::swap(z_, spare_);
  return Preimage(z_, w_);
}

// The largest of the wanted pairs. w holds X X^T y.
double SubspaceIteration::Residual() const {
  double largest = 0;
  for (int64_t i = 0; i < count_; ++i) {
    double squares = 0;
    for (int64_t j = i * m_; j < (i + 1) * m_; ++j) {
      const double difference = w_[j] - lambda_[i] * y_[j];
      squares += difference * difference;
    }
    largest = std::max(largest, squares);
  }
  return std::sqrt(largest) / lambda_[0];
}

// Half of the interval [0, last lambda] that the polynomial damps.
double HalfWidth(const double* lambda, int64_t size) {
  return std::max(lambda[size - 1] / 2, 1e-12 * lambda[0]);
}

// The least that reaches the goal from this residual, within the bounds above.
int SubspaceIteration::Degree(double residual) const {
  const double c = HalfWidth(lambda_, size_);
  const double first = std::acosh(std::max(1.0, lambda_[0] / c - 1));
  const double last = std::acosh(std::max(1.0, lambda_[count_ - 1] / c - 1));
  for (int degree = 1; degree < kMaxDegree; ++degree) {
    // The logarithm of cosh(degree first) / cosh(degree last), at the next degree.
    const int next = degree + 1;
    const double spread = next * (first - last) + std::log1p(std::exp(-2 * next * first)) -
                          std::log1p(std::exp(-2 * next * last));
    if (spread > std::log(kMaxSpread)) return degree;
    if (std::cosh(degree * last) * kGoal >= kMargin * residual) return degree;
  }
  return kMaxDegree;
}

// y <- T(X X^T / c - 1) y / T(lambda_1 / c - 1) by the three-term recurrence, w = X X^T y known.
absl::Status SubspaceIteration::Filter(int degree) {
  const double c = HalfWidth(lambda_, size_), first = c / (lambda_[0] - c);
  double ratio = first;
  // next = product_gain X X^T y + gain y + previous_gain previous
  double product_gain = first / c, gain = -first, previous_gain = 0;
  std::fill_n(previous_, size_ * m_, 0.0f);
  for (int i = 0; i < degree; ++i) {
    if (i > 0) {
      STIEFEL_RETURN_IF_ERROR(Image(y_, spare_));
      STIEFEL_RETURN_IF_ERROR(Preimage(spare_, w_));
      const double next = 1 / (2 / first - ratio);
      product_gain = 2 * next / c;
      gain = -2 * next;
      previous_gain = -ratio * next;
      ratio = next;
    }
    const auto p = static_cast<float>(product_gain), g = static_cast<float>(gain),
               q = static_cast<float>(previous_gain);
    ForIndices(pool_, size_, size_ * m_, [&](int64_t row) {
      for (int64_t j = row * m_; j < (row + 1) * m_; ++j) {
        previous_[j] = p * w_[j] + g * y_[j] + q * previous_[j];
      }
    });
    std::swap(y_, previous_);
  }
  std::copy_n(y_, size_ * m_, basis_);
  return absl::OkStatus();
}

absl::Status SubspaceIteration::Run() {
  Start();
  double best = HUGE_VAL;
  for (int round = 0, idle = 0;; ++round) {
    Orthonormalise();
    STIEFEL_RETURN_IF_ERROR(RayleighRitz());
    const double residual = Residual();
    idle = residual > kProgress * best ? idle + 1 : 0;
    best = std::min(best, residual);
    if (residual <= kGoal || idle == kMaxIdleRounds || round == kMaxRounds || size_ == m_) {
      return absl::OkStatus();
    }
    STIEFEL_RETURN_IF_ERROR(Filter(Degree(residual)));
  }
}

}  // namespace

absl::Status IterateSubspace(ThreadPool* pool, const LeadingPairsPass& pass, int exponent,
                             RitzPairs* pairs) {
  SubspaceIteration iteration(pool, pass, exponent);
  const absl::Status status = iteration.Run();
  *pairs = iteration.Pairs();
  return status;
}

}  // namespace stiefel
