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
#include "common/dtype.h"
#include "kernels/gradient.h"

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

// Figures of one computation, in device memory; zeroed before it and filled by the primitives that
// name it.
struct StepStats {
  double gradient_sum_squares;   // after grad_scale, before clipping
  double direction_sum_squares;  // of the look-ahead U
  double applied_sum_squares;  // of the orthogonalised or element-wise update, before scale and lr
  int64_t nonfinite_gradient;
  int64_t nonfinite_direction;  // of the look-ahead and of the new state
  int64_t nonfinite_output;     // of delta, new weights or payload, as delivered
  double residual;              // |O O^T - I|_F / sqrt(m)
  double spectral_norm;         // of a row-wise update
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
  float step = 0;  // -lr s
  void* delta = nullptr;
  DType delta_dtype = DType::kFp32;
  float decay = 1;  // 1 - lr wd
  const float* weights = nullptr;
  float* new_weights = nullptr;
  void* payload = nullptr;
  DType payload_dtype = DType::kFp32;
};

// One pass over a rows x cols matrix: reduce the gradient, clip, state and look-ahead, and
// optionally more.
struct ElementPass {
  const GradientPlan* gradient = nullptr;  // used during the call only
  float clip_scale = 1;
  ElementCoefficients coefficients;
  const float* state[kMaxStates] = {nullptr, nullptr};
  float* new_state[kMaxStates] = {nullptr, nullptr};  // may equal state; null: not written
  float* direction = nullptr;                         // where u goes, or null
  bool deliver = false;                               // u is the update: deliver it at once
  Delivery delivery;
  StepStats* stats = nullptr;  // adds to gradient_sum_squares, direction_sum_squares and the counts
};

// Divides a direction by its Frobenius norm, taken from stats->direction_sum_squares, into the
// operand of the orthogonaliser: x = u / |u|_F, transposed where asked. All zero where |u|_F is 0
// or anything was not finite. eps_add and eps_floor give u / (|u|_F + eps_add) and u / max(|u|_F,
// eps_floor).
struct NormalisePass {
  const float* direction = nullptr;
  int64_t rows = 0, cols = 0;
  bool transpose = false;
  double eps_add = 0, eps_floor = 0;
  MatrixView x;  // rows x cols, or cols x rows
  const StepStats* stats = nullptr;
};

// Delivers an orthogonalised update; x is rows x cols, or cols x rows where transposed.
struct DeliverPass {
  MatrixView x;
  int64_t rows = 0, cols = 0;
  bool transposed = false;
  Delivery delivery;
  StepStats* stats = nullptr;  // adds to applied_sum_squares and nonfinite_output
};

// One whole off-refresh step: as ElementPass, then o = u * length / |vector of u|_2 for every row
// or column vector (0 where the vector is 0), then delivery. A spectral norm is estimated, by power
// iteration on o, where measure_spectral is set or spectral_max > 0; in the latter case o is
// multiplied by min(1, spectral_max / norm).
struct RowWisePass {
  ElementPass element;  // element.direction: workspace of rows * cols
  bool by_columns = false;
  double length = 1;
  bool measure_spectral = false;
  double spectral_max = 0;
  double* scratch = nullptr;  // workspace of RowWiseScratch(rows, cols) doubles
};

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
  // out = x + diagonal I, square matrices of one shape and dtype.
  virtual void AddDiagonal(const MatrixView& x, float diagonal, const MatrixView& out) = 0;
  virtual void Run(const ElementPass& pass) = 0;
  virtual void Run(const RowWisePass& pass) = 0;
  virtual void Run(const NormalisePass& pass) = 0;
  virtual void Run(const DeliverPass& pass) = 0;
  // |X X^T - I|_F / sqrt(rows), estimated from evenly spaced rows of X (all of them up to 16), into
  // stats->residual.
  virtual void Residual(const MatrixView& x, StepStats* stats) = 0;

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
