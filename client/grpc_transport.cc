#include "client/grpc_transport.h"

#include <chrono>
#include <deque>
#include <set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/grpc_status.h"
#include "common/mutex.h"
#include "grpcpp/generic/generic_stub.h"
#include "grpcpp/grpcpp.h"
#include "grpcpp/support/client_callback.h"
#include "proto/chunk_codec.h"
#include "proto/grpc_channel.h"

namespace stiefel {
namespace {

using grpc::ByteBuffer;
using Reactor = grpc::ClientBidiReactor<ByteBuffer, ByteBuffer>;

constexpr char kService[] = "/stiefel.v1.Optimizer/";

ByteBuffer ToByteBuffer(const std::string& bytes) {
  const grpc::Slice slice(bytes);
  return ByteBuffer(&slice, 1);
}

std::string ToBytes(const ByteBuffer& buffer) {
  std::vector<grpc::Slice> slices;
  std::string bytes;
  if (!buffer.Valid() || !buffer.Dump(&slices).ok()) return bytes;
  bytes.reserve(buffer.Length());
  for (const grpc::Slice& slice : slices) {
    bytes.append(reinterpret_cast<const char*>(slice.begin()), slice.size());
  }
  return bytes;
}

// The one place where a trainer's credentials are made.
std::shared_ptr<grpc::Channel> MakeChannel(const std::string& address) {
  return MakeGrpcChannel(address, grpc::InsecureChannelCredentials());
}

// A bidirectional stream of byte buffers. It ends in one way only: the read that is always
// outstanding fails, then OnDone.
class StreamBase : public Reactor {
 public:
  void Start(grpc::GenericStub* stub, const std::string& method) {
    stub->PrepareBidiStreamingCall(&context_, kService + method, grpc::StubOptions(), this);
    AddHold();  // until the read fails: writes start outside of reactions
    StartRead(&in_);
    StartCall();
  }

 protected:
  virtual void OnMessage(const ByteBuffer& message) = 0;

  void CancelCall() { context_.TryCancel(); }

  // The stream ends with this status instead of gRPC's.
  void Fail(const absl::Status& why) {
    {
      MutexLock lock(&mutex_);
      failure_ = why;
    }
    context_.TryCancel();
  }

  absl::Status FinalStatus(const grpc::Status& status) {
    MutexLock lock(&mutex_);
    return failure_.ok() ? FromGrpcStatus(status) : failure_;
  }

  Mutex mutex_;
  bool ended_ ABSL_GUARDED_BY(mutex_) = false;
  absl::Status failure_ ABSL_GUARDED_BY(mutex_);

 private:
  void OnReadDone(bool ok) final {
    if (ok) {
      OnMessage(in_);
      in_.Clear();
      return StartRead(&in_);
    }
    {
      MutexLock lock(&mutex_);
      ended_ = true;
    }
    RemoveHold();
  }

  grpc::ClientContext context_;
  ByteBuffer in_;
};

class GrpcControlStream final : public ClientControlStream, public StreamBase {
 public:
  explicit GrpcControlStream(ControlListener* listener) : listener_(listener) {}

  void Send(const v1::TrainerMessage& message) override {
    MutexLock lock(&mutex_);
    if (ended_) return;
    queue_.push_back(ToByteBuffer(message.SerializeAsString()));
    if (queue_.size() == 1) StartWrite(&queue_.front());
  }
  void Cancel() override { CancelCall(); }

 private:
  void OnMessage(const ByteBuffer& bytes) override {
    v1::ServerMessage message;
    if (!message.ParseFromString(ToBytes(bytes))) {
      return Fail(absl::DataLossError(
          absl::StrCat("a control message of ", bytes.Length(), " bytes does not parse")));
    }
    listener_->OnMessage(message);
  }
  void OnWriteDone(bool ok) override {
    MutexLock lock(&mutex_);
    queue_.pop_front();
    if (ok && !ended_ && !queue_.empty()) StartWrite(&queue_.front());
  }
  void OnDone(const grpc::Status& status) override { listener_->OnClosed(FinalStatus(status)); }

  ControlListener* const listener_;
  std::deque<ByteBuffer> queue_ ABSL_GUARDED_BY(mutex_);  // the first one is being written
};

class GrpcDataStream final : public ClientDataStream, public StreamBase {
 public:
  explicit GrpcDataStream(DataListener* listener) : listener_(listener) {}

  void Send(OutgoingChunk chunk) override {
    ByteBuffer message = EncodeChunk(std::move(chunk));
    MutexLock lock(&mutex_);
    if (ended_) return;
    out_.Swap(&message);
    StartWrite(&out_);
  }
  void Cancel() override { CancelCall(); }

 private:
  void OnMessage(const ByteBuffer& bytes) override {
    absl::StatusOr<ReceivedChunk> chunk = ReceivedChunk::Parse(bytes);
    if (!chunk.ok()) return Fail(chunk.status());
    listener_->OnChunk(&*chunk);
  }
  void OnWriteDone(bool ok) override {
    ByteBuffer done;
    {
      MutexLock lock(&mutex_);
      out_.Swap(&done);
    }
    if (ok) listener_->OnSent();
  }
  void OnDone(const grpc::Status& status) override { listener_->OnClosed(FinalStatus(status)); }

  DataListener* const listener_;
  ByteBuffer out_ ABSL_GUARDED_BY(mutex_);
};

// A unary call.
struct PendingCall {
  grpc::ClientContext context;
  ByteBuffer request;
  ByteBuffer response;
};

// InitWeights: many messages up, one down.
class InitWeightsCall final : public Reactor {
 public:
  using Finish = std::function<void(InitWeightsCall*, const absl::Status&, const std::string&)>;
  InitWeightsCall(std::vector<OutgoingChunk> chunks, int64_t timeout_micros, Finish finish)
      : chunks_(std::move(chunks)), finish_(std::move(finish)) {
    context_.set_deadline(std::chrono::system_clock::now() +
                          std::chrono::microseconds(timeout_micros));
  }

  void Start(grpc::GenericStub* stub) {
    stub->PrepareBidiStreamingCall(&context_, std::string(kService) + "InitWeights",
                                   grpc::StubOptions(), this);
    StartRead(&in_);
    WriteNext();
    StartCall();
  }
  void Cancel() { context_.TryCancel(); }

 private:
  void WriteNext() {
    if (next_ == chunks_.size()) return StartWritesDone();
    out_ = EncodeChunk(std::move(chunks_[next_++]));
    StartWrite(&out_);
  }
  void OnWriteDone(bool ok) override {
    out_.Clear();
    if (ok) WriteNext();
  }
  void OnReadDone(bool ok) override {
    if (!ok) return;
    response_ = ToBytes(in_);
    StartRead(&in_);
  }
  void OnDone(const grpc::Status& status) override {
    chunks_.clear();
    finish_(this, FromGrpcStatus(status), response_);
  }

  grpc::ClientContext context_;
  std::vector<OutgoingChunk> chunks_;
  size_t next_ = 0;
  ByteBuffer in_;
  ByteBuffer out_;
  std::string response_;
  Finish finish_;
};

class GrpcConnection final : public ServerConnection {
 public:
  GrpcConnection(const std::string& address, int data_streams)
      : channel_(MakeChannel(address)), stub_(channel_) {
    for (int i = 0; i < data_streams; ++i) {
      data_channels_.push_back(MakeChannel(address));
      data_stubs_.push_back(std::make_unique<grpc::GenericStub>(data_channels_.back()));
    }
  }
  ~GrpcConnection() override {
    CancelCalls();
    MutexLock lock(&mutex_);
    while (outstanding_ > 0) none_left_.Wait(&mutex_);
  }

  void Call(const std::string& method, std::string request, int64_t timeout_micros,
            Done done) override {
    auto* call = new PendingCall;
    call->context.set_deadline(std::chrono::system_clock::now() +
                               std::chrono::microseconds(timeout_micros));
    call->request = ToByteBuffer(request);
    {
      MutexLock lock(&mutex_);
      calls_.insert(call);
      ++outstanding_;
    }
    stub_.UnaryCall(&call->context, kService + method, grpc::StubOptions(), &call->request,
                    &call->response, [this, call, done = std::move(done)](grpc::Status status) {
                      done(FromGrpcStatus(status), ToBytes(call->response));
                      Forget(&calls_, call);
                    });
  }

  void InitWeights(std::vector<OutgoingChunk> chunks, int64_t timeout_micros, Done done) override {
    auto* call = new InitWeightsCall(
        std::move(chunks), timeout_micros,
        [this, done = std::move(done)](InitWeightsCall* self, const absl::Status& status,
                                       const std::string& response) {
          const Done report = done;  // `self` owns this closure
          GrpcConnection* const connection = this;
          report(status, response);
          connection->Forget(&connection->init_calls_, self);
        });
    {
      MutexLock lock(&mutex_);
      init_calls_.insert(call);
      ++outstanding_;
    }
    call->Start(data_stubs_.empty() ? &stub_ : data_stubs_[0].get());
  }

  void CancelCalls() override {
    MutexLock lock(&mutex_);  // keeps them from being forgotten meanwhile
    for (PendingCall* call : calls_) call->context.TryCancel();
    for (InitWeightsCall* call : init_calls_) call->Cancel();
  }

  std::unique_ptr<ClientControlStream> OpenControl(ControlListener* listener) override {
    auto stream = std::make_unique<GrpcControlStream>(listener);
    stream->Start(&stub_, "Control");
    return stream;
  }
  std::unique_ptr<ClientDataStream> OpenData(int index, DataListener* listener) override {
    auto stream = std::make_unique<GrpcDataStream>(listener);
    stream->Start(data_stubs_[index].get(), "Data");
    return stream;
  }

 private:
  // The call is over. The destructor waits for the count, so the call's reference to the channel is
  // gone before ours, which keeps the last one off gRPC's threads.
  template <typename T>
  void Forget(std::set<T*>* calls, T* call) {
    {
      MutexLock lock(&mutex_);
      calls->erase(call);
    }
    delete call;
    MutexLock lock(&mutex_);
    if (--outstanding_ == 0) none_left_.NotifyAll();
  }

  const std::shared_ptr<grpc::Channel> channel_;
  grpc::GenericStub stub_;
  std::vector<std::shared_ptr<grpc::Channel>> data_channels_;
  std::vector<std::unique_ptr<grpc::GenericStub>> data_stubs_;

  Mutex mutex_;
  CondVar none_left_;
  std::set<PendingCall*> calls_ ABSL_GUARDED_BY(mutex_);
  std::set<InitWeightsCall*> init_calls_ ABSL_GUARDED_BY(mutex_);
  int outstanding_ ABSL_GUARDED_BY(mutex_) = 0;  // calls that are not deleted yet
};

class GrpcTransportImpl final : public Transport {
 public:
  std::unique_ptr<ServerConnection> Connect(const std::string& address, int data_streams) override {
    return std::make_unique<GrpcConnection>(address, data_streams);
  }
};

}  // namespace

Transport* GrpcTransport() {
  static Transport* const transport = new GrpcTransportImpl;
  return transport;
}

}  // namespace stiefel
