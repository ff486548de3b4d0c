// The one seam between mathematics and devices: memory, in-order streams, and the primitives that
// the rules are made of.
//
// Everything a primitive reads or writes is device memory of its backend; the host touches it only
// through Stream::Copy*. A primitive is enqueued and runs after all earlier work of its stream;
// arguments are taken by value at the call, so only device memory has to outlive it. A backend
// whose queue is the calling thread (CPU) runs it before the call returns.
//
// Results are bit-identical for equal inputs, whatever the number of threads, the other work of the
// device, and the alignment of the operands: reductions run over blocks fixed by the shape alone.
//
// Nothing here knows of RPC, runs, trainers or files.
#ifndef STIEFEL_KERNELS_BACKEND_H_
#define STIEFEL_KERNELS_BACKEND_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "common/dtype.h"
#include "kernels/gradient.h"
#include "plan/coefficients.h"

namespace stiefel {

class Backend;

// Device memory, freed on destruction. Aligned to 64 bytes; contents undefined at first.
// The backend must outlive it. Movable, not copyable.
class DeviceBuffer {
 public:
  DeviceBuffer() = default;
  DeviceBuffer(Backend* backend, void* data, int64_t bytes)
      : backend_(backend), data_(data), bytes_(bytes) {}
  ~DeviceBuffer() { Free(); }
  DeviceBuffer(DeviceBuffer&& other) noexcept { *this = std::move(other); }
  DeviceBuffer& operator=(DeviceBuffer&& other) noexcept;
  DeviceBuffer(const DeviceBuffer&) = delete;
  DeviceBuffer& operator=(const DeviceBuffer&) = delete;

  void* data() const { return data_; }
  template <typename T>
  T* as() const {
    return static_cast<T*>(data_);
  }
  int64_t bytes() const { return bytes_; }

 private:
  void Free();

  Backend* backend_ = nullptr;
  void* data_ = nullptr;
  int64_t bytes_ = 0;
};

// Figures of a direction, of which its normalisation follows.
struct DirectionStats {
  double sum_squares;
  double max_abs;
  int64_t nonfinite;
};

// Figures of one computation, in device memory; zeroed before it and filled by the primitives that
// name it.
struct StepStats {
  double gradient_sum_squares;  // after grad_scale, before clipping
  DirectionStats direction;     // of the look-ahead U; nonfinite counts the new state too
  double applied_sum_squares;   // of the update as scaled by Delivery::scale, before lr
  int64_t nonfinite_gradient;
  int64_t nonfinite_output;  // of delta, new weights or payload, as delivered
  double residual;           // |O O^T - I|_F / sqrt(m)
  double spectral_norm;      // of a row-wise update
};

// `batch` row-major rows x cols matrices, one after the other. kFp32 or kBf16.
struct MatrixView {
  void* data = nullptr;
  DType dtype = DType::kFp32;
  int64_t rows = 0, cols = 0;
  int64_t batch = 1;
};

// C = alpha * A op(B) + beta * D for every matrix of the batch, accumulated in fp32 and rounded
// once to C's dtype. One dtype throughout. C overlaps neither A nor B; D is unused where beta == 0,
// and otherwise has C's shape and overlaps it not at all.
struct GemmArgs {
  MatrixView a, b, c, d;
  bool transpose_b = false;
  float alpha = 1, beta = 0;
  // The caller knows that C is symmetric: one triangle is computed, the other mirrored (bitwise).
  bool symmetric = false;
};

// What happens to the state and the update of each element:
//   kMomentum: m' = m_keep m + m_gain g;  u = u_momentum m' + u_gradient g           (state: m, or
//   none with m_keep = 0) kLion:     u = sign(u_momentum m + u_gradient g);  m' = m_keep m + m_gain
//   g      (state: m) kAdam:     m' = m_keep m + m_gain g;  v' = v_keep v + v_gain g^2;
//              u = (m' * m_correction) / (sqrt(v' * v_correction) + eps), 0 where that denominator
//              is 0  (state: m, v)
enum class ElementRule { kMomentum, kLion, kAdam };

struct ElementCoefficients {
  ElementRule rule = ElementRule::kMomentum;
  float m_keep = 0, m_gain = 1, u_momentum = 1, u_gradient = 0;
  float v_keep = 0, v_gain = 0, m_correction = 1, v_correction = 1, eps = 0;
};

constexpr int kMaxStates = 2;

// How an update direction o becomes what is delivered:
//   d = step o (fp32);  delta = d in delta_dtype;  w' = decay w + d;  payload = w' in
//   payload_dtype.
// Null outputs are left out.
struct Delivery {
  float step = 0;    // -lr s
  double scale = 1;  // s, for the figures
  void* delta = nullptr;
  DType delta_dtype = DType::kFp32;
  float decay = 1;  // 1 - lr wd
  const float* weights = nullptr;
  float* new_weights = nullptr;
  void* payload = nullptr;
  DType payload_dtype = DType::kFp32;
};

// One pass over the rows of a matrix, or of a range of them: reduce the gradient, clip, state and
// look-ahead, and optionally more. Everything but the gradient begins at the first row of the
// range.
struct ElementPass {
  const GradientPlan* gradient = nullptr;  // used during the call only
  int64_t first_row = 0, rows = 0;         // the range
  float clip_scale = 1;
  ElementCoefficients coefficients;
  const float* state[kMaxStates] = {nullptr, nullptr};
  float* new_state[kMaxStates] = {nullptr, nullptr};  // may equal state; null: not written
  float* direction = nullptr;                         // where u goes, or null
  bool deliver = false;                               // u is the update: deliver it at once
  Delivery delivery;
  StepStats* stats = nullptr;  // adds to gradient_sum_squares, direction and the counts
};

// Which rows of u, or columns, take part: the `count` of largest l1 norm (fp64; ties to the lower
// index; NaN counts as the largest).
struct SelectPass {
  const float* u = nullptr;
  int64_t rows = 0, cols = 0;
  bool by_columns = false;
  int64_t count = 0;
  double* scratch = nullptr;  // one per vector
  int32_t* index = nullptr;   // count: the vectors selected, ascending
  int32_t* place = nullptr;   // per vector: where it is in `index`, or -1
  float* selected = nullptr;  // per vector: 1, or 0
};

// Multiplies the selected rows, or columns, of m by a factor, in place.
struct DampPass {
  float* m = nullptr;
  int64_t rows = 0, cols = 0;
  bool by_columns = false;
  const float* selected = nullptr;
  float factor = 1;
};

// out = the `count` rows of u, or columns, that `index` names: count x cols, or rows x count.
struct GatherPass {
  const float* u = nullptr;
  int64_t rows = 0, cols = 0;
  bool by_columns = false;
  int64_t count = 0;
  const int32_t* index = nullptr;
  float* out = nullptr;
};

// Writes the figures of a rows x cols matrix whose rows are `stride` elements apart.
struct MeasurePass {
  const float* u = nullptr;
  int64_t rows = 0, cols = 0, stride = 0;
  DirectionStats* figures = nullptr;
};

// Divides a direction into the operand of the orthogonaliser, transposed where asked. Frobenius:
// x = u / |u|_F; eps_add and eps_floor give u / (|u|_F + eps_add) and u / max(|u|_F, eps_floor).
// Power of two: x = u / 2^floor(log2 max|u|), exact but for underflow. All zero where u is 0 or
// anything was not finite.
struct NormalisePass {
  const float* u = nullptr;
  int64_t rows = 0, cols = 0, stride = 0;  // rows of u are `stride` elements apart
  bool transpose = false;
  bool power_of_two = false;
  double eps_add = 0, eps_floor = 0;
  MatrixView x;  // rows x cols, or cols x rows
  const DirectionStats* figures = nullptr;
};

// The row variance of an orthogonalised x (rows x cols, or cols x rows where transposed) whose row
// i is row index[i] of the matrix, or row i without index: there
//   v' = keep v + gain mean_j x_ij^2,   factor_i = f / (sqrt(v') + eps),
//   f = |x|_F / max(|x / (sqrt(v') + eps)|_F, eps);
// elsewhere v' = v. A zero row has factor 0.
struct RowVariancePass {
  MatrixView x;
  int64_t rows = 0, cols = 0;
  bool transposed = false;
  const int32_t* index = nullptr;
  int64_t state_rows = 0;
  const float* v = nullptr;
  float* new_v = nullptr;  // must not overlap v
  double keep = 0, gain = 0, eps = 0;
  double* factors = nullptr;  // rows
};

// Delivers an orthogonalised update o; x is rows x cols, or cols x rows where transposed. Element
// (i, j), times row_factors[i] where given, goes to row i and column j of what the delivery points
// at, whose rows are `stride` elements apart.
struct DeliverPass {
  MatrixView x;
  int64_t rows = 0, cols = 0;
  bool transposed = false;
  const double* row_factors = nullptr;
  int64_t stride = 0;
  Delivery delivery;
  StepStats* stats = nullptr;  // adds to applied_sum_squares and nonfinite_output
};

// The same for an update that has only some of the matrix's rows, or columns: row (column) i of o
// goes to row (column) index[i], and the update of all others is 0.
struct ScatterPass {
  DeliverPass deliver;  // stride: the matrix's columns
  int64_t vectors = 0;  // the matrix's rows, or columns
  bool by_columns = false;
  const int32_t* index = nullptr;
  const int32_t* place = nullptr;
};

// sums[i] = the sum of squares of row i of u, or of column i.
struct VectorSumsPass {
  const float* u = nullptr;
  int64_t rows = 0, cols = 0;
  bool by_columns = false;
  double* sums = nullptr;  // one per vector
};

// o = u * length / |vector of u|_2 for every row or column vector (0 where the vector is 0), in
// place. A spectral norm is estimated, by power iteration on o, where measure_spectral is set or
// spectral_max > 0; in the latter case o is multiplied by min(1, spectral_max / norm).
struct VectorPass {
  float* u = nullptr;
  int64_t rows = 0, cols = 0;
  bool by_columns = false;
  double length = 1;
  // |vector|_2 squared of the vectors that those of u are parts of; null: they are whole.
  const double* sums = nullptr;
  bool measure_spectral = false;
  double spectral_max = 0;
  // Workspace of RowWiseScratch(rows, cols) doubles; `cols` where no spectral norm is estimated.
  double* scratch = nullptr;
  StepStats* stats = nullptr;  // spectral_norm
};

// One whole off-refresh step: as ElementPass, then VectorPass, then delivery.
struct RowWisePass {
  ElementPass element;
  VectorPass vectors;  // u: workspace of rows * cols
};

// AOL preconditioning of every matrix of a batch, in place: s_i = 1 / sqrt(max(a_i, 1e-7 max_j
// a_j)) where a_i is the sum of |gram_ij| over j, and 0 where a_i is; gram <- diag(s) gram diag(s),
// x <- diag(s) x.
struct AolPass {
  MatrixView gram;  // m x m: X X^T
  MatrixView x;     // m x n, one dtype
};

// Normalisation and the whole polar map (kernels/polar) in bf16, on a device that has kernels which
// keep the operands in a layout of their own from the first product to the last. The result takes
// the place of X, normalise.x, which has to be bf16.
struct PolarPass {
  NormalisePass normalise;
  absl::Span<const Coefficients> coefficients;  // used during the call only
  bool gram = false;
  absl::Span<const int64_t> restarts;  // of the Gram form, ascending; likewise
  bool aol = false;                    // X is preconditioned, as AolPass does
  void* workspace = nullptr;           // DeviceInfo::fused_polar_bytes
};

// Singular pairs and small eigen-decompositions: see kernels/spectral_passes.h.
struct LeadingPairsPass;
struct ShapePass;
struct MetricPass;
struct GramPass;
struct PoloraPass;

// Row blocks whose contributions to the power iteration are added in order.
constexpr int64_t kSpectralBlocks = 16;

int64_t RowWiseScratch(int64_t rows, int64_t cols);

// An in-order queue of work. One thread at a time uses a stream; different streams are independent.
class Stream {
 public:
  virtual ~Stream() = default;  // waits for the work

  virtual void CopyToDevice(void* device, const void* host, int64_t bytes) = 0;
  virtual void CopyToHost(void* host, const void* device, int64_t bytes) = 0;
  virtual void Zero(void* device, int64_t bytes) = 0;

  virtual void Gemm(const GemmArgs& args) = 0;
  // out = x + diagonal I, square matrices of one shape and dtype; out may be x.
  virtual void AddDiagonal(const MatrixView& x, float diagonal, const MatrixView& out) = 0;
  virtual void Run(const ElementPass& pass) = 0;
  virtual void Run(const SelectPass& pass) = 0;
  virtual void Run(const DampPass& pass) = 0;
  virtual void Run(const GatherPass& pass) = 0;
  virtual void Run(const MeasurePass& pass) = 0;
  virtual void Run(const NormalisePass& pass) = 0;
  virtual void Run(const RowVariancePass& pass) = 0;
  virtual void Run(const DeliverPass& pass) = 0;
  virtual void Run(const ScatterPass& pass) = 0;
  virtual void Run(const VectorSumsPass& pass) = 0;
  virtual void Run(const VectorPass& pass) = 0;
  virtual void Run(const RowWisePass& pass) = 0;
  // to = from, in to's dtype. Same shape; they do not overlap.
  virtual void Convert(const MatrixView& from, const MatrixView& to) = 0;
  // Adds up figures of parts of a matrix: sums and counts are added, norms and residuals the
  // largest.
  virtual void Combine(const StepStats* parts, int64_t count, StepStats* total) = 0;
  virtual void Run(const AolPass& pass) = 0;
  // REQUIRES: DeviceInfo::fused_polar_bytes is not null.
  virtual void Run(const PolarPass&) {}
  virtual void Run(const LeadingPairsPass& pass) = 0;
  virtual void Run(const ShapePass& pass) = 0;
  virtual void Run(const MetricPass& pass) = 0;
  virtual void Run(const GramPass& pass) = 0;
  virtual void Run(const PoloraPass& pass) = 0;
  // |X X^T - I|_F / sqrt(rows), estimated from evenly spaced rows of X (all of them up to 16), into
  // stats->residual.
  virtual void Residual(const MatrixView& x, StepStats* stats) = 0;
  // The same of P X, from R = X X^T and P, symmetric fp32 matrices that commute: |P R P - I|_F /
  // sqrt(rows).
  virtual void Residual(const MatrixView& r, const MatrixView& p, StepStats* stats) = 0;

  // Calls body(i, sub) for every i in [0, count): pieces of work that do not depend on each other,
  // each enqueued on a stream of its own. Later work of this stream runs after all of them. A CPU
  // runs each body on one thread, several at a time: the way to do much small work.
  virtual void ForEach(int64_t count, const std::function<void(int64_t i, Stream* sub)>& body) = 0;

  // Calls `done` once, when all work enqueued so far has ended, with the first error of that work;
  // on a thread of the backend's choosing. `done` must not block or use the stream.
  virtual void Then(std::function<void(const absl::Status&)> done) = 0;
  // Waits for all work; returns its first error since the last Synchronize.
  virtual absl::Status Synchronize() = 0;
};

struct DeviceInfo {
  std::string kind;             // "cpu"
  std::string name;             // of the device, for people
  std::string instruction_set;  // what its kernels use here, for people
  int threads = 1;
  int64_t memory_bytes = 0;  // that the device has
  bool has_bf16 = false;     // Gemm takes kBf16
  bool fast_bf16 = false;    // and is faster with it
  // Bytes of workspace of the polar map of an m x n X, m <= n, as one PolarPass; null where the
  // device has no such kernels.
  int64_t (*fused_polar_bytes)(int64_t m, int64_t n, bool gram) = nullptr;
};

// A device. Thread-safe. Outlives its buffers and streams.
class Backend {
 public:
  virtual ~Backend() = default;
  virtual const DeviceInfo& Info() const = 0;
  // RESOURCE_EXHAUSTED, with the sizes, where it does not fit; INVALID_ARGUMENT for a negative
  // size.
  absl::StatusOr<DeviceBuffer> Allocate(int64_t bytes);
  virtual absl::StatusOr<std::unique_ptr<Stream>> CreateStream() = 0;
  // Bytes in live DeviceBuffers.
  virtual int64_t AllocatedBytes() const = 0;

 private:
  friend class DeviceBuffer;
  virtual absl::StatusOr<void*> AllocateBytes(int64_t bytes) = 0;
  virtual void FreeBytes(void* data, int64_t bytes) = 0;
};

}  // namespace stiefel

#endif  // STIEFEL_KERNELS_BACKEND_H_
