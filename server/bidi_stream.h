// What the server's streams have in common: one write under way, an outgoing queue, and exactly one
// Finish.
#ifndef STIEFEL_SERVER_BIDI_STREAM_H_
#define STIEFEL_SERVER_BIDI_STREAM_H_

#include <grpcpp/grpcpp.h>

#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "common/clock.h"
#include "common/grpc_status.h"
#include "common/mutex.h"
#include "server/stream_registry.h"

namespace stiefel {

// How long a new stream may take to say whose it is, and an ended one to take what was queued.
inline constexpr int64_t kHelloMicros = 10 * 1000000;
inline constexpr int64_t kFlushMicros = 2 * 1000000;

// Owns itself from Start to OnDone. Subclasses read; everything here is thread-safe.
template <typename In, typename Out>
class BidiStream : public grpc::ServerBidiReactor<In, Out>,
                   public StreamEntry,
                   public std::enable_shared_from_this<BidiStream<In, Out>> {
 public:
  BidiStream(grpc::CallbackServerContext* context, StreamRegistry* registry, const Clock* clock,
             size_t max_queue)
      : context_(context),
        registry_(registry),
        clock_(clock),
        max_queue_(max_queue),
        opened_at_(clock->NowMicros()) {}

  // Registers, and takes ownership of itself. Not in the constructor: it shares itself.
  void Start() {
    self_ = this->shared_from_this();
    if (absl::Status room = registry_->Add(self_); !room.ok()) {
      End(room);
    } else {
      Read();
    }
  }

  // Queues a message. A queue beyond its bound ends the stream: its reader is too slow.
  void Enqueue(Out message) {
    MutexLock lock(&mutex_);
    if (status_) return;
    if (queue_.size() >= max_queue_) {
      EndLocked(absl::ResourceExhaustedError("the reader of this stream is too slow"));
      return;
    }
    queue_.push_back(std::move(message));
    WriteNext();
  }

  void End(const absl::Status& status) override {
    MutexLock lock(&mutex_);
    EndLocked(status);
  }

  void Cancel() override {
    MutexLock lock(&mutex_);
    EndLocked(absl::CancelledError("cancelled"));
    if (!done_) context_->TryCancel();
  }

  void OnTick(int64_t now) override {
    MutexLock lock(&mutex_);
    if (!known_ && !status_ && now - opened_at_ > kHelloMicros)
      EndLocked(absl::DeadlineExceededError("a stream must begin with Hello within 10 s"));
    if (status_ && !finished_ && !done_ && now - ended_at_ > kFlushMicros) context_->TryCancel();
  }

  void OnWriteDone(bool ok) final {
    bool written;
    {
      MutexLock lock(&mutex_);
      writing_ = false;
      queue_.pop_front();
      if (!ok) queue_.clear();
      written = ok && !status_;
      WriteNext();
    }
    if (written) OnWritten();
  }

  void OnCancel() final { End(absl::CancelledError("the peer went away")); }

  void OnDone() final {
    {
      MutexLock lock(&mutex_);
      done_ = true;
    }
    OnEnded();
    const std::shared_ptr<BidiStream> self = std::move(self_);  // perhaps the last owner
    registry_->Remove(self);
  }

 protected:
  virtual void Read() = 0;
  virtual void OnWritten() {}
  // After the last callback.
  virtual void OnEnded() = 0;

  // The stream said whose it is.
  void SetKnown() {
    MutexLock lock(&mutex_);
    known_ = true;
  }
  bool ending() const {
    MutexLock lock(&mutex_);
    return status_.has_value();
  }
  const Clock& clock() const { return *clock_; }

 private:
  void EndLocked(const absl::Status& status) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    if (status_) return;
    status_ = status;
    ended_at_ = clock_->NowMicros();
    WriteNext();
  }

  // What was queued before the end is still sent, then the status.
  void WriteNext() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    if (writing_ || finished_) return;
    if (!queue_.empty()) {
      writing_ = true;
      this->StartWrite(&queue_.front());
    } else if (status_) {
      finished_ = true;
      this->Finish(ToGrpcStatus(*status_));
    }
  }

  grpc::CallbackServerContext* const context_;
  StreamRegistry* const registry_;
  const Clock* const clock_;
  const size_t max_queue_;
  const int64_t opened_at_;
  std::shared_ptr<BidiStream> self_;

  mutable Mutex mutex_;
  std::deque<Out> queue_ ABSL_GUARDED_BY(mutex_);  // the front is being written
  bool writing_ ABSL_GUARDED_BY(mutex_) = false;
  bool known_ ABSL_GUARDED_BY(mutex_) = false;
  std::optional<absl::Status> status_ ABSL_GUARDED_BY(mutex_);  // how the stream is to end
  int64_t ended_at_ ABSL_GUARDED_BY(mutex_) = 0;
  bool finished_ ABSL_GUARDED_BY(mutex_) = false;
  bool done_ ABSL_GUARDED_BY(mutex_) = false;
};

}  // namespace stiefel

#endif  // STIEFEL_SERVER_BIDI_STREAM_H_
