#include "plan/memory.h"

#include <algorithm>
#include <iterator>
#include <limits>

#include "absl/strings/str_cat.h"
#include "common/checked_math.h"
#include "common/errors.h"

namespace stiefel {
namespace {

constexpr int64_t kFp32Bytes = 4;
constexpr int64_t kFp64Bytes = 8;
constexpr int64_t kFigureBytes = 1024;
constexpr int64_t kRowWiseBlocks = 16;
constexpr int64_t kMaxBytes = std::numeric_limits<int64_t>::max();

}  // namespace

absl::string_view StagingName(Staging staging) {
  return staging == Staging::kDouble ? "double" : "lazy";
}

absl::StatusOr<Staging> ParseStaging(absl::string_view name) {
  for (Staging staging : {Staging::kDouble, Staging::kLazy}) {
    if (name == StagingName(staging)) return staging;
  }
  return absl::InvalidArgumentError(
      absl::StrCat("staging '", name, "' is not known: it is double or lazy"));
}

int64_t WorkspaceBytes(const Rule& rule, int64_t rows, int64_t cols) {
  if (rule.family != RuleFamily::kSpectral) return kFigureBytes;
  const int64_t m = std::min(rows, cols);
  const int64_t refresh = kFp32Bytes * (rows * cols + 5 * m * m);
  const int64_t row_wise = kFp64Bytes * (1 + std::min(rows, kRowWiseBlocks)) * cols;
  return kFigureBytes + kFp32Bytes * rows * cols + std::max(refresh, row_wise);
}

absl::StatusOr<MatrixBytes> BytesOfMatrix(const PlanMatrix& matrix, int64_t declared_push_elements,
                                          const MemoryOptions& options) {
  int64_t elements = 0, bound = 0;
  MatrixBytes bytes;
  // The parts add up to less than 28 (workspace) + 8 per state buffer + 16 bytes an element, and no
  // rule has more than five buffers.
  if (!CheckedMatrixBytes(matrix.rows, matrix.cols, 1, &elements) ||
      !CheckedMul(elements, 84, &bound) ||
      !CheckedMul(declared_push_elements, DTypeSize(matrix.push_dtype), &bytes.push) ||
      !CheckedAdd(bound, kFigureBytes, &bound) || !CheckedAdd(bound, bytes.push, &bound)) {
    return BadShape(matrix.name, matrix.rows, matrix.cols);
  }
  for (const StateBuffer& buffer : RuleState(matrix.rule, matrix.rows, matrix.cols)) {
    const int64_t size = buffer.rows * buffer.cols * kFp32Bytes;
    bytes.state += size;
    if (options.staging == Staging::kDouble || !buffer.elementwise) bytes.staged += size;
  }
  if (options.weights_mode) bytes.weights = 2 * elements * kFp32Bytes;
  const bool sends_staged_weights = options.weights_mode && matrix.pull_dtype == DType::kFp32;
  bytes.pull = sends_staged_weights ? 0 : elements * DTypeSize(matrix.pull_dtype);
  bytes.workspace = WorkspaceBytes(matrix.rule, matrix.rows, matrix.cols);
  return bytes;
}

MemoryTally::MemoryTally(const MemoryOptions& options)
    : in_flight_(options.matrices_in_flight),
      stream_bytes_(SaturatingMul(options.streams, options.window_bytes)) {}

void MemoryTally::Add(const MatrixBytes& matrix) {
  sums_.state = SaturatingAdd(sums_.state, matrix.state);
  sums_.staged = SaturatingAdd(sums_.staged, matrix.staged);
  sums_.weights = SaturatingAdd(sums_.weights, matrix.weights);
  sums_.push = SaturatingAdd(sums_.push, matrix.push);
  sums_.pull = SaturatingAdd(sums_.pull, matrix.pull);
  workspace_.insert(matrix.workspace);
}

void MemoryTally::Remove(const MatrixBytes& matrix) {
  sums_.state -= matrix.state;
  sums_.staged -= matrix.staged;
  sums_.weights -= matrix.weights;
  sums_.push -= matrix.push;
  sums_.pull -= matrix.pull;
  workspace_.erase(workspace_.find(matrix.workspace));
}

bool MemoryTally::Fits(const MatrixBytes& matrix, int64_t limit_bytes) const {
  int64_t total = SaturatingAdd(Total(), matrix.Resident());
  // What the matrix adds to the largest in flight: its workspace, less the one that it pushes out.
  int64_t displaced = 0;
  if (static_cast<int64_t>(workspace_.size()) >= in_flight_ && in_flight_ > 0) {
    displaced = *std::prev(workspace_.end(), in_flight_);
  }
  if (in_flight_ > 0 && matrix.workspace > displaced) {
    total = SaturatingAdd(total, matrix.workspace - displaced);
  }
  return total < kMaxBytes && total <= limit_bytes;
}

int64_t MemoryTally::Total() const {
  int64_t total = stream_bytes_;
  for (int64_t part :
       {sums_.state, sums_.staged, sums_.weights, sums_.push, sums_.pull, WorkspaceOfLargest()}) {
    total = SaturatingAdd(total, part);
  }
  return total;
}

MatrixBytes MemoryTally::Parts() const {
  MatrixBytes parts = sums_;
  parts.workspace = WorkspaceOfLargest();
  return parts;
}

int64_t MemoryTally::WorkspaceOfLargest() const {
  int64_t sum = 0, counted = 0;
  for (auto it = workspace_.rbegin(); it != workspace_.rend() && counted < in_flight_;
       ++it, ++counted) {
    sum = SaturatingAdd(sum, *it);
  }
  return sum;
}

}  // namespace stiefel
