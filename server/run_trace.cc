#include "server/run_trace.h"

#include "absl/strings/str_cat.h"

namespace stiefel {

RunTrace::RunTrace(Trace* trace, const RunMachine* machine)
    : trace_(trace), machine_(machine), pulls_(trace, "pull") {}

void RunTrace::Arrives(const v1::ChunkHeader& chunk, int64_t now) {
  if (chunk.step() != machine_->attempt().step) return;  // late: it is passed over
  const std::vector<BlockSpec>& blocks = machine_->ranks()[chunk.sender().rank()].push;
  for (const v1::Piece& piece : chunk.pieces()) {
    if (piece.absent()) continue;
    const int32_t matrix = blocks[piece.block()].matrix;
    TraceSpan& push = pushes_[matrix];
    if (push.step != chunk.step()) {
      push = {"push", NameOf(matrix), now, 0, chunk.step(), 0, ""};
    }
    push.bytes += piece.count() * DTypeSize(machine_->spec().matrices()[matrix].push_dtype);
  }
}

void RunTrace::Complete(int32_t matrix, int64_t now) {
  const auto found = pushes_.find(matrix);
  if (found == pushes_.end()) return;  // computed again with a clipped gradient
  found->second.end = now;
  trace_->Add(std::move(found->second));
  pushes_.erase(found);
}

void RunTrace::Computed(int32_t matrix, int64_t step, const std::string& kind, int64_t begin,
                        int64_t end) {
  trace_->Add({"compute", NameOf(matrix), begin, end, step, 0, kind});
}

void RunTrace::Collective(int32_t matrix, int64_t step, const std::string& what, int64_t begin,
                          int64_t end) {
  trace_->Add({"collective", NameOf(matrix), begin, end, step, 0, what});
}

void RunTrace::Sends(uint64_t stream, int32_t rank, const ChunkPlan& chunk, int64_t now) {
  const std::vector<BlockSpec>& blocks = machine_->ranks()[rank].pull;
  for (const ChunkPlan::Piece& piece : chunk.pieces) {
    const PullItem& item = piece.item;
    if (item.absent) continue;
    const int64_t key = (int64_t{rank} << 32) | item.block;
    pulls_.Begin(key, absl::StrCat(NameOf(blocks[item.block].matrix), " to rank ", rank), item.step,
                 now);
    pulls_.Enter(static_cast<int64_t>(stream), key, piece.count * DTypeSize(item.wire),
                 piece.offset + piece.count == item.rect.Area());
  }
}

void RunTrace::Sent(uint64_t stream, int64_t now) {
  pulls_.Leave(static_cast<int64_t>(stream), now);
}

void RunTrace::Voted(const v1::Vote& vote, int64_t now) {
  if (vote.step() == machine_->attempt().step && voted_ == 0) voted_ = now;
}

void RunTrace::Decided(const v1::Decide& decision, int64_t now) {
  if (voted_ != 0) {
    trace_->Add({"decision", absl::StrCat(v1::Outcome_Name(decision.outcome())), voted_, now,
                 decision.step(), 0, absl::StrCat("attempt ", decision.attempt())});
  }
  voted_ = 0;
  pushes_.clear();
  trace_->EndStep();
}

}  // namespace stiefel
