#include "kernels/cpu/cpu_backend.h"

#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/mutex.h"
#include "kernels/cpu/amx/polar.h"
#include "kernels/cpu/amx/support.h"
#include "kernels/cpu/aol.h"
#include "kernels/cpu/blocks.h"
#include "kernels/cpu/gemm.h"
#include "kernels/cpu/leading_pairs.h"
#include "kernels/cpu/low_rank.h"
#include "kernels/cpu/passes.h"
#include "kernels/cpu/segment_kernels.h"
#include "kernels/cpu/thread_pool.h"

namespace stiefel {
namespace {

constexpr int64_t kAlignment = 64;
constexpr int64_t kHugePage = 2 << 20;
constexpr int kMaxThreads = 1024;

class CpuStream final : public Stream {
 public:
  // `alone` has one thread.
  CpuStream(ThreadPool* pool, ThreadPool* alone, const TileKernels* tiles)
      : pool_(pool), alone_(alone), tiles_(tiles) {}

  void CopyToDevice(void* device, const void* host, int64_t bytes) override {
    std::memcpy(device, host, bytes);
  }
  void CopyToHost(void* host, const void* device, int64_t bytes) override {
    std::memcpy(host, device, bytes);
  }
  void Zero(void* device, int64_t bytes) override { std::memset(device, 0, bytes); }
  void Gemm(const GemmArgs& args) override { Note(CpuGemm(pool_, args)); }
  void AddDiagonal(const MatrixView& x, float diagonal, const MatrixView& out) override {
    CpuAddDiagonal(pool_, x, diagonal, out);
  }
  void Run(const ElementPass& pass) override { CpuRun(pool_, pass); }
  void Run(const SelectPass& pass) override { CpuRun(pool_, pass); }
  void Run(const DampPass& pass) override { CpuRun(pool_, pass); }
  void Run(const GatherPass& pass) override { CpuRun(pool_, pass); }
  void Run(const MeasurePass& pass) override { CpuRun(pool_, pass); }
  void Run(const NormalisePass& pass) override { CpuRun(pool_, pass); }
  void Run(const RowVariancePass& pass) override { CpuRun(pool_, pass); }
  void Run(const DeliverPass& pass) override { CpuRun(pool_, pass); }
  void Run(const ScatterPass& pass) override { CpuRun(pool_, pass); }
  void Run(const VectorSumsPass& pass) override { CpuRun(pool_, pass); }
  void Run(const VectorPass& pass) override { CpuRun(pool_, pass); }
  void Run(const RowWisePass& pass) override { CpuRun(pool_, pass); }
  void Run(const AolPass& pass) override { CpuRun(pool_, pass); }
  void Run(const PolarPass& pass) override {
    TilePolar(*tiles_, pool_, pass, NormaliseFactor(pass.normalise));
  }
  void Run(const LeadingPairsPass& pass) override { Note(CpuRun(pool_, pass)); }
  void Run(const ShapePass& pass) override { Note(CpuRun(pool_, pass)); }
  void Run(const MetricPass& pass) override { CpuRun(pool_, pass); }
  void Run(const GramPass& pass) override { CpuRun(pool_, pass); }
  void Run(const PoloraPass& pass) override { CpuRun(pool_, pass); }
  void Convert(const MatrixView& from, const MatrixView& to) override {
    CpuConvert(pool_, from, to);
  }
  void Combine(const StepStats* parts, int64_t count, StepStats* total) override {
    for (int64_t i = 0; i < count; ++i) AddStats(parts[i], total);
  }
  void Residual(const MatrixView& x, StepStats* stats) override {
    Note(CpuResidual(pool_, x, &stats->residual));
  }
  void Residual(const MatrixView& r, const MatrixView& p, StepStats* stats) override {
    Note(CpuResidual(pool_, r, p, &stats->residual));
  }
  void ForEach(int64_t count, const std::function<void(int64_t i, Stream* sub)>& body) override {
    Mutex mutex;
    absl::Status first;
    int64_t first_index = count;
    pool_->ParallelFor(count, [&](int64_t i) {
      CpuStream sub(alone_, alone_, tiles_);
      body(i, &sub);
      absl::Status status = sub.Synchronize();
      if (status.ok()) return;
      MutexLock lock(&mutex);
      if (i < first_index) {
        first_index = i;
        first = std::move(status);
      }
    });
    Note(first);
  }
  void Then(std::function<void(const absl::Status&)> done) override { done(error_); }
  absl::Status Synchronize() override { return std::exchange(error_, absl::OkStatus()); }

 private:
  void Note(const absl::Status& status) {
    if (error_.ok()) error_ = status;
  }

  ThreadPool* const pool_;
  ThreadPool* const alone_;
  const TileKernels* const tiles_;
  absl::Status error_;  // the first since the last Synchronize
};

std::string ProcessorName() {
  std::ifstream info("/proc/cpuinfo");
  std::string line;
  while (std::getline(info, line)) {
    const size_t colon = line.find(": ");
    if (line.rfind("model name", 0) == 0 && colon != std::string::npos)
      return line.substr(colon + 2);
  }
  return "x86-64";
}

class CpuBackend final : public Backend {
 public:
  CpuBackend(int threads, const TileKernels* tiles) : tiles_(tiles), pool_(threads) {
    info_.kind = "cpu";
    info_.name = ProcessorName();
    info_.threads = threads;
    info_.memory_bytes = static_cast<int64_t>(sysconf(_SC_PHYS_PAGES)) * sysconf(_SC_PAGESIZE);
    // AVX-512 alone does not make bf16 fast: measured with oneDNN 2.6 on Sapphire Rapids, it ran at
    // half the rate of fp32.
    info_.fast_bf16 = tiles != nullptr;
    info_.has_bf16 = info_.fast_bf16 || CpuHasBf16();
    if (info_.fast_bf16) info_.fused_polar_bytes = TilePolarBytes;
    info_.instruction_set =
        absl::StrCat("passes ", BestSegmentKernels().name, ", products ",
                     info_.fast_bf16 ? "AMX tiles bf16, " : "", OneDnnDescription(), " fp32");
  }

  const DeviceInfo& Info() const override { return info_; }
  absl::StatusOr<std::unique_ptr<Stream>> CreateStream() override {
    return std::make_unique<CpuStream>(&pool_, &alone_, tiles_);
  }
  int64_t AllocatedBytes() const override { return allocated_; }

 private:
  absl::StatusOr<void*> AllocateBytes(int64_t bytes) override {
    if (bytes > info_.memory_bytes) return TooLarge(bytes);
    const bool huge = bytes >= 2 * kHugePage;
    const int64_t alignment = huge ? kHugePage : kAlignment;
    void* data = std::aligned_alloc(
        alignment, (std::max<int64_t>(bytes, 1) + alignment - 1) / alignment * alignment);
    if (data == nullptr) return TooLarge(bytes);
    if (huge) madvise(data, bytes, MADV_HUGEPAGE);  // a hint
    allocated_ += bytes;
    return data;
  }

  void FreeBytes(void* data, int64_t bytes) override {
    std::free(data);
    allocated_ -= bytes;
  }

  absl::Status TooLarge(int64_t bytes) const {
    return absl::ResourceExhaustedError(
        absl::StrCat("cannot allocate ", bytes, " bytes; ", allocated_.load(),
                     " are in use and the machine has ", info_.memory_bytes));
  }

  // Constant after construction.
  const TileKernels* const tiles_;
  DeviceInfo info_;
  // Own synchronisation.
  ThreadPool pool_, alone_{1};
  std::atomic<int64_t> allocated_{0};
};

}  // namespace

absl::StatusOr<std::unique_ptr<Backend>> CreateCpuBackend(int threads) {
  return CreateCpuBackend(threads, CpuHasAmx() ? &kAmxTileKernels : nullptr);
}

absl::StatusOr<std::unique_ptr<Backend>> CreateCpuBackend(int threads, const TileKernels* tiles) {
  if (threads < 1 || threads > kMaxThreads) {
    return absl::InvalidArgumentError(
        absl::StrCat("threads=", threads, " is not from 1 to ", kMaxThreads));
  }
  return std::make_unique<CpuBackend>(threads, tiles);
}

}  // namespace stiefel
