#include "kernels/cpu/bf16_matmul.h"

#include <list>
#include <map>
#include <memory>
#include <utility>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "common/mutex.h"
#include "dnnl.hpp"
#include "kernels/cpu/gemm.h"
#include "kernels/cpu/scratch.h"

namespace stiefel {
namespace {

using DnnlType = dnnl::memory::data_type;

const dnnl::engine& CpuEngine() {
  static const auto& engine = *new dnnl::engine(dnnl::engine::kind::cpu, 0);
  return engine;
}

// A primitive of one shape. Executed by many threads at once: its scratchpad is the caller's
// (scratchpad_mode::user).
struct Matmul {
  dnnl::memory::desc a, b, product, scratchpad;
  dnnl::matmul primitive;
};

absl::StatusOr<std::shared_ptr<const Matmul>> MakeMatmul(const Bf16MatmulShape& s) {
  using Dims = dnnl::memory::dims;
  auto matmul = std::make_shared<Matmul>();
  matmul->a = {Dims{s.rows, s.inner}, DnnlType::bf16, Dims{s.a_stride, 1}};
  matmul->b = {Dims{s.inner, s.cols}, DnnlType::bf16,
               s.transpose_b ? Dims{1, s.b_stride} : Dims{s.b_stride, 1}};
  matmul->product = {Dims{s.rows, s.cols}, DnnlType::f32, Dims{s.cols, 1}};
  dnnl::primitive_attr attr;
  attr.set_scratchpad_mode(dnnl::scratchpad_mode::user);
  const dnnl::matmul::desc desc(matmul->a, matmul->b, matmul->product);
  const dnnl::matmul::primitive_desc primitive_desc(desc, attr, CpuEngine(), /*allow_empty=*/true);
  if (!primitive_desc)
    return absl::UnimplementedError("oneDNN has no bf16 product for this processor");
  matmul->scratchpad = primitive_desc.scratchpad_desc();
  matmul->primitive = dnnl::matmul(primitive_desc);
  return matmul;
}

// CASES F13: a thousand shapes must not leave a thousand primitives behind.
class MatmulCache {
 public:
  absl::StatusOr<std::shared_ptr<const Matmul>> Get(const Bf16MatmulShape& shape) {
    MutexLock lock(&mutex_);
    if (auto found = by_shape_.find(shape); found != by_shape_.end()) {
      recent_.splice(recent_.begin(), recent_, found->second);
      return found->second->second;
    }
    absl::StatusOr<std::shared_ptr<const Matmul>> made = MakeMatmul(shape);
    if (!made.ok()) return made;
    recent_.emplace_front(shape, *made);
    by_shape_[shape] = recent_.begin();
    if (static_cast<int64_t>(recent_.size()) > kMaxPrimitives) {
      by_shape_.erase(recent_.back().first);
      recent_.pop_back();
    }
    return made;
  }

  int64_t size() {
    MutexLock lock(&mutex_);
    return static_cast<int64_t>(recent_.size());
  }

 private:
  using Entry = std::pair<Bf16MatmulShape, std::shared_ptr<const Matmul>>;
  Mutex mutex_;
  std::list<Entry> recent_ ABSL_GUARDED_BY(mutex_);  // the most recently used first
  std::map<Bf16MatmulShape, std::list<Entry>::iterator> by_shape_ ABSL_GUARDED_BY(mutex_);
};

MatmulCache& Cache() {
  static auto& cache = *new MatmulCache();
  return cache;
}

absl::Status Execute(const Matmul& matmul, const void* a, const void* b, float* product) {
  dnnl::stream stream(CpuEngine());
  void* scratchpad = ThreadScratch(ScratchUse::kPrimitive,
                                   static_cast<int64_t>(matmul.scratchpad.get_size()) + 64);
  const auto memory = [](const dnnl::memory::desc& desc, const void* data) {
    return dnnl::memory(desc, CpuEngine(), const_cast<void*>(data));
  };
  matmul.primitive.execute(stream, {{DNNL_ARG_SRC, memory(matmul.a, a)},
                                    {DNNL_ARG_WEIGHTS, memory(matmul.b, b)},
                                    {DNNL_ARG_DST, memory(matmul.product, product)},
                                    {DNNL_ARG_SCRATCHPAD, memory(matmul.scratchpad, scratchpad)}});
  stream.wait();
  return absl::OkStatus();
}

}  // namespace

absl::Status Bf16Matmul(const Bf16MatmulShape& shape, const void* a, const void* b,
                        float* product) {
  try {
    absl::StatusOr<std::shared_ptr<const Matmul>> matmul = Cache().Get(shape);
    if (!matmul.ok()) return matmul.status();
    return Execute(**matmul, a, b, product);
  } catch (const dnnl::error& e) {
    return absl::InternalError(absl::StrCat("oneDNN bf16 product ", shape.rows, " x ", shape.cols,
                                            " x ", shape.inner, " failed: ", e.what()));
  }
}

bool CpuHasBf16() {
  static const bool has = [] {
    try {
      return MakeMatmul({16, 16, 16, 16, 16, false}).ok();
    } catch (const dnnl::error&) {
      return false;
    }
  }();
  return has;
}

int64_t CachedPrimitives() { return Cache().size(); }

}  // namespace stiefel
