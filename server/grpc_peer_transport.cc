#include "server/grpc_peer_transport.h"

#include <chrono>
#include <utility>

#include "common/grpc_status.h"
#include "proto/grpc_channel.h"

namespace stiefel {

// One call. gRPC owns it from Start to OnDone, its caller as long as it likes.
class GrpcFetch final : public grpc::ClientReadReactor<v1::PeerChunk>,
                        public std::enable_shared_from_this<GrpcFetch> {
 public:
  GrpcFetch(GrpcPeerTransport* transport, int64_t timeout_micros, PeerTransport::OnChunk chunk,
            PeerTransport::Done done)
      : transport_(transport), chunk_(std::move(chunk)), done_(std::move(done)) {
    context_.set_deadline(std::chrono::system_clock::now() +
                          std::chrono::microseconds(timeout_micros));
  }

  grpc::ClientContext* context() { return &context_; }
  // REQUIRES: the call was made on context() with this reactor.
  void Start() {
    self_ = shared_from_this();
    StartRead(&in_);
    StartCall();
  }

  // Waits for a callback that runs; none runs after this.
  void Drop() {
    PeerTransport::OnChunk chunk;
    PeerTransport::Done done;
    {
      MutexLock lock(&mutex_);
      chunk.swap(chunk_);
      done.swap(done_);
    }
    context_.TryCancel();
  }

 private:
  void OnReadDone(bool ok) override {
    if (!ok) return;
    {
      MutexLock lock(&mutex_);
      if (chunk_ != nullptr) chunk_(std::move(in_));
    }
    in_.Clear();
    StartRead(&in_);
  }
  void OnDone(const grpc::Status& status) override {
    {
      MutexLock lock(&mutex_);
      if (done_ != nullptr) done_(FromGrpcStatus(status));
      chunk_ = nullptr;
      done_ = nullptr;
    }
    GrpcPeerTransport* const transport = transport_;
    self_.reset();  // perhaps the last owner; the transport still has the channel
    transport->OnCallOver();
  }

  GrpcPeerTransport* const transport_;
  grpc::ClientContext context_;
  v1::PeerChunk in_;
  std::shared_ptr<GrpcFetch> self_;
  Mutex mutex_;  // held while a callback runs
  PeerTransport::OnChunk chunk_ ABSL_GUARDED_BY(mutex_);
  PeerTransport::Done done_ ABSL_GUARDED_BY(mutex_);
};

namespace {

class GrpcPeerCall final : public PeerCall {
 public:
  explicit GrpcPeerCall(std::shared_ptr<GrpcFetch> fetch) : fetch_(std::move(fetch)) {}
  ~GrpcPeerCall() override { fetch_->Drop(); }

 private:
  const std::shared_ptr<GrpcFetch> fetch_;
};

}  // namespace

GrpcPeerTransport::~GrpcPeerTransport() {
  MutexLock lock(&mutex_);
  while (outstanding_ > 0) none_left_.Wait(&mutex_);
}

v1::Peer::Stub* GrpcPeerTransport::Begin(const std::string& address) {
  MutexLock lock(&mutex_);
  ++outstanding_;
  Connection& connection = connections_[address];
  if (connection.stub == nullptr) {
    connection.channel = MakeGrpcChannel(address, credentials_);
    connection.stub = v1::Peer::NewStub(connection.channel);
  }
  return connection.stub.get();
}

void GrpcPeerTransport::OnCallOver() {
  MutexLock lock(&mutex_);
  if (--outstanding_ == 0) none_left_.NotifyAll();
}

std::unique_ptr<PeerCall> GrpcPeerTransport::FetchPart(const std::string& address,
                                                       const v1::FetchPartRequest& request,
                                                       int64_t timeout_micros, OnChunk chunk,
                                                       Done done) {
  auto fetch = std::make_shared<GrpcFetch>(this, timeout_micros, std::move(chunk), std::move(done));
  Begin(address)->async()->FetchPart(fetch->context(), &request, fetch.get());
  fetch->Start();
  return std::make_unique<GrpcPeerCall>(std::move(fetch));
}

std::unique_ptr<PeerCall> GrpcPeerTransport::FetchState(const std::string& address,
                                                        const v1::FetchStateRequest& request,
                                                        int64_t timeout_micros, OnChunk chunk,
                                                        Done done) {
  auto fetch = std::make_shared<GrpcFetch>(this, timeout_micros, std::move(chunk), std::move(done));
  Begin(address)->async()->FetchState(fetch->context(), &request, fetch.get());
  fetch->Start();
  return std::make_unique<GrpcPeerCall>(std::move(fetch));
}

}  // namespace stiefel
