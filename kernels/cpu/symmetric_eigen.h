#ifndef STIEFEL_KERNELS_CPU_SYMMETRIC_EIGEN_H_
#define STIEFEL_KERNELS_CPU_SYMMETRIC_EIGEN_H_

#include <cstdint>

namespace stiefel {

// <x, y> in fp64, in eight interleaved partial sums: the same bits wherever it is called.
double Dot(const double* x, const double* y, int64_t n);

// The eigen-decomposition of a small symmetric n x n matrix, A = V^T diag(values) V, in fp64:
// Householder tridiagonalisation and the implicit QL iteration, 9 n^3 operations (2 n^3 without
// vectors), on the calling thread. Eigenvalues are accurate to a few eps |A|_2, and so the small
// eigenvalues of a positive semi-definite A may come out slightly negative.
//
// `a`, row-major and symmetric to the bit, is overwritten. `values` receives the eigenvalues,
// descending; `vectors`, where not null, n x n: row i the unit eigenvector of values[i].
// Returns false, with the outputs undefined, where an entry is not finite. REQUIRES: entries
// between 1e-140 and 1e140 in size, or 0.
bool SymmetricEigen(double* a, int64_t n, double* values, double* vectors);

}  // namespace stiefel

#endif  // STIEFEL_KERNELS_CPU_SYMMETRIC_EIGEN_H_
