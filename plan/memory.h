#ifndef STIEFEL_PLAN_MEMORY_H_
#define STIEFEL_PLAN_MEMORY_H_

#include <cstdint>
#include <set>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "plan/matrix.h"

// The bytes that a server needs, as DESIGN.md sections 4 and 5 bound them:
//   state + staging + declared push bytes + one step of payloads + workspace of the matrices in
//   flight + what shards hold + ranks x window
// One formula for the planner and for a server's own admission check.

namespace stiefel {

// Where a step's new state waits for the decision.
enum class Staging {
  kDouble,  // Beside the old, in memory of its own: one pass, +4 bytes per element and state
            // buffer.
  kLazy,    // Nowhere: the gradient is kept and taken in after commit. No extra memory, one more
            // pass.
};

absl::string_view StagingName(Staging staging);                // "double", "lazy"
absl::StatusOr<Staging> ParseStaging(absl::string_view name);  // INVALID_ARGUMENT for any other.

struct MemoryOptions {
  Staging staging = Staging::kDouble;
  bool weights_mode = false;       // The server keeps fp32 weights and sends them, not deltas.
  int64_t matrices_in_flight = 1;  // How many the engine works on at once.
  int64_t ranks = 0;               // Trainers that may have gradients under way.
  int64_t window_bytes = 0;        // Credit window of each, whatever the number of its streams.
};

// Of one matrix, in bytes.
struct MatrixBytes {
  int64_t state = 0;    // fp32 buffers of the rule.
  int64_t staged = 0;   // The same again; with Staging::kLazy only the small buffers.
  int64_t weights = 0;  // WEIGHTS mode: fp32 weights and the staged ones.
  int64_t push = 0;     // All blocks that trainers declared, in the wire dtype.
  int64_t pull =
      0;  // Payload of one step in the wire dtype; staged fp32 weights are sent as they are.
  int64_t workspace = 0;  // Only while the engine works on the matrix.
  int64_t held = 0;       // A shard's own workspace: see ShardWorkspaceBytes.

  int64_t Resident() const { return state + staged + weights + push + pull + held; }
};

// Bytes that the engine needs beside the matrix's own while it works on it, at most; the largest
// int64 where they do not fit one. For a spectral rule on a rows x cols matrix, in multiples of the
// matrix in fp32, m its short side and n its long one:
//
//   refresh            1 for the direction; and 1 + 5 m / n, the iterate and the five m x m
//   products
//                      of the Gram form (the standard form has two), or 3 + 4 m / n where a
//                      device's own bf16 kernels may run: less than kMaxRefreshMatrices in all
//   with selection     1, and as a refresh of the selected part without the direction
//   shaping            and (k (m + n) + b (5 m + 2 n + 5 b)) / (m n), with k directions and b = 1.5
//   k
//                      + 8, at most m, vectors in the subspace
//   tiles              1, and a refresh of the largest tile, or of a quarter of the whole tiles, up
//                      to 16, where there are more than four
//   row-wise step      1, and up to 17 rows of fp64 sums; 1 more with selection
//
// The largest of these that the rule may run; splits one after the other, or up to 16 at once while
// each needs no more than 2 MiB; figures of 2 KiB and 24 bytes a row and column, 128 bytes a tile
// or split. polora: 9 times the factor and twice the other factor, of `partner_elements`, and r x r
// matrices. Other rules: figures alone. REQUIRES: a valid rule for the shape.
int64_t WorkspaceBytes(const Rule& rule, int64_t rows, int64_t cols, int64_t partner_elements = 0);

// Peak extra memory of a refresh of a whole matrix without shaping whose short side is at least
// 512, in multiples of the matrix in fp32, figures and padding included.
inline constexpr int64_t kMaxRefreshMatrices = 9;

// Bytes that a rows x cols shard, one of `shards`, of a spectral rule's matrix holds from the first
// stage of a step to the last, at most: the direction and the iterate of the shard in fp32; seven
// m x m fp32 matrices, m the short side of the whole matrix, for the Gram matrix, the small
// products and what is received from other shards; figures of 2 KiB, 128 bytes a shard and 24 bytes
// a row and column. It is the shard's own memory, counted as resident, because a stage waits for
// other servers and must find it as it was. The largest int64 where that does not fit one.
int64_t ShardWorkspaceBytes(int64_t rows, int64_t cols, int64_t whole_rows, int64_t whole_cols,
                            int64_t shards);

// Of a shard (PlanMatrix::IsShard) in its own sizes: a spectral rule's has `held` and no workspace.
// `declared_push_elements`: elements of all blocks that will be pushed to this matrix in a step,
// over all ranks; rows x cols where each element is pushed once. INVALID_ARGUMENT, with the sizes,
// where they are not positive or any of the bytes do not fit int64.
absl::StatusOr<MatrixBytes> BytesOfMatrix(const PlanMatrix& matrix, int64_t declared_push_elements,
                                          const MemoryOptions& options);

// Adds up the matrices of one server. Sums that would pass int64 are refused by Fits and stay at
// its largest value otherwise, so a limit is never met by wrapping round. Copyable.
class MemoryTally {
 public:
  explicit MemoryTally(const MemoryOptions& options);

  void Add(const MatrixBytes& matrix);
  // REQUIRES: the same was added before.
  void Remove(const MatrixBytes& matrix);

  // Whether Total() stays within limit_bytes with this matrix added.
  bool Fits(const MatrixBytes& matrix, int64_t limit_bytes) const;

  // Everything in the formula above.
  int64_t Total() const;
  // Total() with neither workspace nor streams.
  int64_t Resident() const { return resident_; }
  // The sum over the matrices, of each part; workspace is that of the largest matrices_in_flight.
  MatrixBytes Parts() const;
  int64_t StreamBytes() const { return stream_bytes_; }

 private:
  int64_t WorkspaceOfLargest() const;

  int64_t in_flight_;
  int64_t stream_bytes_;
  MatrixBytes sums_;  // Without workspace.
  int64_t resident_ = 0;
  std::multiset<int64_t> workspace_;
};

}  // namespace stiefel

#endif  // STIEFEL_PLAN_MEMORY_H_
