#include "tests/e2e/faulty_transport.h"

#include <optional>
#include <random>
#include <thread>
#include <utility>
#include <vector>

namespace stiefel {
namespace {

// How many chunks wait for each other, and how long the last ones wait for more.
constexpr size_t kPool = 6;
constexpr int64_t kPoolMicros = 2000;

// Takes chunks at once and sends them on from a thread of its own, which also makes every call to
// the session.
class FaultyData final : public ClientDataStream, public DataListener {
 public:
  FaultyData(FaultyTransport* transport, uint64_t seed, DataListener* outer)
      : transport_(transport), outer_(outer), random_(seed), thread_([this] { Run(); }) {}
  ~FaultyData() override { thread_.join(); }
  void Start(std::unique_ptr<ClientDataStream> inner) {
    MutexLock lock(&mutex_);
    inner_ = std::move(inner);
    wake_.NotifyAll();
  }

  void Send(OutgoingChunk chunk) override {
    MutexLock lock(&mutex_);
    if (closed_) return;
    pool_.push_back(std::move(chunk));
    ++owed_;
    wake_.NotifyAll();
  }
  void Cancel() override { inner_->Cancel(); }

  // From the inner stream.
  void OnSent() override {
    MutexLock lock(&mutex_);
    busy_ = false;
    wake_.NotifyAll();
  }
  void OnChunk(IncomingChunk* chunk) override { outer_->OnChunk(chunk); }
  void OnClosed(const absl::Status& why) override {
    MutexLock lock(&mutex_);
    closed_ = why;
    wake_.NotifyAll();
  }

 private:
  // Which chunk leaves now; none yet if more may come.
  std::optional<size_t> Choose() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    if (pool_.empty() || busy_ || !inner_) return std::nullopt;
    const bool hello = pool_[0].header.type() == v1::ChunkHeader::HELLO;
    if (!transport_->faults().shuffle || hello) return 0;
    if (pool_.size() < kPool && !waited_) return std::nullopt;
    return random_() % pool_.size();
  }

  void Run() {
    for (;;) {
      int64_t owed = 0;
      std::optional<OutgoingChunk> chunk;
      std::vector<OutgoingChunk> dropped;
      absl::Status closed;
      bool over = false;
      {
        MutexLock lock(&mutex_);
        owed = std::exchange(owed_, 0);
        if (closed_) {
          over = true;
          closed = *closed_;
          dropped.swap(pool_);
        } else if (const std::optional<size_t> next = Choose()) {
          if (*next != 0) transport_->CountReordered();
          const bool again = transport_->faults().twice && !repeated_ &&
                             pool_[*next].header.type() == v1::ChunkHeader::GRADIENT;
          chunk = pool_[*next];
          if (again) {
            std::swap(pool_[0], pool_[*next]);
          } else {
            pool_.erase(pool_.begin() + static_cast<ptrdiff_t>(*next));
          }
          repeated_ = again;
          busy_ = true;
          waited_ = false;
        } else if (owed == 0) {
          waited_ = !wake_.WaitForMicros(&mutex_, kPoolMicros);
          continue;
        }
      }
      dropped.clear();
      if (over) return outer_->OnClosed(closed);
      if (chunk) {
        const bool gradient = chunk->header.type() == v1::ChunkHeader::GRADIENT;
        if (gradient && transport_->CutsNext()) {
          inner_->Cancel();
        } else {
          inner_->Send(*std::move(chunk));
        }
        chunk.reset();
      }
      for (; owed > 0; --owed) outer_->OnSent();
    }
  }

  FaultyTransport* const transport_;
  DataListener* const outer_;
  Mutex mutex_;
  CondVar wake_;
  std::unique_ptr<ClientDataStream> inner_;
  std::vector<OutgoingChunk> pool_ ABSL_GUARDED_BY(mutex_);
  int64_t owed_ ABSL_GUARDED_BY(mutex_) = 0;  // OnSent calls
  bool busy_ ABSL_GUARDED_BY(mutex_) = false;
  bool waited_ ABSL_GUARDED_BY(mutex_) = false;
  bool repeated_ ABSL_GUARDED_BY(mutex_) = false;  // pool_[0] has been sent once
  std::optional<absl::Status> closed_ ABSL_GUARDED_BY(mutex_);
  std::mt19937_64 random_;
  std::thread thread_;  // the last member: it uses the others
};

class FaultyConnection final : public ServerConnection {
 public:
  FaultyConnection(FaultyTransport* transport, std::unique_ptr<ServerConnection> inner)
      : transport_(transport), inner_(std::move(inner)) {}
  void Call(const std::string& method, std::string request, int64_t timeout_micros,
            Done done) override {
    inner_->Call(method, std::move(request), timeout_micros, std::move(done));
  }
  void InitWeights(std::vector<OutgoingChunk> chunks, int64_t timeout_micros, Done done) override {
    inner_->InitWeights(std::move(chunks), timeout_micros, std::move(done));
  }
  void CancelCalls() override { inner_->CancelCalls(); }
  std::unique_ptr<ClientControlStream> OpenControl(ControlListener* listener) override {
    return inner_->OpenControl(listener);
  }
  std::unique_ptr<ClientDataStream> OpenData(int index, DataListener* listener) override {
    auto stream =
        std::make_unique<FaultyData>(transport_, transport_->faults().seed + ++opened_, listener);
    stream->Start(inner_->OpenData(index, stream.get()));
    return stream;
  }

 private:
  FaultyTransport* const transport_;
  const std::unique_ptr<ServerConnection> inner_;
  uint64_t opened_ = 0;
};

}  // namespace

bool FaultyTransport::CutsNext() {
  const bool cut = faults_.cuts.count(++chunks_) > 0;
  if (cut) ++cuts_;
  return cut;
}

std::unique_ptr<ServerConnection> FaultyTransport::Connect(const std::string& address,
                                                           int data_streams) {
  return std::make_unique<FaultyConnection>(this, inner_->Connect(address, data_streams));
}

}  // namespace stiefel
