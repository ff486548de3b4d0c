// What the owners of one matrix's shards compute together: sums and exchanges over shards. The
// interface behind which gRPC peers (server/peer_collective.h) or NCCL stand.
#ifndef STIEFEL_KERNELS_COLLECTIVE_H_
#define STIEFEL_KERNELS_COLLECTIVE_H_

#include <cstdint>
#include <functional>

#include "absl/status/status.h"

namespace stiefel {

// Names one collective of one matrix's computation. All owners run the same ones in the same order.
struct CollectiveKey {
  int64_t step = 0;
  int32_t attempt = 0;
  int32_t round = 0;
  int32_t matrix = 0;
  int32_t index = 0;  // 0, 1, ... within the computation

  friend bool operator==(const CollectiveKey& a, const CollectiveKey& b) {
    return a.step == b.step && a.attempt == b.attempt && a.round == b.round &&
           a.matrix == b.matrix && a.index == b.index;
  }
};

// What a shard brings to a collective and where it wants the outcome, in device memory. Others may
// be served from both after `done`: `in` of a sum is the shard's again then, since nobody has the
// whole sum before all parts were read; `in` of a gather, and every `out`, when the shard's next
// collective of the matrix is done, since nobody contributes to that before this one is done.
struct CollectivePart {
  enum class Kind {
    kGather,   // out: what every shard sent, `count` bytes each, in shard order
    kSumFp32,  // out[i] = ((in_0[i] + in_1[i]) + in_2[i]) ... in shard order, in fp32
    kSumFp64,
  };
  Kind kind = Kind::kGather;
  int32_t shard = 0;
  int64_t count = 0;  // bytes (kGather) or elements
  const void* in = nullptr;
  void* out = nullptr;  // kSum: may equal `in`
};

// Of one run at one placement. Thread-safe. The bits of a sum do not depend on how many servers
// there are, nor on who adds.
class Collective {
 public:
  using Done = std::function<void(const absl::Status&)>;

  virtual ~Collective() = default;

  // Every shard of the matrix, wherever it lives, calls this once with equal key, kind and count.
  // `in` and `out` stay as CollectivePart says, or until Cancel returned. `done` exactly once,
  // never on the calling thread: OK; CANCELLED; UNAVAILABLE or DEADLINE_EXCEEDED with the server
  // and shard that are missing; FAILED_PRECONDITION where another server has given the attempt up.
  // Never blocks.
  virtual void Start(const CollectiveKey& key, const CollectivePart& part, Done done) = 0;

  // The computations of this attempt (all its rounds) are over: those under way end with
  // CANCELLED, and parts of it are given to nobody any more. When this returns no memory named in
  // a part of it is read or written.
  virtual void Cancel(int64_t step, int32_t attempt) = 0;
};

}  // namespace stiefel

#endif  // STIEFEL_KERNELS_COLLECTIVE_H_
