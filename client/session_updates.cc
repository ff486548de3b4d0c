// What servers send down, and taking it in; initial weights.
#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "client/apply.h"
#include "client/session.h"
#include "common/checksum.h"
#include "common/clock.h"
#include "common/errors.h"
#include "common/status.h"

namespace stiefel {
namespace {

int64_t Now() { return RealClock().NowMicros(); }

v1::DataType ToProto(DType dtype) {
  return dtype == DType::kBf16 ? v1::BF16 : dtype == DType::kFp16 ? v1::FP16 : v1::FP32;
}

}  // namespace

// ---------------------------------------------------------------- arriving chunks

// Memory for the version of the block that the chunk is of. REQUIRES: the machine said kPlace.
char* Session::PlaceFor(const v1::ChunkHeader& header, int32_t block,
                        std::shared_ptr<Buffer>* buffer) {
  Pulled& pulled = pulled_[block];
  const bool same = pulled.step == header.step() && pulled.attempt == header.attempt() &&
                    pulled.round == header.round() && pulled.type == header.type();
  if (!same) {
    pulled.step = header.step();
    pulled.attempt = header.attempt();
    pulled.round = header.round();
    pulled.type = header.type();
    pulled.absent = pulled.applied = false;
  }
  // A copy of an older version may still write to the old memory; nothing reads it again.
  if (!pulled.buffer || (!same && pulled.buffer->users > 0)) {
    pulled.buffer = std::make_shared<Buffer>();
    pulled.buffer->bytes.reset(new char[static_cast<size_t>(layout_.pull()[block].bytes())]);
  }
  ++pulled.buffer->users;
  *buffer = pulled.buffer;
  return pulled.buffer->bytes.get();
}

// What to do with each piece. DATA_LOSS: sizes that do not add up.
absl::Status Session::AdmitChunk(int32_t server, const IncomingChunk& chunk,
                                 std::vector<Copy>* copies) {
  const v1::ChunkHeader& header = chunk.header();
  int64_t left = chunk.payload_bytes();
  for (const v1::Piece& piece : header.pieces()) {
    if (piece.block() < 0 || piece.block() >= static_cast<int32_t>(layout_.pull().size())) {
      return absl::DataLossError(absl::StrCat("a chunk of step ", header.step(),
                                              " names pull block ", piece.block(), " of ",
                                              layout_.pull().size()));
    }
    const LayoutBlock& block = layout_.pull()[piece.block()];
    const int64_t size = DTypeSize(block.dtype);
    Copy copy;
    copy.block = piece.block();
    if (!piece.absent()) {
      if (piece.count() < 0 || piece.count() > left / size) {
        return absl::DataLossError(absl::StrCat("a chunk of step ", header.step(), " has ", left,
                                                " bytes left for ", piece.count(), " elements of ",
                                                layout_.Describe(block)));
      }
      copy.bytes = piece.count() * size;
      left -= copy.bytes;
    }
    copy.verdict = trainer_->OnUpdate(server, header, piece);
    if (copy.verdict == UpdateVerdict::kPlace) {
      copy.target = PlaceFor(header, copy.block, &copy.buffer) + piece.offset() * size;
    } else if (piece.absent() && copy.verdict == UpdateVerdict::kDuplicate) {
      pulled_[copy.block].absent = true;
    }
    copies->push_back(std::move(copy));
  }
  if (left == 0) return absl::OkStatus();
  return absl::DataLossError(absl::StrCat("a chunk of step ", header.step(), " has ", left,
                                          " bytes more than its pieces"));
}

void Session::OnChunk(int32_t server, Link* link, IncomingChunk* chunk) {
  const v1::ChunkHeader& header = chunk->header();
  std::vector<Copy> copies;
  absl::Status admitted;
  {
    MutexLock lock(&mutex_);
    if (link->closing || header.sender().run_uid() != sender_.run_uid() ||
        header.sender().placement_epoch() != sender_.placement_epoch()) {
      return;
    }
    servers_[server].heard = Now();
    if (header.type() != v1::ChunkHeader::UPDATE && header.type() != v1::ChunkHeader::WEIGHTS_AT) {
      return;
    }
    admitted = AdmitChunk(server, *chunk, &copies);
  }
  for (int i = 0; admitted.ok() && i < static_cast<int>(copies.size()); ++i) {
    Copy& copy = copies[i];
    if (copy.bytes == 0) continue;
    if (copy.verdict != UpdateVerdict::kPlace) {
      chunk->SkipNext(copy.bytes);
      continue;
    }
    const uint32_t crc = chunk->CopyNext(copy.target, copy.bytes);
    copy.intact = !header.pieces(i).has_crc32c() || header.pieces(i).crc32c() == crc;
    if (!copy.intact) {
      admitted =
          ChecksumMismatch(absl::StrCat("update of ", layout_.Describe(layout_.pull()[copy.block])),
                           crc, header.pieces(i).crc32c());
    }
  }
  MutexLock lock(&mutex_);
  for (int i = 0; i < static_cast<int>(copies.size()); ++i) {
    if (!copies[i].buffer) continue;
    --copies[i].buffer->users;
    if (admitted.ok()) {
      trainer_->OnUpdatePlaced(header, header.pieces(i));
      timings_.bytes_pulled += copies[i].bytes;
    }
  }
  ++timings_.chunks_pulled;
  // TCP has its own checksums: bytes that are wrong here were wrong when they were sent.
  if (!admitted.ok()) Fail(AtServer(servers_[server].address, admitted));
  changed_.NotifyAll();
}

// ---------------------------------------------------------------- applying

absl::StatusOr<Session::Pulled*> Session::ReadyBlock(int32_t pull_block) {
  STIEFEL_RETURN_IF_ERROR(FinalError());
  if (pull_block < 0 || pull_block >= static_cast<int32_t>(pulled_.size())) {
    return IndexOutOfRange("pull block", pull_block, pulled_.size());
  }
  const LayoutBlock& block = layout_.pull()[pull_block];
  if (!trainer_->BlockReady(pull_block)) {
    return absl::FailedPreconditionError(absl::StrCat("the update of ", layout_.Describe(block),
                                                      " for step ", trainer_->target(),
                                                      " is not here yet; Wait for it first"));
  }
  Pulled& pulled = pulled_[pull_block];
  if (!trainer_->has_weights()) return pulled.buffer ? &pulled : nullptr;
  if (decided_->outcome() == v1::SKIP || pulled.absent || !pulled.buffer) return nullptr;
  const auto& skipped = decided_->skipped_matrices();
  const bool left_out = std::find(skipped.begin(), skipped.end(), block.parameter) != skipped.end();
  return left_out ? nullptr : &pulled;
}

absl::StatusOr<TensorView> Session::Delta(int32_t pull_block) {
  Caller caller(this);
  MutexLock lock(&mutex_);
  STIEFEL_ASSIGN_OR_RETURN(const Pulled* pulled, ReadyBlock(pull_block));
  const LayoutBlock& block = layout_.pull()[pull_block];
  if (pulled == nullptr) {
    return absl::NotFoundError(
        absl::StrCat(layout_.Describe(block), " has no update in step ", trainer_->target()));
  }
  return TensorView{pulled->buffer->bytes.get(),
                    ToElementType(block.dtype),
                    {block.rect.rows(), block.rect.cols()},
                    {}};
}

absl::Status Session::Apply(int32_t pull_block, const MutableTensorView& weights,
                            const ApplyOptions& options) {
  Caller caller(this);
  const int64_t start = Now();
  if (pull_block < 0 || pull_block >= static_cast<int32_t>(layout_.pull().size())) {
    return IndexOutOfRange("pull block", pull_block, layout_.pull().size());
  }
  const LayoutBlock& block = layout_.pull()[pull_block];
  const ParameterSpec& parameter = layout_.parameters()[block.parameter];
  const bool delta = layout_.options().mode == UpdateMode::kDelta;
  STIEFEL_ASSIGN_OR_RETURN(const Walk2d walk,
                           CheckView(weights, block.rect.rows(), block.rect.cols(),
                                     "weights of " + layout_.Describe(block)));
  if (delta && walk.type != ElementType::kFp32 &&
      !(walk.type == ElementType::kBf16 && options.stochastic_rounding)) {
    return absl::InvalidArgumentError(absl::StrCat(
        "weights of ", layout_.Describe(block), " are ", ElementTypeName(walk.type),
        ": in DELTA mode most small deltas would round away; keep fp32 weights, use WEIGHTS mode, ",
        "or ask for stochastic rounding of bf16"));
  }
  std::shared_ptr<Buffer> buffer;
  double lr = 0;
  double weight_decay = 0;
  uint64_t seed = 0;
  {
    MutexLock lock(&mutex_);
    STIEFEL_ASSIGN_OR_RETURN(Pulled * pulled, ReadyBlock(pull_block));
    if (pulled == nullptr) return absl::OkStatus();
    if (pulled->applied) {
      return absl::FailedPreconditionError(absl::StrCat("the update of ", layout_.Describe(block),
                                                        " for step ", trainer_->target(),
                                                        " was applied before"));
    }
    pulled->applied = true;
    buffer = pulled->buffer;
    ++buffer->users;
    const auto group = step_options_.groups.find(parameter.group);
    const GroupOptions fields =
        group == step_options_.groups.end() ? GroupOptions() : group->second;
    lr = options.lr.value_or(fields.lr.value_or(parameter.rule.lr));
    weight_decay =
        options.weight_decay.value_or(fields.weight_decay.value_or(parameter.rule.weight_decay));
    seed = MixBits(options.stochastic_rounding.value_or(0) ^
                   MixBits(static_cast<uint64_t>(trainer_->target()) * 0x100000001B3u +
                           static_cast<uint64_t>(pull_block)));
  }
  const float decay = static_cast<float>(1.0 - lr * weight_decay);
  if (!delta) {
    CopyWeights(buffer->bytes.get(), block.dtype, walk);
  } else if (walk.type == ElementType::kFp32) {
    ApplyDelta(buffer->bytes.get(), block.dtype, decay, walk);
  } else {
    ApplyDeltaBf16(buffer->bytes.get(), block.dtype, decay, seed, walk);
  }
  MutexLock lock(&mutex_);
  --buffer->users;
  timings_.apply_s += static_cast<double>(Now() - start) / 1e6;
  return absl::OkStatus();
}

// ---------------------------------------------------------------- initial weights

namespace {

// Rectangles of at most `elements` elements that make up `rect`, row-major one after the other.
std::vector<Rect> CutRect(const Rect& rect, int64_t elements) {
  std::vector<Rect> pieces;
  const int64_t cols = rect.cols();
  const int64_t rows = std::max<int64_t>(1, elements / cols);
  for (int64_t row = rect.row_begin; row < rect.row_end; row += rows) {
    const int64_t row_end = std::min(rect.row_end, row + rows);
    for (int64_t col = rect.col_begin; col < rect.col_end; col += elements) {
      const int64_t col_end = rows > 1 ? rect.col_end : std::min(rect.col_end, col + elements);
      pieces.push_back({row, row_end, col, col_end});
      if (rows > 1) break;
    }
  }
  return pieces;
}

struct Reply {
  Mutex mutex;
  CondVar changed;
  bool done ABSL_GUARDED_BY(mutex) = false;
  absl::Status status ABSL_GUARDED_BY(mutex);
  std::string response ABSL_GUARDED_BY(mutex);
};

}  // namespace

absl::Status Session::InitWeights(int32_t parameter, const Rect& rect, const TensorView& weights) {
  Caller caller(this);
  const ParameterSpec& spec = layout_.parameters()[parameter];
  const std::string what = absl::StrCat("weights of \"", spec.name, "\" ", rect.DebugString());
  if (layout_.options().mode != UpdateMode::kWeights) {
    return absl::FailedPreconditionError(what + ": in DELTA mode servers hold no weights");
  }
  if (absl::Status valid = ValidateRect(rect, spec.rows(), spec.cols()); !valid.ok()) {
    return absl::Status(valid.code(), absl::StrCat(what, ": ", valid.message()));
  }
  STIEFEL_ASSIGN_OR_RETURN(const Walk2d walk, CheckView(weights, rect.rows(), rect.cols(), what));
  const DType dtype = walk.type == ElementType::kBf16   ? DType::kBf16
                      : walk.type == ElementType::kFp16 ? DType::kFp16
                                                        : DType::kFp32;
  const int64_t size = DTypeSize(dtype);
  std::unique_ptr<char[]> staging;
  const char* data = walk.data;
  if (!walk.contiguous || walk.type == ElementType::kFp64) {
    staging.reset(new char[static_cast<size_t>(rect.Area() * size)]);
    CopyAs(walk, dtype, staging.get());
    data = staging.get();
  }
  ServerConnection* connection = nullptr;
  v1::Sender sender;
  const int32_t server = owners_[parameter];
  {
    MutexLock lock(&mutex_);
    STIEFEL_RETURN_IF_ERROR(FinalError());
    connection = servers_[server].connection.get();
    sender = sender_;
  }
  // The loans of this call alone: gradients may be under way at the same time.
  const auto lent = std::make_shared<BorrowedMemory>();
  std::vector<OutgoingChunk> chunks;
  for (const Rect& piece : CutRect(rect, chunk_bytes_ / size)) {
    OutgoingChunk chunk;
    chunk.header.set_type(v1::ChunkHeader::INIT_WEIGHTS);
    *chunk.header.mutable_sender() = sender;
    v1::Piece* wire = chunk.header.add_pieces();
    wire->set_block(parameter);
    wire->set_count(piece.Area());
    wire->set_dtype(ToProto(dtype));
    wire->mutable_rect()->set_row_begin(piece.row_begin);
    wire->mutable_rect()->set_row_end(piece.row_end);
    wire->mutable_rect()->set_col_begin(piece.col_begin);
    wire->mutable_rect()->set_col_end(piece.col_end);
    const size_t bytes = static_cast<size_t>(piece.Area() * size);
    wire->set_crc32c(Crc32c(data, bytes));
    chunk.payload.push_back({data, bytes});
    chunk.keepalive = lent->Lend();
    chunks.push_back(std::move(chunk));
    data += bytes;
  }
  const auto reply = std::make_shared<Reply>();
  connection->InitWeights(std::move(chunks),
                          absl::ToInt64Microseconds(layout_.options().join_timeout),
                          [reply](const absl::Status& status, const std::string& response) {
                            MutexLock lock(&reply->mutex);
                            reply->done = true;
                            reply->status = OwnCopy(status);
                            reply->response = response;
                            reply->changed.NotifyAll();
                          });
  v1::InitWeightsResponse response;
  {
    MutexLock lock(&reply->mutex);
    while (!reply->done) reply->changed.Wait(&reply->mutex);
    while (!lent->WaitReturned(Now() + 1000000)) {
    }
    if (!reply->status.ok()) {
      return AtServer(layout_.options().servers[server], reply->status);
    }
    if (!response.ParseFromString(reply->response)) {
      return AtServer(layout_.options().servers[server],
                      absl::DataLossError("the response to InitWeights does not parse"));
    }
  }
  MutexLock lock(&mutex_);
  if (response.complete()) servers_[server].weights_needed = false;
  return absl::OkStatus();
}

}  // namespace stiefel
