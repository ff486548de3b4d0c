#include "tests/inmemory/memory_transport.h"

#include <deque>
#include <functional>
#include <utility>
#include <vector>

#include "common/checksum.h"
#include "common/clock.h"
#include "server/run_host.h"

namespace stiefel {

// Runs what is posted to it, in order, on a thread of its own. The destructor runs what is left.
class Strand {
 public:
  Strand() : thread_([this] { Run(); }) {}
  ~Strand() {
    {
      MutexLock lock(&mutex_);
      stopping_ = true;
      wake_.NotifyAll();
    }
    thread_.join();
  }
  void Post(std::function<void()> task) {
    MutexLock lock(&mutex_);
    tasks_.push_back(std::move(task));
    wake_.NotifyAll();
  }

 private:
  void Run() {
    for (;;) {
      std::function<void()> task;
      {
        MutexLock lock(&mutex_);
        while (tasks_.empty() && !stopping_) wake_.Wait(&mutex_);
        if (tasks_.empty()) return;
        task = std::move(tasks_.front());
        tasks_.pop_front();
      }
      task();
    }
  }

  Mutex mutex_;
  CondVar wake_;
  std::deque<std::function<void()>> tasks_ ABSL_GUARDED_BY(mutex_);
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  std::thread thread_;  // the last member: it uses the others
};

// What breaks when a server is killed, frozen or cut off.
class MemoryStream {
 public:
  virtual ~MemoryStream() = default;
  // Ends both sides, later, on the stream's own thread. Any thread, any number of times.
  virtual void Break(const absl::Status& why) = 0;

 protected:
  static void Register(MemoryServer* server, MemoryStream* stream) { server->Register(stream); }
  static void Forget(MemoryServer* server, MemoryStream* stream) { server->Forget(stream); }
};

namespace {

absl::Status Down() { return absl::UnavailableError("the server's process is gone"); }

class MemoryChunk final : public IncomingChunk {
 public:
  explicit MemoryChunk(const OutgoingChunk* chunk) : chunk_(chunk) {
    for (const OutgoingChunk::Span& span : chunk->payload) bytes_ += span.size;
  }
  const v1::ChunkHeader& header() const override { return chunk_->header; }
  int64_t payload_bytes() const override { return static_cast<int64_t>(bytes_); }
  uint32_t CopyNext(void* target, int64_t bytes) override {
    char* out = static_cast<char*>(target);
    return Walk(bytes, [&out](const char* data, size_t size, uint32_t crc) {
      crc = CopyAndCrc32c(out, data, size, crc);
      out += size;
      return crc;
    });
  }
  uint32_t SkipNext(int64_t bytes) override {
    return Walk(bytes, [](const char* data, size_t size, uint32_t crc) {
      return ExtendCrc32c(crc, data, size);
    });
  }

 private:
  template <typename Visit>
  uint32_t Walk(int64_t bytes, Visit visit) {
    uint32_t crc = 0;
    while (bytes > 0) {
      const OutgoingChunk::Span& span = chunk_->payload[span_];
      const size_t here = std::min(span.size - offset_, static_cast<size_t>(bytes));
      crc = visit(static_cast<const char*>(span.data) + offset_, here, crc);
      bytes -= static_cast<int64_t>(here);
      offset_ += here;
      if (offset_ == span.size) {
        ++span_;
        offset_ = 0;
      }
    }
    return crc;
  }

  const OutgoingChunk* const chunk_;
  size_t bytes_ = 0;
  size_t span_ = 0;
  size_t offset_ = 0;
};

// ---------------------------------------------------------------- streams

// Both directions of a stream on one strand. `open_` is touched on the strand alone.
template <typename Listener>
class StreamOnStrand : public MemoryStream {
 public:
  StreamOnStrand(MemoryServer* server, Listener* listener) : server_(server), listener_(listener) {}
  // Once the object is complete.
  void Start() {
    if (server_ != nullptr) Register(server_, this);
    if (server_ == nullptr || server_->dead()) Break(Down());
  }
  void Break(const absl::Status& why) override {
    strand_.Post([this, code = why.code(), message = std::string(why.message())] {
      End(absl::Status(code, message));
    });
  }

 protected:
  // On the strand. The host hears of it in CloseAtHost.
  void End(const absl::Status& why) {
    if (!open_) return;
    open_ = false;
    if (server_ != nullptr) Forget(server_, this);
    CloseAtHost();
    listener_->OnClosed(why);
  }
  virtual void CloseAtHost() = 0;
  bool Flows() const { return open_ && !server_->frozen(); }

  MemoryServer* const server_;
  Listener* const listener_;
  bool open_ = true;
  std::shared_ptr<RunHost> host_;  // once Hello was taken
  uint64_t id_ = 0;
  Strand strand_;  // the last member: its tasks use the others
};

class MemoryControl final : public ClientControlStream, public StreamOnStrand<ControlListener> {
 public:
  using StreamOnStrand::StreamOnStrand;

  void Send(const v1::TrainerMessage& message) override {
    strand_.Post([this, message] {
      if (!Flows()) return;
      if (host_) return host_->OnControlMessage(id_, message);
      Hello(message);
    });
  }
  void Cancel() override { Break(absl::CancelledError("cancelled by the trainer")); }

 private:
  struct Sink final : ControlSink {
    explicit Sink(MemoryControl* stream) : stream(stream) {}
    void Send(const v1::ServerMessage& message) override {
      MutexLock lock(&mutex);
      if (stream == nullptr) return;
      stream->strand_.Post([s = stream, message] {
        if (s->Flows()) s->listener_->OnMessage(message);
      });
    }
    void Close(const absl::Status& status) override {
      MutexLock lock(&mutex);
      if (stream == nullptr) return;
      stream->Break(status);
    }
    Mutex mutex;
    MemoryControl* stream ABSL_GUARDED_BY(mutex);
  };

  void Hello(const v1::TrainerMessage& message) {
    const auto run = server_->core()->FindRun(message.sender().run_uid());
    if (!run.ok()) return End(run.status());
    sink_ = std::make_shared<Sink>(this);
    const auto id = (*run)->OpenControl(message.sender(), sink_);
    if (!id.ok()) return End(id.status());
    host_ = *run;
    id_ = *id;
  }
  void CloseAtHost() override {
    if (sink_) {
      MutexLock lock(&sink_->mutex);
      sink_->stream = nullptr;
    }
    if (host_) host_->OnControlClosed(id_);
  }

  std::shared_ptr<Sink> sink_;
};

class MemoryData final : public ClientDataStream, public StreamOnStrand<DataListener> {
 public:
  using StreamOnStrand::StreamOnStrand;

  void Send(OutgoingChunk chunk) override {
    auto held = std::make_shared<OutgoingChunk>(std::move(chunk));
    strand_.Post([this, held] { Take(*held); });
  }
  void Cancel() override { Break(absl::CancelledError("cancelled by the trainer")); }

 private:
  struct Sink final : DataSink {
    explicit Sink(MemoryData* stream) : stream(stream) {}
    void Write(OutgoingChunk chunk) override {
      MutexLock lock(&mutex);
      if (stream == nullptr) return;
      auto held = std::make_shared<OutgoingChunk>(std::move(chunk));
      stream->strand_.Post([s = stream, held] { s->Deliver(*held); });
    }
    void Close(const absl::Status& status) override {
      MutexLock lock(&mutex);
      if (stream == nullptr) return;
      stream->Break(status);
    }
    Mutex mutex;
    MemoryData* stream ABSL_GUARDED_BY(mutex);
  };

  void Take(const OutgoingChunk& chunk) {
    if (!Flows()) return;
    if (!host_) {
      const auto run = server_->core()->FindRun(chunk.header.sender().run_uid());
      if (!run.ok()) return End(run.status());
      sink_ = std::make_shared<Sink>(this);
      const auto id = (*run)->OpenData(chunk.header.sender(), sink_);
      if (!id.ok()) return End(id.status());
      host_ = *run;
      id_ = *id;
    } else {
      MemoryChunk incoming(&chunk);
      const absl::Status taken = host_->OnChunk(id_, &incoming);
      if (!taken.ok()) return End(taken);
    }
    listener_->OnSent();
  }
  void Deliver(const OutgoingChunk& chunk) {
    if (!Flows()) return;
    MemoryChunk incoming(&chunk);
    listener_->OnChunk(&incoming);
    host_->OnDataWritten(id_);
  }
  void CloseAtHost() override {
    if (sink_) {
      MutexLock lock(&sink_->mutex);
      sink_->stream = nullptr;
    }
    if (host_) host_->OnDataClosed(id_);
  }

  std::shared_ptr<Sink> sink_;
};

// ---------------------------------------------------------------- calls

class MemoryConnection final : public ServerConnection {
 public:
  explicit MemoryConnection(MemoryServer* server)
      : server_(server), strand_(std::make_unique<Strand>()), timer_([this] { RunTimer(); }) {
    MutexLock lock(&gate_->mutex);
    gate_->connection = this;
  }
  ~MemoryConnection() override {
    CancelCalls();
    {
      MutexLock lock(&mutex_);
      while (!pending_.empty()) changed_.Wait(&mutex_);
      stopping_ = true;
      changed_.NotifyAll();
    }
    timer_.join();
    {
      MutexLock lock(&gate_->mutex);
      gate_->connection = nullptr;
    }
    strand_.reset();
  }

  void Call(const std::string& method, std::string request, int64_t timeout_micros,
            Done done) override {
    const uint64_t id = Add(timeout_micros, std::move(done));
    strand_->Post([this, id, method, request = std::move(request)] { Serve(id, method, request); });
  }
  void InitWeights(std::vector<OutgoingChunk> chunks, int64_t timeout_micros, Done done) override {
    const uint64_t id = Add(timeout_micros, std::move(done));
    auto held = std::make_shared<std::vector<OutgoingChunk>>(std::move(chunks));
    strand_->Post([this, id, held] {
      if (server_ == nullptr || server_->dead()) return Finish(id, Down(), "");
      if (server_->frozen()) return;
      v1::InitWeightsResponse response;
      for (const OutgoingChunk& chunk : *held) {
        const auto run = server_->core()->FindRun(chunk.header.sender().run_uid());
        if (!run.ok()) return Finish(id, run.status(), "");
        MemoryChunk incoming(&chunk);
        const auto progress = (*run)->TakeInitWeights(&incoming);
        if (!progress.ok()) return Finish(id, progress.status(), "");
        response.set_accepted_elements(response.accepted_elements() + progress->accepted_elements);
        response.set_complete(progress->complete);
      }
      held->clear();
      Finish(id, absl::OkStatus(), response.SerializeAsString());
    });
  }
  void CancelCalls() override {
    std::vector<uint64_t> ids;
    {
      MutexLock lock(&mutex_);
      for (const auto& [id, call] : pending_) ids.push_back(id);
    }
    for (const uint64_t id : ids) {
      strand_->Post([this, id] { Finish(id, absl::CancelledError("call cancelled"), ""); });
    }
  }
  std::unique_ptr<ClientControlStream> OpenControl(ControlListener* listener) override {
    auto stream = std::make_unique<MemoryControl>(server_, listener);
    stream->Start();
    return stream;
  }
  std::unique_ptr<ClientDataStream> OpenData(int, DataListener* listener) override {
    auto stream = std::make_unique<MemoryData>(server_, listener);
    stream->Start();
    return stream;
  }

 private:
  struct Gate {
    Mutex mutex;
    MemoryConnection* connection ABSL_GUARDED_BY(mutex);
  };
  struct Pending {
    Done done;
    int64_t deadline = 0;
    std::shared_ptr<RunHost> host;  // of a JoinRun that waits
    uint64_t join = 0;
  };

  uint64_t Add(int64_t timeout_micros, Done done) {
    MutexLock lock(&mutex_);
    pending_[++next_id_] = {std::move(done), RealClock().NowMicros() + timeout_micros, nullptr, 0};
    changed_.NotifyAll();
    return next_id_;
  }

  // The first answer counts.
  void Finish(uint64_t id, const absl::Status& status, const std::string& response) {
    Pending call;
    {
      MutexLock lock(&mutex_);
      const auto found = pending_.find(id);
      if (found == pending_.end()) return;
      call = std::move(found->second);
      found->second.done = nullptr;
      if (call.done == nullptr) return;
    }
    if (call.host) call.host->CancelJoin(call.join);
    call.done(status, response);
    MutexLock lock(&mutex_);
    pending_.erase(id);
    changed_.NotifyAll();
  }
  template <typename Response>
  void Finish(uint64_t id, const absl::StatusOr<Response>& response) {
    Finish(id, response.status(), response.ok() ? response->SerializeAsString() : "");
  }

  void Serve(uint64_t id, const std::string& method, const std::string& bytes) {
    if (server_ == nullptr || server_->dead()) return Finish(id, Down(), "");
    if (server_->frozen()) return;
    OptimizerServer* core = server_->core();
    if (method == "GetServerInfo") return Finish(id, absl::StatusOr<v1::ServerInfo>(core->Info()));
    if (method == "OpenRun") {
      v1::OpenRunRequest request;
      request.ParseFromString(bytes);
      return Finish(id, core->OpenRun(request));
    }
    if (method == "CloseRun") {
      v1::CloseRunRequest request;
      request.ParseFromString(bytes);
      return Finish(id, core->CloseRun(request));
    }
    if (method == "TakeOver") {
      v1::TakeOverRequest request;
      request.ParseFromString(bytes);
      const auto run = core->FindRun(request.name());
      return run.ok() ? Finish(id, (*run)->TakeOver(request)) : Finish(id, run.status(), "");
    }
    v1::JoinRunRequest request;
    request.ParseFromString(bytes);
    const auto run = core->FindRun(request.name());
    if (!run.ok()) return Finish(id, run.status(), "");
    // Through the gate: an answer may come when its call is over and the connection gone.
    const uint64_t join = (*run)->Join(
        request,
        [gate = gate_, id](const absl::Status& status, const v1::JoinRunResponse& response) {
          MutexLock lock(&gate->mutex);
          if (gate->connection == nullptr) return;
          gate->connection->strand_->Post(
              [connection = gate->connection, id, status, bytes = response.SerializeAsString()] {
                connection->Finish(id, status, bytes);
              });
        });
    MutexLock lock(&mutex_);
    const auto found = pending_.find(id);
    if (found == pending_.end()) return;
    found->second.host = *run;
    found->second.join = join;
  }

  void RunTimer() {
    MutexLock lock(&mutex_);
    while (!stopping_) {
      int64_t wake = RealClock().NowMicros() + 1000000;
      for (auto& [id, call] : pending_) {
        if (call.deadline > RealClock().NowMicros()) {
          wake = std::min(wake, call.deadline);
        } else if (call.deadline != 0) {
          call.deadline = 0;
          strand_->Post([this, id = id] {
            Finish(id, absl::DeadlineExceededError("deadline exceeded"), "");
          });
        }
      }
      changed_.WaitUntilMicros(&mutex_, wake);
    }
  }

  MemoryServer* const server_;  // null: nobody listens there
  Mutex mutex_;
  CondVar changed_;
  std::map<uint64_t, Pending> pending_ ABSL_GUARDED_BY(mutex_);
  uint64_t next_id_ ABSL_GUARDED_BY(mutex_) = 0;
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  const std::shared_ptr<Gate> gate_ = std::make_shared<Gate>();
  std::unique_ptr<Strand> strand_;
  std::thread timer_;  // the last member: it uses the others
};

}  // namespace

// ---------------------------------------------------------------- servers

namespace {

template <typename Request>
void AskRun(OptimizerServer* core, const Request& request, std::unique_ptr<PeerReply> reply,
            void (PeerHandler::*ask)(const Request&, std::unique_ptr<PeerReply>)) {
  const auto run = core->FindRun(request.sender().run_uid());
  if (!run.ok()) return reply->Finish(run.status());
  ((**run).*ask)(request, std::move(reply));
}

}  // namespace

void MemoryServer::OnFetchPart(const v1::FetchPartRequest& request,
                               std::unique_ptr<PeerReply> reply) {
  AskRun(core_.get(), request, std::move(reply), &PeerHandler::OnFetchPart);
}

void MemoryServer::OnFetchState(const v1::FetchStateRequest& request,
                                std::unique_ptr<PeerReply> reply) {
  AskRun(core_.get(), request, std::move(reply), &PeerHandler::OnFetchState);
}

MemoryServer::MemoryServer(ServerOptions options, PeerTransport* peers)
    : core_(*OptimizerServer::Create(std::move(options), &RealClock(), peers)), ticker_([this] {
        MutexLock lock(&mutex_);
        while (!stopping_) {
          wake_.WaitUntilMicros(&mutex_, RealClock().NowMicros() + 50000);
          if (dead_ || frozen_) continue;
          mutex_.Unlock();
          core_->Tick();
          mutex_.Lock();
        }
      }) {}

MemoryServer::~MemoryServer() {
  {
    MutexLock lock(&mutex_);
    stopping_ = true;
    wake_.NotifyAll();
  }
  ticker_.join();
  core_->Disconnect(absl::UnavailableError("the server stops"));
}

void MemoryServer::Kill() {
  {
    MutexLock lock(&mutex_);
    dead_ = true;
  }
  CutStreams();
}

void MemoryServer::Freeze() {
  MutexLock lock(&mutex_);
  frozen_ = true;
}

void MemoryServer::CutStreams() {
  MutexLock lock(&mutex_);
  for (MemoryStream* stream : streams_) stream->Break(Down());
}

bool MemoryServer::dead() const {
  MutexLock lock(&mutex_);
  return dead_;
}

bool MemoryServer::frozen() const {
  MutexLock lock(&mutex_);
  return frozen_;
}

void MemoryServer::Register(MemoryStream* stream) {
  MutexLock lock(&mutex_);
  streams_.insert(stream);
}

void MemoryServer::Forget(MemoryStream* stream) {
  MutexLock lock(&mutex_);
  streams_.erase(stream);
}

std::unique_ptr<ServerConnection> MemoryTransport::Connect(const std::string& address, int) {
  const auto found = servers_.find(address);
  return std::make_unique<MemoryConnection>(found == servers_.end() ? nullptr : found->second);
}

}  // namespace stiefel
