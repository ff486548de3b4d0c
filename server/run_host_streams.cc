// Streams, chunks and credits.
#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/checked_math.h"
#include "common/errors.h"
#include "common/status.h"
#include "server/run_host.h"

namespace stiefel {

absl::StatusOr<uint64_t> RunHost::OpenControl(const v1::Sender& sender,
                                              std::shared_ptr<ControlSink> sink) {
  Turn turn;
  uint64_t id;
  {
    MutexLock lock(&mutex_);
    const int64_t now = Now();
    Actions up;
    STIEFEL_RETURN_IF_ERROR(machine_.OnControlUp(sender, now, &up));
    const StreamKey key(sender.rank(), Incarnation(sender.incarnation()));
    if (const auto found = control_of_.find(key); found != control_of_.end()) {
      const uint64_t older = found->second;
      control_of_.erase(found);  // so that the machine does not take the rank for gone
      CloseControl(older, absl::AbortedError("replaced by a newer control stream"));
    }
    id = next_id_++;
    untold_.erase(sender.rank());  // the machine tells it where the run went
    controls_[id] = {key, std::move(sink)};
    control_of_[key] = id;
    turn.actions = std::move(up);
    Perform(&turn);
  }
  EndTurn(&turn);
  return id;
}

void RunHost::OnControlMessage(uint64_t stream, const v1::TrainerMessage& message) {
  Turn turn;
  {
    MutexLock lock(&mutex_);
    const auto found = controls_.find(stream);
    if (found == controls_.end()) return;
    const StreamKey& key = found->second.key;
    if (message.sender().rank() != key.first ||
        Incarnation(message.sender().incarnation()) != key.second) {
      CloseControl(stream, absl::InvalidArgumentError(
                               absl::StrCat("a message of rank ", message.sender().rank(),
                                            " on the control stream of rank ", key.first, " (",
                                            key.second.DebugString(), ")")));
    } else if (message.has_replan_refused()) {
      if (key.first == 0 && machine_.CheckTrainer(message.sender()).ok())
        OnReplanRefused(message.replan_refused());
    } else {
      machine_.OnControlMessage(message, Now(), &turn.actions);
      Perform(&turn);
      if (message.has_prepare()) AnswerStateCalls();  // some may have come before it
    }
  }
  EndTurn(&turn);
}

// Ends a control stream from here. The machine hears of it if the rank has no newer one.
void RunHost::CloseControl(uint64_t stream, const absl::Status& status) {
  const auto found = controls_.find(stream);
  if (found == controls_.end()) return;
  const ControlStream control = std::move(found->second);
  controls_.erase(found);
  calls_.Add([sink = control.sink, status] { sink->Close(status); });
  const auto current = control_of_.find(control.key);
  if (current == control_of_.end() || current->second != stream) return;
  control_of_.erase(current);
  machine_.OnControlDown(control.key.first, control.key.second, Now());
}

void RunHost::OnControlClosed(uint64_t stream) {
  {
    MutexLock lock(&mutex_);
    CloseControl(stream, absl::OkStatus());
  }
  calls_.Run();
}

absl::StatusOr<uint64_t> RunHost::OpenData(const v1::Sender& sender,
                                           std::shared_ptr<DataSink> sink) {
  Turn turn;
  uint64_t id;
  {
    MutexLock lock(&mutex_);
    STIEFEL_RETURN_IF_ERROR(machine_.CheckTrainer(sender));
    RankIo& io = ranks_[sender.rank()];
    if (static_cast<int>(io.data_streams.size()) >= environment_.options.max_streams_per_rank) {
      return absl::ResourceExhaustedError(absl::StrCat("rank ", sender.rank(), " has ",
                                                       io.data_streams.size(),
                                                       " data streams; no more are allowed"));
    }
    STIEFEL_RETURN_IF_ERROR(machine_.OnDataUp(sender, Now(), &turn.actions));
    id = next_id_++;
    data_[id] = {StreamKey(sender.rank(), Incarnation(sender.incarnation())), std::move(sink),
                 false};
    io.data_streams.insert(id);
    Perform(&turn);
  }
  EndTurn(&turn);
  return id;
}

void RunHost::CloseData(uint64_t stream, const absl::Status& status) {
  const auto found = data_.find(stream);
  if (found == data_.end()) return;
  ranks_[found->second.key.first].data_streams.erase(stream);
  if (trace_) trace_->Lost(stream);
  calls_.Add([sink = std::move(found->second.sink), status] { sink->Close(status); });
  data_.erase(found);
}

void RunHost::OnDataClosed(uint64_t stream) {
  {
    MutexLock lock(&mutex_);
    CloseData(stream, absl::OkStatus());
  }
  calls_.Run();
}

void RunHost::OnDataWritten(uint64_t stream) {
  Turn turn;
  {
    MutexLock lock(&mutex_);
    const auto found = data_.find(stream);
    if (found == data_.end()) return;
    found->second.writing = false;
    if (trace_) trace_->Sent(stream, Now());
    Pump(found->second.key.first, &turn);
  }
  EndTurn(&turn);
}

// ---------------------------------------------------------------- upwards

// Who sends what kind of chunk on which stream, and whether the payload has the size that its
// pieces say.
absl::Status RunHost::CheckChunk(const DataStream& stream, const IncomingChunk& chunk) const {
  const v1::ChunkHeader& header = chunk.header();
  if (header.type() != v1::ChunkHeader::GRADIENT) {
    return absl::InvalidArgumentError(absl::StrCat(
        "a chunk of type ", static_cast<int>(header.type()), " on a data stream, not GRADIENT"));
  }
  if (header.sender().rank() != stream.key.first ||
      Incarnation(header.sender().incarnation()) != stream.key.second) {
    return absl::InvalidArgumentError(absl::StrCat("a chunk of rank ", header.sender().rank(),
                                                   " on a data stream of rank ", stream.key.first));
  }
  STIEFEL_RETURN_IF_ERROR(machine_.CheckTrainer(header.sender()));
  const std::vector<BlockSpec>& blocks = machine_.ranks()[stream.key.first].push;
  int64_t expected = 0;
  for (const v1::Piece& piece : header.pieces()) {
    if (piece.block() < 0 || piece.block() >= static_cast<int64_t>(blocks.size()))
      return IndexOutOfRange(absl::StrCat("push block of rank ", stream.key.first), piece.block(),
                             static_cast<int64_t>(blocks.size()));
    if (piece.absent()) continue;
    const MatrixSpec& matrix = spec_->matrices()[blocks[piece.block()].matrix];
    if (piece.count() <= 0 ||
        !CheckedMulAdd(piece.count(), DTypeSize(matrix.push_dtype), &expected)) {
      return absl::InvalidArgumentError(
          absl::StrCat("a piece of ", piece.count(), " elements of \"", matrix.Label(), "\""));
    }
  }
  if (expected == chunk.payload_bytes()) return absl::OkStatus();
  return SizeMismatch(absl::StrCat("payload of a chunk of rank ", stream.key.first),
                      chunk.payload_bytes(), expected, "bytes");
}

// Counts the chunk against the credit of its attempt. What belongs to an ended attempt is free.
absl::Status RunHost::CheckCredit(const v1::ChunkHeader& header, int64_t bytes) {
  Credit& credit = ranks_[header.sender().rank()].credit;
  if (header.step() != credit.step || header.attempt() != credit.attempt) return absl::OkStatus();
  const int64_t limit = credit.granted_bytes + environment_.options.credit_window_bytes;
  if (credit.consumed_bytes + bytes > limit) {
    return absl::ResourceExhaustedError(
        absl::StrCat("rank ", header.sender().rank(), " sent ", credit.consumed_bytes + bytes,
                     " bytes in step ", header.step(), ", the credit is ", credit.granted_bytes));
  }
  credit.consumed_bytes += bytes;
  return absl::OkStatus();
}

absl::Status RunHost::PlacePieces(const v1::ChunkHeader& header,
                                  std::vector<Placement>* placements) {
  if (targets_.empty())
    return absl::FailedPreconditionError("gradients are not taken before every rank has joined");
  const auto& targets = targets_[header.sender().rank()];
  const std::vector<BlockSpec>& blocks = machine_.ranks()[header.sender().rank()].push;
  const int64_t now = Now();
  for (const v1::Piece& piece : header.pieces()) {
    STIEFEL_ASSIGN_OR_RETURN(const PieceVerdict verdict, machine_.OnPiece(header, piece, now));
    Placement placement;
    if (!piece.absent()) {
      const MatrixSpec& matrix = spec_->matrices()[blocks[piece.block()].matrix];
      placement.bytes = piece.count() * DTypeSize(matrix.push_dtype);
    }
    if (verdict == PieceVerdict::kPlace) {
      const auto& [store, region] = targets[piece.block()];
      placement.target = store->PieceTarget(region, piece.part(), piece.offset());
    }
    placement.check = verdict != PieceVerdict::kStale && piece.has_crc32c() && !piece.absent();
    placements->push_back(placement);
  }
  return absl::OkStatus();
}

absl::Status RunHost::CopyPieces(IncomingChunk* chunk, std::vector<Placement>* placements) {
  absl::Status status;
  for (size_t i = 0; i < placements->size(); ++i) {
    Placement& placement = (*placements)[i];
    if (placement.bytes == 0) continue;
    const v1::Piece& piece = chunk->header().pieces(static_cast<int>(i));
    const uint32_t crc = placement.target != nullptr
                             ? chunk->CopyNext(placement.target, placement.bytes)
                             : chunk->SkipNext(placement.bytes);
    if (!placement.check || crc == piece.crc32c()) continue;
    placement.lost = true;
    status.Update(ChecksumMismatch(
        absl::StrCat("elements [", piece.offset(), ", ", piece.offset() + piece.count(),
                     ") of push block ", piece.block(), " of rank ",
                     chunk->header().sender().rank(), " in step ", chunk->header().step()),
        crc, piece.crc32c()));
  }
  return status;
}

absl::Status RunHost::OnChunk(uint64_t stream, IncomingChunk* chunk) {
  const v1::ChunkHeader& header = chunk->header();
  std::vector<Placement> placements;
  absl::Status refusal;
  {
    MutexLock lock(&mutex_);
    const auto found = data_.find(stream);
    if (found == data_.end()) return absl::CancelledError("the server ended this stream");
    STIEFEL_RETURN_IF_ERROR(CheckChunk(found->second, *chunk));
    STIEFEL_RETURN_IF_ERROR(CheckCredit(header, chunk->payload_bytes()));
    refusal = PlacePieces(header, &placements);
    if (placements.empty()) return refusal;
    if (trace_) trace_->Arrives(header, Now());
    bytes_pushed_ += chunk->payload_bytes();
    ++copies_;
  }
  refusal.Update(CopyPieces(chunk, &placements));
  Turn turn;
  {
    MutexLock lock(&mutex_);
    --copies_;
    const int64_t now = Now();
    // Under the placement before: what it wrote to is not read any more.
    const bool moved = header.sender().placement_epoch() != machine_.placement_epoch();
    for (size_t i = 0; i < placements.size() && !moved; ++i) {
      if (placements[i].target == nullptr) continue;
      const v1::Piece& piece = header.pieces(static_cast<int>(i));
      if (placements[i].lost) {
        machine_.OnPieceLost(header, piece);
      } else {
        machine_.OnPlaced(header, piece, now, &turn.actions);
      }
    }
    const Credit& credit = ranks_[header.sender().rank()].credit;
    if (header.step() == credit.step && header.attempt() == credit.attempt)
      GrantCredit(header.sender().rank(), /*always=*/false, &turn);
    MaybeSettle(&turn);
    Perform(&turn);
    ReleaseIfQuiet();
  }
  EndTurn(&turn);
  return refusal;
}

// The rank may always have one window more under way than was consumed; it is told so when a
// quarter of a window has become free, or `always`.
void RunHost::GrantCredit(int32_t rank, bool always, Turn* turn) {
  Credit& credit = ranks_[rank].credit;
  const Attempt& attempt = machine_.attempt();
  if (credit.step != attempt.step || credit.attempt != attempt.attempt) {
    if (!always) return;  // of an attempt that has ended meanwhile
    credit = Credit();
    credit.step = attempt.step;
    credit.attempt = attempt.attempt;
  }
  const int64_t window = environment_.options.credit_window_bytes;
  const int64_t granted = credit.consumed_bytes + window;
  if (!always && granted - credit.granted_bytes < window / 4) return;
  credit.granted_bytes = granted;
  action::SendControl send{rank, machine_.ranks()[rank].incarnation, {}};
  send.message.set_run_uid(spec_->opened().run_uid());
  send.message.set_placement_epoch(machine_.placement_epoch());
  v1::Credit* wire = send.message.mutable_credit();
  wire->set_step(credit.step);
  wire->set_attempt(credit.attempt);
  wire->set_granted_bytes(granted);
  Do(send, turn);
}

// ---------------------------------------------------------------- downwards

void RunHost::RefreshPulls(int32_t rank) {
  const RankState& state = machine_.ranks()[rank];
  RankIo& io = ranks_[rank];
  if (io.pulls_of == state.incarnation) return;
  io.pulls_of = state.incarnation;
  io.queue.Clear();  // blocks of another life
  io.pulls.clear();
  for (int32_t b = 0; b < static_cast<int32_t>(state.pull.size()); ++b) {
    if (spec_->Owns(state.pull[b].matrix)) io.pulls[state.pull[b].matrix].push_back(b);
  }
}

void RunHost::Enqueue(int32_t rank, int32_t block, const MatrixStore& store) {
  const MatrixUpdate& update = *store.update();
  PullItem item;
  item.type = v1::ChunkHeader::UPDATE;
  item.step = update.key.step;
  item.attempt = update.key.attempt;
  item.round = update.key.round;
  item.block = block;
  item.absent = update.absent;
  if (!update.absent) {
    if (update.buffer == nullptr) return;  // not finite: nobody will apply it
    item.rect = machine_.ranks()[rank].pull[block].rect;
    item.matrix_cols = store.spec().cols;
    item.matrix = update.buffer->data();
    item.source = item.wire = store.spec().pull_dtype;
    item.pin = SharedBuffer::Pin(update.buffer);
  }
  ranks_[rank].queue.Push(std::move(item));
}

void RunHost::EnqueueWeights(int32_t rank, int32_t block, const MatrixStore& store) {
  PullItem item;
  item.type = v1::ChunkHeader::WEIGHTS_AT;
  item.step = machine_.consumed_step();
  item.block = block;
  item.rect = machine_.ranks()[rank].pull[block].rect;
  item.matrix_cols = store.spec().cols;
  item.matrix = store.weights()->data();
  item.source = DType::kFp32;
  item.wire = store.spec().pull_dtype;
  item.pin = SharedBuffer::Pin(store.weights());
  ranks_[rank].queue.Push(std::move(item));
}

// Gives every idle stream of the rank a chunk.
void RunHost::Pump(int32_t rank, Turn* turn) {
  RankIo& io = ranks_[rank];
  for (const uint64_t id : io.data_streams) {
    if (io.queue.empty()) return;
    DataStream& stream = data_.at(id);
    if (stream.writing || stream.key.second != io.pulls_of) continue;
    stream.writing = true;
    DataWrite write{stream.sink, io.queue.TakeChunk(), {}};
    bytes_pulled_ += write.plan.payload_bytes;
    if (trace_) trace_->Sends(id, rank, write.plan, Now());
    write.receiver.set_run_uid(spec_->opened().run_uid());
    write.receiver.set_placement_epoch(machine_.placement_epoch());
    write.receiver.set_rank(rank);
    *write.receiver.mutable_incarnation() = io.pulls_of.ToProto();
    turn->writes.push_back(std::move(write));
  }
}

}  // namespace stiefel
