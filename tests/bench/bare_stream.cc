#include "tests/bench/bare_stream.h"

#include <atomic>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/checksum.h"
#include "common/grpc_status.h"
#include "common/mutex.h"
#include "common/status.h"
#include "grpcpp/generic/async_generic_service.h"
#include "grpcpp/generic/generic_stub.h"
#include "grpcpp/grpcpp.h"

namespace stiefel {
namespace {

constexpr int kMessageLimit = 64 << 20;
constexpr char kMethod[] = "/bare.Stream/Send";

// The same transport settings on both sides of the comparison.
grpc::ChannelArguments Arguments() {
  grpc::ChannelArguments arguments;
  arguments.SetInt("grpc.use_local_subchannel_pool", 1);
  arguments.SetInt("grpc.enable_retries", 0);
  arguments.SetInt(GRPC_ARG_HTTP2_BDP_PROBE, 0);
  arguments.SetInt(GRPC_ARG_HTTP2_STREAM_LOOKAHEAD_BYTES, 8 << 20);
  arguments.SetMaxReceiveMessageSize(kMessageLimit);
  return arguments;
}

// Buffers that streams receive into, touched before the first use and handed from stream to stream.
class BufferPool {
 public:
  explicit BufferPool(int64_t buffer_bytes) : buffer_bytes_(buffer_bytes) {}
  std::unique_ptr<std::vector<char>> Take() {
    MutexLock lock(&mutex_);
    if (free_.empty()) return std::make_unique<std::vector<char>>(buffer_bytes_);
    auto buffer = std::move(free_.back());
    free_.pop_back();
    return buffer;
  }
  void Give(std::unique_ptr<std::vector<char>> buffer) {
    MutexLock lock(&mutex_);
    free_.push_back(std::move(buffer));
  }

 private:
  const int64_t buffer_bytes_;
  Mutex mutex_;
  std::vector<std::unique_ptr<std::vector<char>>> free_ ABSL_GUARDED_BY(mutex_);
};

class Receiver final : public grpc::ServerGenericBidiReactor {
 public:
  explicit Receiver(BufferPool* pool) : pool_(pool), buffer_(pool->Take()) { StartRead(&message_); }

  void OnReadDone(bool ok) override {
    if (!ok) {
      const std::string text = absl::StrCat(received_);
      grpc::Slice slice(text);
      answer_ = grpc::ByteBuffer(&slice, 1);
      StartWriteAndFinish(
          &answer_, grpc::WriteOptions(),
          bad_ ? grpc::Status(grpc::StatusCode::DATA_LOSS, "checksum") : grpc::Status::OK);
      return;
    }
    Take();
    StartRead(&message_);
  }
  void OnDone() override {
    pool_->Give(std::move(buffer_));
    delete this;
  }

 private:
  void Take() {
    std::vector<grpc::Slice> slices;
    if (!message_.Dump(&slices).ok()) bad_ = true;
    uint32_t stated = 0;
    size_t skip = sizeof(stated);
    uint32_t crc = 0;
    for (const grpc::Slice& slice : slices) {
      const uint8_t* data = slice.begin();
      size_t size = slice.size();
      const size_t head = std::min(skip, size);
      std::memcpy(reinterpret_cast<char*>(&stated) + (sizeof(stated) - skip), data, head);
      skip -= head;
      data += head;
      size -= head;
      if (at_ + size > buffer_->size()) at_ = 0;
      crc = CopyAndCrc32c(buffer_->data() + at_, data, size, crc);
      at_ += size;
      received_ += static_cast<int64_t>(size);
    }
    bad_ = bad_ || crc != stated;
  }

  BufferPool* const pool_;
  std::unique_ptr<std::vector<char>> buffer_;
  size_t at_ = 0;
  int64_t received_ = 0;
  bool bad_ = false;
  grpc::ByteBuffer message_;
  grpc::ByteBuffer answer_;
};

class Service final : public grpc::CallbackGenericService {
 public:
  explicit Service(int64_t buffer_bytes) : pool_(buffer_bytes) {}
  grpc::ServerGenericBidiReactor* CreateReactor(grpc::GenericCallbackServerContext*) override {
    return new Receiver(&pool_);
  }

 private:
  BufferPool pool_;
};

class BareServerImpl final : public BareServer {
 public:
  explicit BareServerImpl(int64_t buffer_bytes) : service_(buffer_bytes) {}
  ~BareServerImpl() override {
    if (server_) server_->Shutdown();
  }
  absl::Status Listen() {
    grpc::ServerBuilder builder;
    builder.AddListeningPort("127.0.0.1:0", grpc::InsecureServerCredentials(), &port_);
    builder.SetMaxReceiveMessageSize(kMessageLimit);
    builder.AddChannelArgument(GRPC_ARG_HTTP2_BDP_PROBE, 0);
    builder.AddChannelArgument(GRPC_ARG_HTTP2_STREAM_LOOKAHEAD_BYTES, 8 << 20);
    builder.RegisterCallbackGenericService(&service_);
    server_ = builder.BuildAndStart();
    return server_ ? absl::OkStatus() : absl::UnavailableError("no free loopback port");
  }
  int port() const override { return port_; }

 private:
  Service service_;
  std::unique_ptr<grpc::Server> server_;
  int port_ = 0;
};

// One stream of one Send: writes its share of the messages, one after the other.
class Sender final : public grpc::ClientBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer> {
 public:
  Sender(const char* data, int64_t bytes, int64_t message_bytes, std::atomic<int64_t>* next)
      : data_(data), bytes_(bytes), message_bytes_(message_bytes), next_(next) {}

  void Run(grpc::GenericStub* stub) {
    stub->PrepareBidiStreamingCall(&context_, kMethod, {}, this);
    StartRead(&answer_);
    WriteNext();
    StartCall();
  }
  void OnWriteDone(bool ok) override {
    if (ok) WriteNext();
  }
  void OnDone(const grpc::Status& status) override {
    MutexLock lock(&mutex_);
    done_ = true;
    status_ = status;
    ended_.NotifyAll();
  }
  absl::Status Await() {
    MutexLock lock(&mutex_);
    while (!done_) ended_.Wait(&mutex_);
    return FromGrpcStatus(status_);
  }

 private:
  void WriteNext() {
    const int64_t at = next_->fetch_add(message_bytes_);
    if (at >= bytes_) return StartWritesDone();
    const size_t size = static_cast<size_t>(std::min(message_bytes_, bytes_ - at));
    const uint32_t crc = Crc32c(data_ + at, size);
    const grpc::Slice slices[2] = {grpc::Slice(&crc, sizeof(crc)),
                                   grpc::Slice(data_ + at, size, grpc::Slice::STATIC_SLICE)};
    message_ = grpc::ByteBuffer(slices, 2);
    StartWrite(&message_);
  }

  const char* const data_;
  const int64_t bytes_;
  const int64_t message_bytes_;
  std::atomic<int64_t>* const next_;
  grpc::ClientContext context_;
  grpc::ByteBuffer message_;
  grpc::ByteBuffer answer_;
  Mutex mutex_;
  CondVar ended_;
  bool done_ ABSL_GUARDED_BY(mutex_) = false;
  grpc::Status status_ ABSL_GUARDED_BY(mutex_);
};

class BareClientImpl final : public BareClient {
 public:
  BareClientImpl(const std::string& target, int channels) {
    for (int i = 0; i < channels; ++i) {
      stubs_.push_back(std::make_unique<grpc::GenericStub>(
          grpc::CreateCustomChannel(target, grpc::InsecureChannelCredentials(), Arguments())));
    }
  }
  absl::Status Send(const char* data, int64_t bytes, int64_t message_bytes) override {
    std::atomic<int64_t> next{0};
    std::vector<std::unique_ptr<Sender>> senders;
    for (const auto& stub : stubs_) {
      senders.push_back(std::make_unique<Sender>(data, bytes, message_bytes, &next));
      senders.back()->Run(stub.get());
    }
    absl::Status first;
    for (const auto& sender : senders) {
      absl::Status status = sender->Await();
      if (first.ok()) first = status;
    }
    return first;
  }

 private:
  std::vector<std::unique_ptr<grpc::GenericStub>> stubs_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<BareServer>> BareServer::Start(int64_t buffer_bytes) {
  auto server = std::make_unique<BareServerImpl>(buffer_bytes);
  STIEFEL_RETURN_IF_ERROR(server->Listen());
  return std::unique_ptr<BareServer>(std::move(server));
}

absl::StatusOr<std::unique_ptr<BareClient>> BareClient::Connect(const std::string& target,
                                                                int channels) {
  if (channels < 1) return absl::InvalidArgumentError(absl::StrCat(channels, " channels"));
  return std::unique_ptr<BareClient>(std::make_unique<BareClientImpl>(target, channels));
}

}  // namespace stiefel
