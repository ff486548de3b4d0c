#ifndef STIEFEL_KERNELS_CPU_SUBSPACE_ITERATION_H_
#define STIEFEL_KERNELS_CPU_SUBSPACE_ITERATION_H_

#include <cstdint>

#include "absl/status/status.h"
#include "kernels/cpu/thread_pool.h"
#include "kernels/spectral_passes.h"

namespace stiefel {

// Pairs found, by descending singular value: vectors along the short side and images X^T y along
// the long side, whose lengths are the singular values up to a common factor.
struct RitzPairs {
  const float* vectors = nullptr;  // unit, count x m
  const float* images = nullptr;   // count x n
};

// The leading pairs of a large U. X = U / 2^exponent, or its transpose, with the short side m as
// rows. In fp32, with what is as small as the subspace in fp64:
//
//   Y <- an orthonormal basis of the subspace's rows
//   Z = Y X;  Z Z^T = V^T diag(lambda) V;  Y <- V Y, Z <- V Z          (Rayleigh-Ritz)
//   stop where every |Z_i X^T - lambda_i Y_i| of the wanted pairs is small beside lambda_1
//   Y <- p(X X^T) Y, p the Chebyshev polynomial that is small below the last lambda
//
// Plain subspace iteration would need hundreds of products where singular values lie as close as
// those of a random matrix; the polynomial needs their square root.
//
// REQUIRES: U finite, not zero, 2^exponent <= max|U| < 2^(exponent + 1). The result lies in
// pass.scratch.
absl::Status IterateSubspace(ThreadPool* pool, const LeadingPairsPass& pass, int exponent,
                             RitzPairs* pairs);

}  // namespace stiefel

#endif  // STIEFEL_KERNELS_CPU_SUBSPACE_ITERATION_H_
