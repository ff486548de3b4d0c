// What a run host tells the trace of its process: of each matrix the push (first chunk here until
// complete), its computation and collectives, and the pull of every block; of each step the
// decision (vote until recorded).
#ifndef STIEFEL_SERVER_RUN_TRACE_H_
#define STIEFEL_SERVER_RUN_TRACE_H_

#include <cstdint>
#include <map>
#include <string>

#include "common/trace.h"
#include "server/publisher.h"
#include "server/run_machine.h"
#include "stiefel/v1/optimizer.pb.h"

namespace stiefel {

// Thread-compatible; times are those of RealClock().
class RunTrace {
 public:
  // Both outlive it. `machine` says whose blocks are which matrix's.
  RunTrace(Trace* trace, const RunMachine* machine);

  // A chunk of gradients is about to be copied to its place.
  void Arrives(const v1::ChunkHeader& chunk, int64_t now);
  // All gradients of the matrix are here.
  void Complete(int32_t matrix, int64_t now);
  void Computed(int32_t matrix, int64_t step, const std::string& kind, int64_t begin, int64_t end);
  // What a sharded matrix waited for between its stages.
  void Collective(int32_t matrix, int64_t step, const std::string& what, int64_t begin,
                  int64_t end);
  // A chunk for `rank` goes into a data stream, and has left it.
  void Sends(uint64_t stream, int32_t rank, const ChunkPlan& chunk, int64_t now);
  void Sent(uint64_t stream, int64_t now);
  void Lost(uint64_t stream) { pulls_.Forget(static_cast<int64_t>(stream)); }
  void Voted(const v1::Vote& vote, int64_t now);
  // Of an ended attempt nothing is under way any more, but for updates.
  void Decided(const v1::Decide& decision, int64_t now);

 private:
  const std::string& NameOf(int32_t matrix) const {
    return machine_->spec().matrices()[matrix].name;
  }

  Trace* const trace_;
  const RunMachine* const machine_;
  std::map<int32_t, TraceSpan> pushes_;  // by matrix; `end` is not known yet
  TransferSpans pulls_;
  int64_t voted_ = 0;  // when this server first voted on the open step; 0: not yet
};

}  // namespace stiefel

#endif  // STIEFEL_SERVER_RUN_TRACE_H_
