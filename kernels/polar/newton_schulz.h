// The polar map: Newton-Schulz iterations on X (m x n, m <= n), in the standard or the Gram form
// (docs/mathematics.md section 2). Each iteration maps every singular value x of X to a x + b x^3 +
// c x^5.
#ifndef STIEFEL_KERNELS_POLAR_NEWTON_SCHULZ_H_
#define STIEFEL_KERNELS_POLAR_NEWTON_SCHULZ_H_

#include <cstdint>
#include <string>
#include <vector>

#include "kernels/backend.h"
#include "plan/cost.h"
#include "plan/rule.h"

namespace stiefel {

struct PolarPlan {
  std::vector<Coefficients> coefficients;
  FormChoice choice;  // restarts are those of the Gram form
  // AOL: X is U times any factor, and the first Gram matrix preconditions it. Frobenius: |X|_F
  // <= 1.
  Normalise normalise = Normalise::kFrobenius;
  DType compute = DType::kFp32;  // of X and of all products' operands; sums are fp32
  int64_t m = 0, n = 0;          // of X
  // DeviceInfo::fused_polar_bytes where the map runs as one PolarPass; null where it runs as
  // products.
  int64_t (*fused_bytes)(int64_t m, int64_t n, bool gram) = nullptr;

  bool gram() const { return choice.form == PolarForm::kGram; }
};

// What a spectral rule runs on a rows x cols unit (matrix, split or tile). INVALID_ARGUMENT where
// the device cannot do the rule's compute type.
absl::StatusOr<PolarPlan> MakePolarPlan(const Rule& rule, int64_t rows, int64_t cols,
                                        const DeviceInfo& device);

// What a spectral rule runs on a shard of a rows x cols matrix, `length` of `longest` (the largest
// shard) along the long side: fp32 products, for PolarIterations.
PolarPlan MakeShardPolarPlan(const Rule& rule, int64_t rows, int64_t cols, int64_t length,
                             int64_t longest);

// Bytes of workspace beside the two buffers for X. As products, in elements of the compute type:
// 2 m m a unit in the standard form, 5 m m in the Gram form. As one PolarPass, for which a batch is
// always one unit, what the device asks for.
int64_t PolarWorkspaceBytes(const PolarPlan& plan, int64_t batch = 1);

// Enqueues normalisation and iterations of one unit. normalise.x and `spare` are buffers for X in
// the compute type. Returns the result: X's shape, in one of the two. REQUIRES: `workspace` has
// PolarWorkspaceBytes(plan), aligned to 64 bytes.
MatrixView EnqueueNormalisedPolar(Stream* stream, const PolarPlan& plan,
                                  const NormalisePass& normalise, const MatrixView& spare,
                                  void* workspace);

// Enqueues the iterations alone, on every unit of x.batch; a unit gets the bits that it would get
// alone. `x` holds X and is overwritten; `spare` has its shape, batch and dtype. Returns whichever
// of the two holds the result. REQUIRES: a plan that runs as products; `workspace` has
// PolarWorkspaceBytes(plan, x.batch), aligned to 64 bytes.
MatrixView EnqueuePolar(Stream* stream, const PolarPlan& plan, MatrixView x, MatrixView spare,
                        void* workspace);

// The iterations as stages between which the caller sees to the Gram matrix of X, which may be a
// sum over parts of X that live elsewhere (every part then takes the same stages):
//
//   do iterations.EnqueueGram(stream); while (!iterations.Advance(stream, iterations.gram()));
class PolarIterations {
 public:
  // As EnqueuePolar; x.cols are those of the part. REQUIRES: everything outlives the iterations.
  PolarIterations(const PolarPlan& plan, const MatrixView& x, const MatrixView& spare,
                  void* workspace);

  // X as it is now; in the end the result.
  const MatrixView& x() const { return x_; }
  // Where X X^T is formed; free for the caller until it is.
  const MatrixView& gram() const { return squares_[0]; }
  void EnqueueGram(Stream* stream) const;

  // Enqueues all that follows from the Gram matrix of the whole X, which is only read unless it is
  // gram(). Returns whether these were the last iterations; if not it wants the Gram matrix of x().
  bool Advance(Stream* stream, const MatrixView& whole);

  // Enqueues |O O^T - I|_F / sqrt(m) of the whole result O, from m x m matrices alone: fp32 only.
  // REQUIRES: the last Advance returned true and what it was given is unchanged.
  void EnqueueResidual(Stream* stream, StepStats* stats) const;

 private:
  bool RestartsAt(int64_t t) const;
  MatrixView Precondition(Stream* stream, const MatrixView& whole) const;
  void Standard(Stream* stream, const MatrixView& gram);
  void Gram(Stream* stream, MatrixView r);

  static constexpr int kSquares = 5;

  const PolarPlan& plan_;
  MatrixView x_, spare_;
  MatrixView squares_[kSquares];
  int64_t next_ = 0;  // iteration
  MatrixView last_;   // the Gram matrix before the last iteration
};

// How many Gram matrices of X the iterations take.
int64_t PolarGrams(const PolarPlan& plan);

// "newton-schulz gram fp32"
std::string DescribePolar(const PolarPlan& plan);

// The same with the shape, the operations of both forms and the reason for the choice, one line.
std::string ExplainPolar(const PolarPlan& plan);

}  // namespace stiefel

#endif  // STIEFEL_KERNELS_POLAR_NEWTON_SCHULZ_H_
