#include "server/streams.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "common/status.h"
#include "proto/chunk_codec.h"
#include "server/unknown_fields.h"

namespace stiefel {
namespace {

// Control messages that a slow reader may leave unread. Credits are the most frequent ones.
constexpr size_t kMaxControlQueue = 4096;
// The host writes one chunk at a time.
constexpr size_t kMaxDataQueue = 2;

// The peer has closed its half, or sent what is no message: gRPC does not tell which.
absl::Status EndOfReading(bool known) {
  if (known) return absl::OkStatus();
  return absl::InvalidArgumentError("the stream ended before a readable Hello");
}

}  // namespace

// ---------------------------------------------------------------- control

ControlStream::ControlStream(grpc::CallbackServerContext* context, StreamRegistry* registry,
                             const Clock* clock, OptimizerServer* server)
    : BidiStream(context, registry, clock, kMaxControlQueue), server_(server) {}

absl::Status ControlStream::Open() {
  if (!message_.has_hello())
    return absl::InvalidArgumentError("the first message of a control stream must be Hello");
  STIEFEL_ASSIGN_OR_RETURN(std::shared_ptr<RunHost> run,
                           server_->FindRun(message_.sender().run_uid()));
  STIEFEL_ASSIGN_OR_RETURN(
      id_, run->OpenControl(message_.sender(),
                            std::static_pointer_cast<ControlStream>(shared_from_this())));
  run_ = std::move(run);
  SetKnown();
  return absl::OkStatus();
}

void ControlStream::OnReadDone(bool ok) {
  if (!ok) return End(EndOfReading(run_ != nullptr));
  absl::Status status = RefuseUnknownFields(message_);
  if (status.ok() && run_ == nullptr) {
    status = Open();
  } else if (status.ok()) {
    run_->OnControlMessage(id_, message_);
  }
  if (!status.ok()) return End(status);
  if (ending()) return;
  message_.Clear();
  Read();
}

void ControlStream::OnEnded() {
  if (run_ != nullptr) run_->OnControlClosed(id_);
  run_.reset();
}

// ---------------------------------------------------------------- data

DataChannel::DataChannel(grpc::CallbackServerContext* context, StreamRegistry* registry,
                         const Clock* clock, OptimizerServer* server)
    : BidiStream(context, registry, clock, kMaxDataQueue), server_(server) {}

void DataChannel::Write(OutgoingChunk chunk) { Enqueue(EncodeChunk(std::move(chunk))); }

// One message: the HELLO that opens the stream, or gradients.
absl::Status DataChannel::Take() {
  STIEFEL_ASSIGN_OR_RETURN(ReceivedChunk chunk, ReceivedChunk::Parse(message_));
  if (run_ != nullptr) return run_->OnChunk(id_, &chunk);
  if (chunk.header().type() != v1::ChunkHeader::HELLO)
    return absl::InvalidArgumentError("the first chunk of a data stream must be of type HELLO");
  STIEFEL_RETURN_IF_ERROR(RefuseUnknownFields(chunk.header()));
  STIEFEL_ASSIGN_OR_RETURN(run_, server_->FindRun(chunk.header().sender().run_uid()));
  const absl::StatusOr<uint64_t> id = run_->OpenData(
      chunk.header().sender(), std::static_pointer_cast<DataChannel>(shared_from_this()));
  if (!id.ok()) {
    run_.reset();
    return id.status();
  }
  id_ = *id;
  SetKnown();
  bool written_early;
  {
    MutexLock lock(&name_mutex_);
    named_ = true;
    written_early = written_early_;
  }
  if (written_early) run_->OnDataWritten(id_);
  return absl::OkStatus();
}

void DataChannel::OnReadDone(bool ok) {
  if (!ok) return End(EndOfReading(run_ != nullptr));
  const absl::Status status = Take();
  message_.Clear();
  if (!status.ok()) return End(status);
  if (!ending()) Read();
}

void DataChannel::OnWritten() {
  {
    MutexLock lock(&name_mutex_);
    if (!named_) {
      written_early_ = true;
      return;
    }
  }
  run_->OnDataWritten(id_);
}

void DataChannel::OnEnded() {
  if (run_ != nullptr) run_->OnDataClosed(id_);
  run_.reset();
}

// ---------------------------------------------------------------- initial weights

absl::Status InitWeightsCall::Take() {
  STIEFEL_ASSIGN_OR_RETURN(ReceivedChunk chunk, ReceivedChunk::Parse(message_));
  STIEFEL_ASSIGN_OR_RETURN(const std::shared_ptr<RunHost> run,
                           server_->FindRun(chunk.header().sender().run_uid()));
  STIEFEL_ASSIGN_OR_RETURN(const WeightsInit::Progress progress, run->TakeInitWeights(&chunk));
  answer_.set_accepted_elements(answer_.accepted_elements() + progress.accepted_elements);
  answer_.set_complete(progress.complete);
  return absl::OkStatus();
}

void InitWeightsCall::OnReadDone(bool ok) {
  if (!ok) {  // the trainer has sent all it has
    const std::string bytes = answer_.SerializeAsString();
    const grpc::Slice slice(bytes);
    *response_ = grpc::ByteBuffer(&slice, 1);
    return Finish(grpc::Status::OK);
  }
  const absl::Status status = Take();
  message_.Clear();
  if (!status.ok()) return Finish(ToGrpcStatus(status));
  StartRead(&message_);
}

}  // namespace stiefel
