#include "server/status_service.h"

#include <algorithm>
#include <cmath>
#include <optional>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/grpc_status.h"

namespace stiefel {
namespace {

constexpr size_t kMaxWatches = 64;
constexpr double kDefaultIntervalSeconds = 0.5;

// The status without what changes by itself.
std::string Lasting(v1::ServerStatus status) {
  status.clear_uptime_seconds();
  status.clear_resident_bytes();
  status.clear_load();
  for (v1::RunStatus& run : *status.mutable_runs()) {
    for (v1::RankStatus& rank : *run.mutable_ranks()) rank.clear_lease_seconds_left();
  }
  return status.SerializeAsString();
}

}  // namespace

// Owns itself from Start to OnDone. A slow reader has one write under way and gets what is true
// when it is ready for the next.
class StatusWatch final : public grpc::ServerWriteReactor<v1::ServerStatus>,
                          public std::enable_shared_from_this<StatusWatch> {
 public:
  StatusWatch(StatusService* service, int64_t interval_micros)
      : service_(service), interval_micros_(interval_micros) {}

  void Start() { self_ = shared_from_this(); }

  void Offer(const v1::ServerStatus& status, int64_t now) {
    MutexLock lock(&mutex_);
    if (finished_ || writing_) return;
    if (sent_at_ && now - *sent_at_ < interval_micros_) return;
    std::string lasting = Lasting(status);
    if (sent_at_ && lasting == sent_) return;
    sent_at_ = now;
    sent_ = std::move(lasting);
    status_ = status;
    writing_ = true;
    StartWrite(&status_);
  }

  void End(const absl::Status& status) {
    MutexLock lock(&mutex_);
    if (!ending_) ending_ = status;
    MaybeFinish();
  }

  void OnWriteDone(bool ok) override {
    MutexLock lock(&mutex_);
    writing_ = false;
    if (!ok && !ending_) ending_ = absl::CancelledError("the peer went away");
    MaybeFinish();
  }
  void OnCancel() override { End(absl::CancelledError("the peer went away")); }
  void OnDone() override {
    const std::shared_ptr<StatusWatch> self = std::move(self_);
    service_->Remove(self);
  }

 private:
  void MaybeFinish() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    if (!ending_ || writing_ || finished_) return;
    finished_ = true;
    Finish(ToGrpcStatus(*ending_));
  }

  StatusService* const service_;
  const int64_t interval_micros_;
  std::shared_ptr<StatusWatch> self_;
  Mutex mutex_;
  v1::ServerStatus status_ ABSL_GUARDED_BY(mutex_);  // being written
  std::string sent_ ABSL_GUARDED_BY(mutex_);
  std::optional<int64_t> sent_at_ ABSL_GUARDED_BY(mutex_);
  bool writing_ ABSL_GUARDED_BY(mutex_) = false;
  std::optional<absl::Status> ending_ ABSL_GUARDED_BY(mutex_);
  bool finished_ ABSL_GUARDED_BY(mutex_) = false;
};

grpc::ServerUnaryReactor* StatusService::GetStatus(grpc::CallbackServerContext* context,
                                                   const v1::GetStatusRequest* request,
                                                   v1::ServerStatus* response) {
  grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
  server_->GetStatus(*request, [reactor, response](v1::ServerStatus status) {
    *response = std::move(status);
    reactor->Finish(grpc::Status::OK);
  });
  return reactor;
}

grpc::ServerWriteReactor<v1::ServerStatus>* StatusService::WatchStatus(
    grpc::CallbackServerContext*, const v1::WatchStatusRequest* request) {
  double seconds = request->has_min_interval_seconds() ? request->min_interval_seconds()
                                                       : kDefaultIntervalSeconds;
  seconds = std::isfinite(seconds) ? std::clamp(seconds, 0.0, 3600.0) : kDefaultIntervalSeconds;
  auto watch = std::make_shared<StatusWatch>(this, static_cast<int64_t>(seconds * 1e6));
  watch->Start();
  absl::Status refusal;
  {
    MutexLock lock(&mutex_);
    if (ending_) {
      refusal = absl::UnavailableError("the server is shutting down");
    } else if (watches_.size() >= kMaxWatches) {
      refusal = absl::ResourceExhaustedError(
          absl::StrCat(watches_.size(), " clients watch the status; no more are allowed"));
    } else {
      watches_.insert(watch);
    }
  }
  if (refusal.ok()) {
    watch->Offer(server_->StatusNow(), clock_->NowMicros());
  } else {
    watch->End(refusal);
  }
  return watch.get();
}

std::set<std::shared_ptr<StatusWatch>> StatusService::Watches() const {
  MutexLock lock(&mutex_);
  return watches_;
}

void StatusService::Remove(const std::shared_ptr<StatusWatch>& watch) {
  MutexLock lock(&mutex_);
  watches_.erase(watch);
}

void StatusService::Tick() {
  const auto watches = Watches();
  if (watches.empty()) return;
  const v1::ServerStatus status = server_->StatusNow();
  for (const auto& watch : watches) watch->Offer(status, clock_->NowMicros());
}

void StatusService::EndAll() {
  {
    MutexLock lock(&mutex_);
    ending_ = true;
  }
  for (const auto& watch : Watches()) watch->End(absl::UnavailableError("the server stops"));
}

}  // namespace stiefel
