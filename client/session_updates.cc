// What servers send down, and taking it in.
#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "client/apply.h"
#include "client/session.h"
#include "common/checksum.h"
#include "common/clock.h"
#include "common/errors.h"
#include "common/status.h"

namespace stiefel {
namespace {

int64_t Now() { return RealClock().NowMicros(); }

// Writes a wire block (null: zeros) to its place in the memory of its block.
void CopyInto(const WireBlock& wire, const LayoutBlock& block, const char* source, char* target) {
  const int64_t size = DTypeSize(wire.dtype);
  const auto bytes = static_cast<size_t>(wire.rect.cols() * size);
  for (int64_t row = 0; row < wire.rect.rows(); ++row) {
    char* to =
        target +
        ((wire.in_block.row_begin + row) * block.rect.cols() + wire.in_block.col_begin) * size;
    if (source != nullptr) {
      std::memcpy(to, source + row * wire.rect.cols() * size, bytes);
    } else {
      std::memset(to, 0, bytes);
    }
  }
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
    pulled.buffer->bytes.reset(new char[static_cast<size_t>(layout_.wire_pull()[block].bytes())]);
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
    if (piece.block() < 0 || piece.block() >= static_cast<int32_t>(layout_.wire_pull().size())) {
      return absl::DataLossError(absl::StrCat("a chunk of step ", header.step(),
                                              " names pull block ", piece.block(), " of ",
                                              layout_.wire_pull().size()));
    }
    const WireBlock& block = layout_.wire_pull()[piece.block()];
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
    if (trace_) trace_->Arrives(header, Now());
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
      admitted = ChecksumMismatch(
          absl::StrCat("update of ", layout_.Describe(layout_.wire_pull()[copy.block])), crc,
          header.pieces(i).crc32c());
    }
  }
  MutexLock lock(&mutex_);
  for (int i = 0; i < static_cast<int>(copies.size()); ++i) {
    if (!copies[i].buffer) continue;
    --copies[i].buffer->users;
    if (admitted.ok()) {
      trainer_->OnUpdatePlaced(header, header.pieces(i));
      timings_.bytes_pulled += copies[i].bytes;
      if (trace_)
        trace_->Placed(copies[i].block, copies[i].bytes, trainer_->Complete(copies[i].block),
                       Now());
    }
  }
  ++timings_.chunks_pulled;
  // TCP has its own checksums: bytes that are wrong here were wrong when they were sent.
  if (!admitted.ok()) Fail(AtServer(servers_[server].address, admitted));
  changed_.NotifyAll();
}

// ---------------------------------------------------------------- applying

absl::StatusOr<Session::Pulled*> Session::Ready(int32_t wire) {
  STIEFEL_RETURN_IF_ERROR(FinalError());
  const WireBlock& block = layout_.wire_pull()[wire];
  if (!trainer_->BlockReady(wire)) {
    return absl::FailedPreconditionError(absl::StrCat("the update of ", layout_.Describe(block),
                                                      " for step ", trainer_->target(),
                                                      " is not here yet; Wait for it first"));
  }
  Pulled& pulled = pulled_[wire];
  if (!trainer_->has_weights()) return pulled.buffer ? &pulled : nullptr;
  if (decided_->outcome() == v1::SKIP || pulled.absent || !pulled.buffer) return nullptr;
  const auto& skipped = decided_->skipped_matrices();
  const bool left_out = std::find(skipped.begin(), skipped.end(), block.shard) != skipped.end();
  return left_out ? nullptr : &pulled;
}

// The updates of several shards put together, zeros where there is none. Made once a step.
absl::StatusOr<const char*> Session::JoinedDelta(int32_t pull_block) {
  const LayoutBlock& block = layout_.pull()[pull_block];
  std::vector<const Pulled*> parts;
  std::vector<std::string> missing;
  for (int32_t wire = block.first_wire; wire < block.first_wire + block.wires; ++wire) {
    STIEFEL_ASSIGN_OR_RETURN(const Pulled* pulled, Ready(wire));
    parts.push_back(pulled);
    if (pulled == nullptr) missing.push_back(layout_.Describe(layout_.wire_pull()[wire]));
  }
  const bool zeros = layout_.options().mode == UpdateMode::kDelta;
  if (parts.size() == missing.size() || (!zeros && !missing.empty())) {
    return absl::NotFoundError(
        absl::StrCat(absl::StrJoin(missing, ", "), " has no update in step ", trainer_->target()));
  }
  if (parts.size() == 1) return parts[0]->buffer->bytes.get();
  std::unique_ptr<char[]>& joined = joined_[pull_block];
  if (joined != nullptr) return joined.get();
  joined.reset(new char[static_cast<size_t>(block.bytes())]);
  for (size_t i = 0; i < parts.size(); ++i) {
    const WireBlock& wire = layout_.wire_pull()[block.first_wire + static_cast<int32_t>(i)];
    CopyInto(wire, block, parts[i] == nullptr ? nullptr : parts[i]->buffer->bytes.get(),
             joined.get());
  }
  return joined.get();
}

absl::StatusOr<TensorView> Session::Delta(int32_t pull_block) {
  Caller caller(this);
  if (pull_block < 0 || pull_block >= static_cast<int32_t>(layout_.pull().size())) {
    return IndexOutOfRange("pull block", pull_block, layout_.pull().size());
  }
  const LayoutBlock& block = layout_.pull()[pull_block];
  MutexLock lock(&mutex_);
  STIEFEL_ASSIGN_OR_RETURN(const char* data, JoinedDelta(pull_block));
  return TensorView{data, ToElementType(block.dtype), {block.rect.rows(), block.rect.cols()}, {}};
}

absl::Status Session::Apply(int32_t pull_block, const MutableTensorView& weights,
                            const ApplyOptions& options) {
  Caller caller(this);
  const int64_t start = Now();
  if (pull_block < 0 || pull_block >= static_cast<int32_t>(layout_.pull().size())) {
    return IndexOutOfRange("pull block", pull_block, layout_.pull().size());
  }
  const LayoutBlock& block = layout_.pull()[pull_block];
  STIEFEL_ASSIGN_OR_RETURN(const Walk walk, CheckView(weights, block.rect.rows(), block.rect.cols(),
                                                      "weights of " + layout_.Describe(block)));
  if (layout_.options().mode == UpdateMode::kDelta && walk.type != ElementType::kFp32 &&
      !(walk.type == ElementType::kBf16 && options.stochastic_rounding)) {
    return absl::InvalidArgumentError(absl::StrCat(
        "weights of ", layout_.Describe(block), " are ", ElementTypeName(walk.type),
        ": in DELTA mode most small deltas would round away; keep fp32 weights, use WEIGHTS mode, ",
        "or ask for stochastic rounding of bf16"));
  }
  std::vector<std::shared_ptr<Buffer>> buffers;  // by wire block; null: nothing to apply
  Application application;
  {
    MutexLock lock(&mutex_);
    STIEFEL_RETURN_IF_ERROR(TakeUpdates(block, &buffers));
    application = ApplicationOf(pull_block, options);
  }
  for (size_t i = 0; i < buffers.size(); ++i) {
    if (buffers[i] == nullptr) continue;
    const WireBlock& wire = layout_.wire_pull()[block.first_wire + static_cast<int32_t>(i)];
    const Walk part = walk.Part(wire.in_block);
    const char* update = buffers[i]->bytes.get();
    if (!application.delta) {
      CopyWeights(update, wire.dtype, part);
    } else if (walk.type == ElementType::kFp32) {
      ApplyDelta(update, wire.dtype, application.decay, part);
    } else {
      const int64_t cols = block.rect.cols();
      const int64_t first = wire.in_block.row_begin * cols + wire.in_block.col_begin;
      ApplyDeltaBf16(update, wire.dtype, application.decay, application.seed, first, cols, part);
    }
  }
  MutexLock lock(&mutex_);
  for (const std::shared_ptr<Buffer>& buffer : buffers) {
    if (buffer != nullptr) --buffer->users;
  }
  timings_.apply_s += static_cast<double>(Now() - start) / 1e6;
  if (trace_) trace_->Applied(pull_block, start, Now());
  return absl::OkStatus();
}

// All of the block's updates, or none and why.
absl::Status Session::TakeUpdates(const LayoutBlock& block,
                                  std::vector<std::shared_ptr<Buffer>>* buffers) {
  std::vector<Pulled*> parts;
  for (int32_t wire = block.first_wire; wire < block.first_wire + block.wires; ++wire) {
    STIEFEL_ASSIGN_OR_RETURN(Pulled * pulled, Ready(wire));
    parts.push_back(pulled);
    if (pulled == nullptr || !pulled->applied) continue;
    return absl::FailedPreconditionError(absl::StrCat("the update of ", layout_.Describe(block),
                                                      " for step ", trainer_->target(),
                                                      " was applied before"));
  }
  for (Pulled* pulled : parts) {
    buffers->push_back(pulled == nullptr ? nullptr : pulled->buffer);
    if (pulled == nullptr) continue;
    pulled->applied = true;
    ++pulled->buffer->users;
  }
  return absl::OkStatus();
}

Session::Application Session::ApplicationOf(int32_t pull_block, const ApplyOptions& options) const {
  const ParameterSpec& parameter = layout_.parameters()[layout_.pull()[pull_block].parameter];
  const auto group = step_options_.groups.find(parameter.group);
  const GroupOptions fields = group == step_options_.groups.end() ? GroupOptions() : group->second;
  const double lr = options.lr.value_or(fields.lr.value_or(parameter.rule.lr));
  const double weight_decay =
      options.weight_decay.value_or(fields.weight_decay.value_or(parameter.rule.weight_decay));
  Application application;
  application.delta = layout_.options().mode == UpdateMode::kDelta;
  application.decay = static_cast<float>(1.0 - lr * weight_decay);
  application.seed = MixBits(options.stochastic_rounding.value_or(0) ^
                             MixBits(static_cast<uint64_t>(trainer_->target()) * 0x100000001B3u +
                                     static_cast<uint64_t>(pull_block)));
  return application;
}

}  // namespace stiefel
