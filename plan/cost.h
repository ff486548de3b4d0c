#ifndef STIEFEL_PLAN_COST_H_
#define STIEFEL_PLAN_COST_H_

#include <cstdint>
#include <vector>

#include "plan/matrix.h"
#include "plan/rule.h"

// What a rule costs: floating-point operations and bytes of memory traffic. m is the short side of
// what is orthogonalised at once (matrix, split, selected rows, tile), n the long one, alpha = n /
// m; a multiply-add counts as two operations.
//
// Newton-Schulz, by docs/mathematics.md section 2, with T iterations and r restarts of the Gram
// form, in m^3:
//   form      general products                         symmetric products (half of X X^T and of
//                                                      m x m products)
//   standard  T (4 alpha + 2)                          T (3 alpha + 1)
//   Gram      8 T + 4 alpha - 6 + r (4 alpha - 6)      4 T + 3 alpha - 3 + r 3 (alpha - 1)
// AOL is as dear: it reuses the first Gram matrix.

namespace stiefel {

// Operations of `steps` Newton-Schulz iterations on a rows x cols matrix. REQUIRES: positive sizes,
// steps >= 1, 0 <= restarts < steps, form kStandard or kGram.
double PolarFlops(int64_t rows, int64_t cols, PolarForm form, int64_t steps, int64_t restarts,
                  bool symmetric_products);

// The Gram form's many small products run less evenly than their operations say, and on a short
// side below this there is no time to save.
inline constexpr int64_t kMinGramShortSide = 64;
// Iterations in a row, without a restart, that the Gram form does without losing digits that the
// standard form keeps: measured, 10 of them cost singular values of 1e-3 a relative 2e-4.
inline constexpr int64_t kMaxGramRun = 3;

// How Newton-Schulz runs, and why.
struct FormChoice {
  PolarForm form = PolarForm::kStandard;      // or kGram
  std::vector<int64_t> restarts;              // of the Gram form, also where kStandard is chosen
  double standard_flops = 0, gram_flops = 0;  // symmetric products counted half
  const char* reason = "";                    // for people: "gram saves less than a tenth"
};

// The form in which a spectral rule orthogonalises a rows x cols unit (matrix, split or tile) on
// any device: the one that the rule names; with kAuto kGram where it saves a tenth of the
// operations, the short side is at least kMinGramShortSide and no run without restart is longer
// than kMaxGramRun. low_precision: products in bf16. REQUIRES: a valid spectral rule, positive
// sizes.
FormChoice ChooseForm(const Rule& rule, int64_t rows, int64_t cols, bool low_precision);

// Of the part that the owner of a shard does, n the shard's length along the long side, for which
// the formulas above hold as well where it is less than m: the m x m products are done by every
// owner.
double ShardPolarFlops(int64_t m, int64_t n, PolarForm form, int64_t steps, int64_t restarts);

// What a byte of a collective costs against operations: about what a processor does while its link
// carries one. A constant, since all owners must choose alike.
inline constexpr double kFlopsPerPeerByte = 1024;

// The same for a rows x cols matrix that is cut into shards of which the largest is `longest` long,
// in fp32. With kAuto by operations of the largest shard's owner and the bytes of the sums: every
// Gram matrix that X needs, 1 + restarts or one an iteration, is a sum of m^2 values over the
// owners, twice on the way. Mostly that is the Gram form, unless shards are much shorter than m;
// kStandard also where a run without restart would be longer than kMaxGramRun. The operations in
// the choice are those of one owner.
FormChoice ChooseShardedForm(const Rule& rule, int64_t rows, int64_t cols, int64_t longest);

// Sums of m x m fp32 values over the owners in one refresh of such a matrix: 1 + restarts in the
// Gram form, one for every iteration in the standard form; 0 for rules of other families.
int64_t RefreshSums(const Rule& rule, int64_t rows, int64_t cols, int64_t longest);

// Nominal machine balance with which operations and bytes become one number: a byte moved costs as
// much as this many operations. A constant, because phases must follow from the model alone.
inline constexpr double kFlopsPerByte = 16;
// The same of a collective, whatever its size: its messages and the waiting.
inline constexpr double kFlopsPerCollective = 5e8;

struct Cost {
  double flops = 0;
  double bytes = 0;        // memory traffic
  double peer_bytes = 0;   // sent to the owners of other shards
  double collectives = 0;  // waits for them

  // Comparable cost. An integer below 2^53 for every matrix of practical size, so that sums do not
  // depend on order.
  double Units() const {
    return flops + kFlopsPerByte * bytes + kFlopsPerPeerByte * peer_bytes +
           kFlopsPerCollective * collectives;
  }

  Cost& operator+=(const Cost& other) {
    flops += other.flops;
    bytes += other.bytes;
    peer_bytes += other.peer_bytes;
    collectives += other.collectives;
    return *this;
  }
};

// Operations that a step of this kind spends on matrix products, symmetric ones counted half; 0 for
// a row-wise step and for element-wise rules. The sum over splits, and over the tiles of each
// (those at the edges as small as they are); of a tile schedule the last size counts. With
// selection, of the selected part alone. Shaping adds an estimate of its subspace iteration,
// kSubspaceRounds rounds of 4 k m n + 2 k^2 (m + n), and 4 k m n to apply. polora, on one factor:
// Newton-Schulz, and kPoloraProducts r^2 d for the preconditioners, spectral norms and variance of
// an r x d or d x r factor, and kPoloraSmall r^3 for roots of r x r matrices. REQUIRES: a valid
// rule for the shape.
double ProductFlops(const Rule& rule, int64_t rows, int64_t cols, StepKind kind);

// Subspace iterations from the last refresh's directions to a residual of 1e-6: an estimate.
inline constexpr int64_t kSubspaceRounds = 10;
inline constexpr int64_t kPoloraProducts = 14;
inline constexpr int64_t kPoloraSmall = 60;

// Cost of one step of this kind: ProductFlops and passes over the elements. Every step reads the
// gradient, reads and writes each state buffer and writes the payload, at 8 operations an element;
// what orthogonalises, or selects rows, also writes and reads the direction in fp32; row variance
// reads the update once more; row_spectral_max makes ten passes over it; polora reads and writes
// the weights and reads the gradient twice. A rule without a period costs a refresh at either kind.
//
// Of a shard of a spectral rule's matrix, s shards in all and each on a server of its own: products
// by ShardPolarFlops; besides, every sum of the refresh sends 2 (s-1)/s m^2 fp32 values, a row-wise
// step whose vectors cross the shards one fp64 sum for each vector of the short side and one more,
// and each is one collective, as is the exchange of figures before a refresh.
//
// REQUIRES: a valid rule for the matrix.
Cost StepCost(const PlanMatrix& matrix, StepKind kind);

// Longest cycle of steps that is looked at whole.
inline constexpr int64_t kMaxCycleSteps = 64;

// After how many steps the kinds repeat: the least common multiple of the periods, or
// kMaxCycleSteps where that is larger (then the first kMaxCycleSteps steps stand for the rest). 1
// for an empty list. REQUIRES: periods >= 1.
int64_t CycleSteps(const std::vector<PlanMatrix>& matrices);

}  // namespace stiefel

#endif  // STIEFEL_PLAN_COST_H_
