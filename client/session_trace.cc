#include "client/session_trace.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "common/status.h"

namespace stiefel {
namespace {

int64_t PushKey(int32_t block, int32_t part) { return (int64_t{part} << 32) | block; }
int64_t StreamKey(int32_t server, size_t stream) {
  return (int64_t{server} << 32) | static_cast<int64_t>(stream);
}

}  // namespace

absl::StatusOr<std::unique_ptr<SessionTrace>> SessionTrace::Create(const Layout* layout) {
  const TrainerOptions& options = layout->options();
  if (options.trace_file.empty()) return nullptr;
  STIEFEL_ASSIGN_OR_RETURN(
      std::unique_ptr<Trace> trace,
      Trace::Create(options.trace_file, absl::StrCat("trainer, rank ", options.rank)));
  return std::unique_ptr<SessionTrace>(new SessionTrace(layout, std::move(trace)));
}

SessionTrace::SessionTrace(const Layout* layout, std::unique_ptr<Trace> trace)
    : layout_(layout),
      trace_(std::move(trace)),
      pushes_(trace_.get(), "push"),
      pulls_(trace_.get(), "pull") {}

void SessionTrace::Begun(int64_t step, int64_t now) {
  pushes_.Clear();  // of an attempt that was dropped
  step_ = step;
  begun_ = now;
  ended_push_ = 0;
}

void SessionTrace::Pushed(int32_t block, int32_t part, int64_t now) {
  pushes_.Begin(PushKey(block, part), NameOf(layout_->wire_push()[block]), step_, now);
}

void SessionTrace::Sends(int32_t server, size_t stream, const v1::ChunkHeader& chunk) {
  for (const v1::Piece& piece : chunk.pieces()) {
    if (piece.absent()) continue;
    const WireBlock& block = layout_->wire_push()[piece.block()];
    pushes_.Enter(StreamKey(server, stream), PushKey(piece.block(), piece.part()),
                  piece.count() * DTypeSize(block.dtype),
                  piece.offset() + piece.count() == block.elements());
  }
}

void SessionTrace::Sent(int32_t server, size_t stream, int64_t now) {
  pushes_.Leave(StreamKey(server, stream), now);
}

void SessionTrace::Arrives(const v1::ChunkHeader& chunk, int64_t now) {
  for (const v1::Piece& piece : chunk.pieces()) {
    if (piece.absent()) continue;
    pulls_.Begin(piece.block(), NameOf(layout_->wire_pull()[piece.block()]), chunk.step(), now);
  }
}

void SessionTrace::Placed(int32_t block, int64_t bytes, bool complete, int64_t now) {
  pulls_.Take(block, bytes, complete, now);
}

void SessionTrace::Decided(const v1::Decided& decided, int64_t now) {
  if (decided.step() <= decided_step_) return;  // another server says it too
  decided_step_ = decided.step();
  trace_->Add({"decision", v1::Outcome_Name(decided.outcome()),
               ended_push_ != 0 ? ended_push_ : now, now, decided.step(), 0,
               absl::StrCat("attempt ", decided.attempt())});
}

void SessionTrace::Applied(int32_t pull_block, int64_t begin, int64_t end) {
  trace_->Add({"apply", layout_->parameters()[layout_->pull()[pull_block].parameter].name, begin,
               end, step_, layout_->pull()[pull_block].bytes(), ""});
}

void SessionTrace::Done(int64_t now) {
  if (begun_ != 0) trace_->Add({"step", absl::StrCat("step ", step_), begun_, now, step_, 0, ""});
  begun_ = 0;
  trace_->EndStep();
}

}  // namespace stiefel
