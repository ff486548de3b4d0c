// What a session tells the trace of its process: of each block the push (Push until its last byte
// was handed to the network), the pull (first chunk here until complete) and Apply; of each step
// the decision (EndPush until the outcome was known) and the whole (Begin until Done).
#ifndef STIEFEL_CLIENT_SESSION_TRACE_H_
#define STIEFEL_CLIENT_SESSION_TRACE_H_

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "client/layout.h"
#include "common/trace.h"
#include "stiefel/v1/optimizer.pb.h"

namespace stiefel {

// Thread-compatible but for trace(). Blocks are those on the wire; times those of RealClock().
class SessionTrace {
 public:
  // Null where TrainerOptions::trace_file is empty. `layout` outlives it. Errors: Trace::Create.
  static absl::StatusOr<std::unique_ptr<SessionTrace>> Create(const Layout* layout);

  void Begun(int64_t step, int64_t now);
  void Pushed(int32_t block, int32_t part, int64_t now);
  // A chunk goes into a data stream, and has left it.
  void Sends(int32_t server, size_t stream, const v1::ChunkHeader& chunk);
  void Sent(int32_t server, size_t stream, int64_t now);
  void EndedPush(int64_t now) { ended_push_ = now; }
  void Arrives(const v1::ChunkHeader& chunk, int64_t now);
  void Placed(int32_t block, int64_t bytes, bool complete, int64_t now);
  void Decided(const v1::Decided& decided, int64_t now);
  void Applied(int32_t pull_block, int64_t begin, int64_t end);
  void Done(int64_t now);

  // Thread-safe.
  Trace* trace() { return trace_.get(); }

 private:
  SessionTrace(const Layout* layout, std::unique_ptr<Trace> trace);
  std::string NameOf(const WireBlock& block) const {
    return layout_->matrices()[layout_->shards()[block.shard].matrix].name;
  }

  const Layout* const layout_;
  const std::unique_ptr<Trace> trace_;
  TransferSpans pushes_;
  TransferSpans pulls_;
  int64_t step_ = 0;
  int64_t begun_ = 0;
  int64_t ended_push_ = 0;
  int64_t decided_step_ = 0;  // whose outcome is known
};

}  // namespace stiefel

#endif  // STIEFEL_CLIENT_SESSION_TRACE_H_
