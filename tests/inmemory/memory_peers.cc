#include "tests/inmemory/memory_peers.h"

#include <atomic>
#include <utility>

namespace stiefel {
namespace {

constexpr int64_t kThreadPollMicros = 20000;

absl::Status Down() { return absl::UnavailableError("the server's process is gone"); }

}  // namespace

void ManualExecutor::Run(size_t index) {
  const Task task = std::move(tasks_[index]);
  tasks_.erase(tasks_.begin() + static_cast<std::ptrdiff_t>(index));
  task();
}

// What is under way of one call, in order.
struct MemoryPeers::Call : std::enable_shared_from_this<MemoryPeers::Call> {
  std::string from, to;
  int64_t deadline = 0;
  PeerTransport::OnChunk chunk;
  PeerTransport::Done done;
  bool breaks = false;                       // before its answer is complete
  bool corrupts = false;                     // its first chunk
  std::deque<std::function<void()>> events;  // under MemoryPeers::mutex_

  std::atomic<bool> over{false};  // the caller hears nothing more
  Mutex callbacks;                // held while one runs

  void Chunk(v1::PeerChunk what) {
    MutexLock lock(&callbacks);
    if (!over) chunk(std::move(what));
  }
  void Finish(const absl::Status& status) {
    MutexLock lock(&callbacks);
    if (!over.exchange(true)) done(status);
  }
};

class MemoryPeers::CallHandle final : public PeerCall {
 public:
  explicit CallHandle(std::shared_ptr<Call> call) : call_(std::move(call)) {}
  ~CallHandle() override {
    MutexLock lock(&call_->callbacks);
    call_->over = true;
  }

 private:
  const std::shared_ptr<Call> call_;
};

class MemoryPeers::Reply final : public PeerReply {
 public:
  Reply(MemoryPeers* peers, std::shared_ptr<Call> call) : peers_(peers), call_(std::move(call)) {}
  ~Reply() override {
    if (!finished_) Finish(absl::UnavailableError("not answered; ask again"));
  }
  void Write(v1::PeerChunk chunk) override { peers_->Answer(call_, std::move(chunk)); }
  void Finish(const absl::Status& status) override {
    finished_ = true;
    const absl::Status end =
        call_->breaks ? absl::UnavailableError("the connection broke") : status;
    peers_->Enqueue(call_, [call = call_, end] { call->Finish(end); });
  }
  bool caller_gone() const override { return call_->over; }

 private:
  MemoryPeers* const peers_;
  const std::shared_ptr<Call> call_;
  bool finished_ = false;
};

class MemoryPeers::OneTransport final : public PeerTransport {
 public:
  OneTransport(MemoryPeers* peers, std::string from) : peers_(peers), from_(std::move(from)) {}

  std::unique_ptr<PeerCall> FetchPart(const std::string& address,
                                      const v1::FetchPartRequest& request, int64_t timeout_micros,
                                      OnChunk chunk, Done done) override {
    return peers_->Send(
        from_, address, timeout_micros,
        [request](PeerHandler* handler, std::unique_ptr<PeerReply> reply) {
          handler->OnFetchPart(request, std::move(reply));
        },
        std::move(chunk), std::move(done));
  }
  std::unique_ptr<PeerCall> FetchState(const std::string& address,
                                       const v1::FetchStateRequest& request, int64_t timeout_micros,
                                       OnChunk chunk, Done done) override {
    return peers_->Send(
        from_, address, timeout_micros,
        [request](PeerHandler* handler, std::unique_ptr<PeerReply> reply) {
          handler->OnFetchState(request, std::move(reply));
        },
        std::move(chunk), std::move(done));
  }

 private:
  MemoryPeers* const peers_;
  const std::string from_;
};

MemoryPeers::~MemoryPeers() {
  {
    MutexLock lock(&mutex_);
    stopping_ = true;
    wake_.NotifyAll();
  }
  if (thread_.joinable()) thread_.join();
  MutexLock lock(&mutex_);
  for (const std::shared_ptr<Call>& call : calls_) call->events.clear();  // they hold the call
}

void MemoryPeers::Add(const std::string& address, PeerHandler* handler) {
  MutexLock lock(&mutex_);
  handlers_[address] = handler;
}

std::unique_ptr<PeerTransport> MemoryPeers::Transport(const std::string& address) {
  return std::make_unique<OneTransport>(this, address);
}

void MemoryPeers::set_faults(const PeerFaults& faults) {
  MutexLock lock(&mutex_);
  faults_ = faults;
}

bool MemoryPeers::Draw(double rate) {
  return rate > 0 && std::uniform_real_distribution<double>(0, 1)(random_) < rate;
}

std::unique_ptr<PeerCall> MemoryPeers::Send(const std::string& from, const std::string& to,
                                            int64_t timeout_micros, const Question& question,
                                            PeerTransport::OnChunk chunk,
                                            PeerTransport::Done done) {
  auto call = std::make_shared<Call>();
  call->from = from;
  call->to = to;
  call->deadline = clock_->NowMicros() + timeout_micros;
  call->chunk = std::move(chunk);
  call->done = std::move(done);
  MutexLock lock(&mutex_);
  call->breaks = Draw(faults_.drop_answer);
  call->corrupts = Draw(faults_.corrupt);
  if (!Draw(faults_.drop_request))
    call->events.push_back(
        [this, call = call.get(), question] { Ask(call->shared_from_this(), question); });
  calls_.push_back(call);
  if (Draw(faults_.duplicate)) {
    auto ghost = std::make_shared<Call>();
    ghost->from = from;
    ghost->to = to;
    ghost->over = true;
    ghost->events.push_back(
        [this, ghost = ghost.get(), question] { Ask(ghost->shared_from_this(), question); });
    calls_.push_back(std::move(ghost));
  }
  wake_.NotifyAll();
  return std::make_unique<CallHandle>(std::move(call));
}

void MemoryPeers::Ask(const std::shared_ptr<Call>& call, const Question& question) {
  PeerHandler* handler = nullptr;
  {
    MutexLock lock(&mutex_);
    if (dead_.count(call->from) + dead_.count(call->to) == 0) {
      const auto found = handlers_.find(call->to);
      if (found != handlers_.end()) handler = found->second;
    }
  }
  if (handler == nullptr) return call->Finish(Down());
  question(handler, std::make_unique<Reply>(this, call));
}

void MemoryPeers::Answer(const std::shared_ptr<Call>& call, v1::PeerChunk chunk) {
  if (call->corrupts && !chunk.payload().empty()) {
    call->corrupts = false;
    (*chunk.mutable_payload())[0] ^= 1;
  }
  Enqueue(call, [call, chunk = std::move(chunk)] { call->Chunk(chunk); });
}

void MemoryPeers::Enqueue(const std::shared_ptr<Call>& call, std::function<void()> event) {
  MutexLock lock(&mutex_);
  if (call->over) return;
  call->events.push_back(std::move(event));
  wake_.NotifyAll();
}

std::vector<size_t> MemoryPeers::Deliverable() {
  // What nobody waits for and nothing is under way of.
  size_t kept = 0;
  for (std::shared_ptr<Call>& call : calls_) {
    if (!call->over || !call->events.empty()) calls_[kept++] = std::move(call);
  }
  calls_.resize(kept);
  std::vector<size_t> places;
  for (size_t i = 0; i < calls_.size(); ++i) {
    const Call& call = *calls_[i];
    if (!call.events.empty() && frozen_.count(call.from) + frozen_.count(call.to) == 0)
      places.push_back(i);
  }
  return places;
}

bool MemoryPeers::Deliver() {
  std::function<void()> event;
  std::shared_ptr<Call> call;  // stays while its event runs
  {
    MutexLock lock(&mutex_);
    const std::vector<size_t> places = Deliverable();
    if (places.empty()) return false;
    const size_t place =
        threaded_ ? 0 : std::uniform_int_distribution<size_t>(0, places.size() - 1)(random_);
    call = calls_[places[place]];
    event = std::move(call->events.front());
    call->events.pop_front();
    delivering_ = true;
  }
  event();
  event = nullptr;
  MutexLock lock(&mutex_);
  delivering_ = false;
  wake_.NotifyAll();
  return true;
}

void MemoryPeers::Expire() {
  std::vector<std::shared_ptr<Call>> late;
  {
    MutexLock lock(&mutex_);
    const int64_t now = clock_->NowMicros();
    for (const std::shared_ptr<Call>& call : calls_) {
      if (!call->over && call->deadline <= now) late.push_back(call);
    }
  }
  for (const std::shared_ptr<Call>& call : late)
    call->Finish(absl::DeadlineExceededError("the call's time ran out"));
}

size_t MemoryPeers::pending() const {
  MutexLock lock(&mutex_);
  size_t count = 0;
  for (const std::shared_ptr<Call>& call : calls_) count += call->over ? 0 : 1;
  return count;
}

void MemoryPeers::Kill(const std::string& address) {
  std::vector<std::shared_ptr<Call>> lost;
  {
    MutexLock lock(&mutex_);
    dead_.insert(address);
    frozen_.erase(address);
    for (const std::shared_ptr<Call>& call : calls_) {
      if (call->from == address || call->to == address) lost.push_back(call);
    }
    while (delivering_) wake_.Wait(&mutex_);
  }
  for (const std::shared_ptr<Call>& call : lost) call->Finish(Down());
}

void MemoryPeers::Freeze(const std::string& address) {
  MutexLock lock(&mutex_);
  frozen_.insert(address);
}

void MemoryPeers::Thaw(const std::string& address) {
  MutexLock lock(&mutex_);
  frozen_.erase(address);
  wake_.NotifyAll();
}

void MemoryPeers::StartThread() {
  {
    MutexLock lock(&mutex_);
    threaded_ = true;
  }
  thread_ = std::thread([this] { RunThread(); });
}

void MemoryPeers::RunThread() {
  for (;;) {
    while (Deliver()) {
    }
    Expire();
    MutexLock lock(&mutex_);
    if (stopping_) return;
    if (Deliverable().empty()) wake_.WaitForMicros(&mutex_, kThreadPollMicros);
  }
}

}  // namespace stiefel
