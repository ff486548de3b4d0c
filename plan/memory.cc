#include "plan/memory.h"

#include <algorithm>
#include <iterator>
#include <limits>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/checked_math.h"
#include "common/errors.h"

namespace stiefel {
namespace {

constexpr int64_t kFp32Bytes = 4;
constexpr int64_t kFp64Bytes = 8;
constexpr int64_t kFigureBytes = 2048;     // of a matrix or split, with what alignment takes
constexpr int64_t kVectorBytes = 24;       // of a row and a column: norms, places, factors
constexpr int64_t kTileFigureBytes = 128;  // of a tile or shard
constexpr int64_t kShardSquares = 7;       // m x m matrices of a shard, as memory.h counts them
constexpr int64_t kRowWiseBlocks = 16;
constexpr int64_t kMaxLanes = 16;           // splits under way at once, where they are small:
constexpr int64_t kMaxLaneBytes = 2 << 20;  // with no more workspace than this
constexpr int64_t kMaxBytes = std::numeric_limits<int64_t>::max();

// Bytes as sums and products that stay at the largest int64 instead of wrapping round.
class Bytes {
 public:
  Bytes(int64_t value) : value_(value) {}  // NOLINT: numbers are bytes
  Bytes operator+(Bytes other) const { return SaturatingAdd(value_, other.value_); }
  Bytes operator*(Bytes other) const { return SaturatingMul(value_, other.value_); }
  bool operator<(Bytes other) const { return value_ < other.value_; }
  int64_t value() const { return value_; }

 private:
  int64_t value_;
};

// The iterate and what the iterations need beside it and the direction: products in fp32, or a
// device's own kernels in bf16, whose operands are padded to multiples of 32.
Bytes PolarBytes(const Rule& rule, int64_t rows, int64_t cols) {
  const int64_t m = std::min(rows, cols), n = std::max(rows, cols);
  const Bytes elements = Bytes(m) * n;
  const Bytes products = elements * kFp32Bytes + Bytes(m) * m * (5 * kFp32Bytes);
  if (rule.compute != ComputeType::kAuto && rule.compute != ComputeType::kBf16) return products;
  const int64_t padded_m = (m + 31) / 32 * 32, padded_n = (n + 31) / 32 * 32;
  const Bytes own = elements * 4 + Bytes(padded_m) * padded_n * 8 +
                    Bytes(padded_m) * padded_m * 16 + Bytes(padded_m) * 8;
  return std::max(products, own);
}

Bytes ShapingBytes(const Rule& rule, int64_t rows, int64_t cols) {
  const int64_t m = std::min(rows, cols), n = std::max(rows, cols);
  const int64_t k = ShapedDirections(rule, m);
  const int64_t some_more = k + k / 2 + 8;
  const Bytes b = m <= 64 || 2 * some_more > m ? m : some_more;  // vectors of the subspace
  return Bytes(k) * (Bytes(m) + n) * kFp32Bytes + b * (Bytes(5) * m + Bytes(2) * n + b * 5) * 4 +
         b * kFp64Bytes;
}

Bytes TileBytes(const Rule& rule, int64_t rows, int64_t cols, int64_t tile) {
  const int64_t tile_rows = std::min(rows, tile), tile_cols = std::min(cols, tile);
  const Bytes down = (rows + tile_rows - 1) / tile_rows,
              across = (cols + tile_cols - 1) / tile_cols;
  const Bytes each = Bytes(tile_rows) * tile_cols * kFp32Bytes +
                     PolarBytes(rule, tile_rows, tile_cols) + kFigureBytes / 2;
  const int64_t lanes =
      std::clamp<int64_t>(SaturatingMul(rows / tile_rows, cols / tile_cols) / 4, 1, kMaxLanes);
  return down * across * kTileFigureBytes + each * lanes;
}

// Of a spectral rule on one split.
Bytes SplitBytes(const Rule& rule, int64_t rows, int64_t cols) {
  const bool columns = SelectsColumns(rule, rows, cols);
  const int64_t unit_rows = columns ? rows : SelectedVectors(rule, rows);
  const int64_t unit_cols = columns ? SelectedVectors(rule, cols) : cols;
  Bytes work = PolarBytes(rule, unit_rows, unit_cols);
  if (rule.gain != 1) work = work + ShapingBytes(rule, rows, cols);
  const Bytes row_wise = Bytes(1 + std::min(unit_rows, kRowWiseBlocks)) * unit_cols * kFp64Bytes +
                         Bytes(unit_rows) * unit_cols * kFp32Bytes;
  work = std::max(work, row_wise);
  for (const TileFrom& from : rule.tiles) {
    if (from.tile > 0 && Bytes(from.tile) * from.tile < Bytes(rows) * cols) {
      work = std::max(work, TileBytes(rule, rows, cols, from.tile));
    }
  }
  const Bytes direction = Bytes(rows) * cols * kFp32Bytes;
  return Bytes(kFigureBytes) + (Bytes(rows) + cols) * kVectorBytes + direction + work;
}

Bytes SpectralBytes(const Rule& rule, int64_t rows, int64_t cols) {
  const std::vector<int64_t> splits = SplitRows(rule, rows);
  Bytes largest = 0;
  for (int64_t split : splits) largest = std::max(largest, SplitBytes(rule, split, cols));
  if (splits.size() == 1) return largest;
  const Bytes lanes = std::min<int64_t>(kMaxLanes, static_cast<int64_t>(splits.size()));
  return Bytes(kFigureBytes) + Bytes(static_cast<int64_t>(splits.size())) * kTileFigureBytes +
         std::max(largest, lanes * std::min(largest, Bytes(kMaxLaneBytes)));
}

// Both factors once or twice in fp32 along the way, and r x r matrices in fp64.
Bytes PoloraBytes(const Rule& rule, int64_t rows, int64_t cols, int64_t partner_elements) {
  const int64_t r = RankOf(rule, rows, cols);
  return Bytes(kFigureBytes) + Bytes(rows) * cols * (6 * kFp32Bytes) +
         Bytes(partner_elements) * (2 * kFp32Bytes) + Bytes(r) * r * (8 * kFp64Bytes) +
         PolarBytes(rule, rows, cols);
}

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

int64_t WorkspaceBytes(const Rule& rule, int64_t rows, int64_t cols, int64_t partner_elements) {
  switch (rule.family) {
    case RuleFamily::kSpectral:
      return SpectralBytes(rule, rows, cols).value();
    case RuleFamily::kPolora:
      return PoloraBytes(rule, rows, cols, partner_elements).value();
    default:
      return kFigureBytes;
  }
}

int64_t ShardWorkspaceBytes(int64_t rows, int64_t cols, int64_t whole_rows, int64_t whole_cols,
                            int64_t shards) {
  const int64_t m = std::min(whole_rows, whole_cols);
  const Bytes figures =
      Bytes(kFigureBytes) + Bytes(shards) * kTileFigureBytes + (Bytes(rows) + cols) * kVectorBytes;
  const Bytes bytes =
      figures + Bytes(rows) * cols * (2 * kFp32Bytes) + Bytes(m) * m * (kShardSquares * kFp32Bytes);
  return bytes.value();
}

absl::StatusOr<MatrixBytes> BytesOfMatrix(const PlanMatrix& matrix, int64_t declared_push_elements,
                                          const MemoryOptions& options) {
  int64_t elements = 0, bound = 0;
  MatrixBytes bytes;
  // Everything but the workspace and the push adds up to less than 16 bytes an element and 8 for
  // each state buffer, of which no rule has more than five.
  if (!CheckedMatrixBytes(matrix.rows, matrix.cols, 1, &elements) ||
      !CheckedMul(elements, 56, &bound) ||
      !CheckedMul(declared_push_elements, DTypeSize(matrix.push_dtype), &bytes.push) ||
      !CheckedAdd(bound, bytes.push, &bound)) {
    return BadShape(matrix.name, matrix.rows, matrix.cols);
  }
  if (matrix.IsShard() && matrix.rule.family == RuleFamily::kSpectral) {
    bytes.held = ShardWorkspaceBytes(matrix.rows, matrix.cols, matrix.whole_rows, matrix.whole_cols,
                                     matrix.shards);
  } else {
    bytes.workspace =
        WorkspaceBytes(matrix.rule, matrix.rows, matrix.cols, matrix.partner_elements);
  }
  if (!CheckedAdd(bound, SaturatingAdd(bytes.workspace, bytes.held), &bound)) {
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
  return bytes;
}

MemoryTally::MemoryTally(const MemoryOptions& options)
    : in_flight_(options.matrices_in_flight),
      stream_bytes_(SaturatingMul(options.ranks, options.window_bytes)) {}

void MemoryTally::Add(const MatrixBytes& matrix) {
  sums_.state = SaturatingAdd(sums_.state, matrix.state);
  sums_.staged = SaturatingAdd(sums_.staged, matrix.staged);
  sums_.weights = SaturatingAdd(sums_.weights, matrix.weights);
  sums_.push = SaturatingAdd(sums_.push, matrix.push);
  sums_.pull = SaturatingAdd(sums_.pull, matrix.pull);
  sums_.held = SaturatingAdd(sums_.held, matrix.held);
  resident_ = SaturatingAdd(resident_, matrix.Resident());
  workspace_.insert(matrix.workspace);
}

void MemoryTally::Remove(const MatrixBytes& matrix) {
  sums_.state -= matrix.state;
  sums_.staged -= matrix.staged;
  sums_.weights -= matrix.weights;
  sums_.push -= matrix.push;
  sums_.pull -= matrix.pull;
  sums_.held -= matrix.held;
  resident_ -= matrix.Resident();
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
  return SaturatingAdd(SaturatingAdd(stream_bytes_, resident_), WorkspaceOfLargest());
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
