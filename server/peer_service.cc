#include "server/peer_service.h"

#include <deque>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/grpc_status.h"
#include "common/status.h"
#include "google/protobuf/io/coded_stream.h"
#include "google/protobuf/wire_format_lite.h"
#include "server/unknown_fields.h"

namespace stiefel {
namespace {

using google::protobuf::internal::WireFormatLite;

constexpr uint32_t kPayloadTag =
    (v1::PeerChunk::kPayloadFieldNumber << 3) | WireFormatLite::WIRETYPE_LENGTH_DELIMITED;
// Of one call, waiting to be written: a handler answers with less.
constexpr int64_t kMaxQueuedBytes = 16 << 20;

absl::Status GoneStatus() { return absl::CancelledError("the peer went away"); }

// The bytes of the serialized chunk, with the payload where it is.
grpc::ByteBuffer Encode(v1::PeerChunk chunk) {
  auto* const payload = new std::string(std::move(*chunk.mutable_payload()));
  chunk.clear_payload();
  std::string front = chunk.SerializeAsString();
  uint8_t tag_and_size[10];
  uint8_t* end =
      google::protobuf::io::CodedOutputStream::WriteTagToArray(kPayloadTag, tag_and_size);
  end = google::protobuf::io::CodedOutputStream::WriteVarint32ToArray(
      static_cast<uint32_t>(payload->size()), end);
  front.append(reinterpret_cast<const char*>(tag_and_size), end - tag_and_size);
  const grpc::Slice slices[] = {
      grpc::Slice(front), grpc::Slice(
                              payload->data(), payload->size(),
                              [](void* held) { delete static_cast<std::string*>(held); }, payload)};
  return grpc::ByteBuffer(slices, 2);
}

template <typename Request>
absl::StatusOr<Request> Parse(const grpc::ByteBuffer& bytes) {
  grpc::ByteBuffer copy(bytes);  // of references; deserializing consumes it
  Request request;
  if (!grpc::SerializationTraits<Request>::Deserialize(&copy, &request).ok())
    return absl::InvalidArgumentError(absl::StrCat(
        "a message of ", bytes.Length(), " bytes is not a ", request.GetDescriptor()->name()));
  STIEFEL_RETURN_IF_ERROR(RefuseUnknownFields(request));
  return request;
}

}  // namespace

// One call. gRPC owns it from Start to OnDone; replies share it.
class PeerServiceCall final : public grpc::ServerWriteReactor<grpc::ByteBuffer>,
                              public std::enable_shared_from_this<PeerServiceCall> {
 public:
  explicit PeerServiceCall(PeerService* service) : service_(service) {}

  void Start() { self_ = shared_from_this(); }

  void Write(v1::PeerChunk chunk) {
    const auto bytes = static_cast<int64_t>(chunk.payload().size());
    MutexLock lock(&mutex_);
    if (status_) return;
    if (queued_bytes_ + bytes > kMaxQueuedBytes) {
      status_ = absl::ResourceExhaustedError(
          absl::StrCat("an answer of more than ", kMaxQueuedBytes, " bytes"));
    } else {
      queued_bytes_ += bytes;
      queue_.push_back({Encode(std::move(chunk)), bytes});
    }
    Next();
  }
  void End(const absl::Status& status) {
    MutexLock lock(&mutex_);
    if (!status_) status_ = status;
    Next();
  }
  bool gone() const {
    MutexLock lock(&mutex_);
    return status_.has_value();
  }

 private:
  struct Queued {
    grpc::ByteBuffer message;
    int64_t bytes;
  };

  void OnWriteDone(bool ok) override {
    MutexLock lock(&mutex_);
    writing_ = false;
    queued_bytes_ -= queue_.front().bytes;
    queue_.pop_front();
    if (!ok) Abandon();
    Next();
  }
  void OnCancel() override {
    MutexLock lock(&mutex_);
    Abandon();
    Next();
  }
  void OnDone() override {
    const std::shared_ptr<PeerServiceCall> self = std::move(self_);
    service_->Remove(self);
  }

  // Nobody reads any more: what waits is dropped, but for what gRPC is writing.
  void Abandon() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    if (!status_) status_ = GoneStatus();
    while (queue_.size() > (writing_ ? 1 : 0)) {
      queued_bytes_ -= queue_.back().bytes;
      queue_.pop_back();
    }
  }
  // What was written goes out before the status.
  void Next() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    if (writing_ || finished_) return;
    if (!queue_.empty()) {
      writing_ = true;
      StartWrite(&queue_.front().message);
    } else if (status_) {
      finished_ = true;
      Finish(ToGrpcStatus(*status_));
    }
  }

  PeerService* const service_;
  std::shared_ptr<PeerServiceCall> self_;
  mutable Mutex mutex_;
  std::deque<Queued> queue_ ABSL_GUARDED_BY(mutex_);  // the front is being written
  int64_t queued_bytes_ ABSL_GUARDED_BY(mutex_) = 0;
  bool writing_ ABSL_GUARDED_BY(mutex_) = false;
  std::optional<absl::Status> status_ ABSL_GUARDED_BY(mutex_);  // how it is to end
  bool finished_ ABSL_GUARDED_BY(mutex_) = false;
};

namespace {

class ServiceReply final : public PeerReply {
 public:
  explicit ServiceReply(std::shared_ptr<PeerServiceCall> call) : call_(std::move(call)) {}
  ~ServiceReply() override {
    call_->End(absl::UnavailableError("the question was dropped; ask again"));
  }
  void Write(v1::PeerChunk chunk) override { call_->Write(std::move(chunk)); }
  void Finish(const absl::Status& status) override { call_->End(status); }
  bool caller_gone() const override { return call_->gone(); }

 private:
  const std::shared_ptr<PeerServiceCall> call_;
};

}  // namespace

template <typename Request>
grpc::ServerWriteReactor<grpc::ByteBuffer>* PeerService::Serve(
    const grpc::ByteBuffer& bytes,
    void (PeerHandler::*ask)(const Request&, std::unique_ptr<PeerReply>)) {
  auto call = std::make_shared<PeerServiceCall>(this);
  call->Start();
  const auto route = [&]() -> absl::Status {
    STIEFEL_RETURN_IF_ERROR(Add(call));
    STIEFEL_ASSIGN_OR_RETURN(const Request request, Parse<Request>(bytes));
    STIEFEL_ASSIGN_OR_RETURN(const std::shared_ptr<PeerHandler> run,
                             find_(request.sender().run_uid()));
    ((*run).*ask)(request, std::make_unique<ServiceReply>(call));
    return absl::OkStatus();
  };
  if (const absl::Status refused = route(); !refused.ok()) call->End(refused);
  return call.get();
}

grpc::ServerWriteReactor<grpc::ByteBuffer>* PeerService::FetchPart(
    grpc::CallbackServerContext*, const grpc::ByteBuffer* request) {
  return Serve<v1::FetchPartRequest>(*request, &PeerHandler::OnFetchPart);
}

grpc::ServerWriteReactor<grpc::ByteBuffer>* PeerService::FetchState(
    grpc::CallbackServerContext*, const grpc::ByteBuffer* request) {
  return Serve<v1::FetchStateRequest>(*request, &PeerHandler::OnFetchState);
}

absl::Status PeerService::Add(const std::shared_ptr<PeerServiceCall>& call) {
  MutexLock lock(&mutex_);
  if (!ending_.ok()) return ending_;
  if (static_cast<int>(calls_.size()) >= max_calls_)
    return absl::ResourceExhaustedError(
        absl::StrCat(calls_.size(), " calls of peers are open; no more are allowed"));
  calls_.insert(call);
  return absl::OkStatus();
}

void PeerService::Remove(const std::shared_ptr<PeerServiceCall>& call) {
  MutexLock lock(&mutex_);
  calls_.erase(call);
}

void PeerService::EndAll(const absl::Status& status) {
  std::set<std::shared_ptr<PeerServiceCall>> calls;
  {
    MutexLock lock(&mutex_);
    ending_ = status;
    calls = calls_;
  }
  for (const auto& call : calls) call->End(status);
}

}  // namespace stiefel
