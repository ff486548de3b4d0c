#ifndef STIEFEL_SERVER_STATUS_SERVICE_H_
#define STIEFEL_SERVER_STATUS_SERVICE_H_

#include <grpcpp/grpcpp.h>

#include <memory>
#include <set>

#include "absl/base/thread_annotations.h"
#include "common/mutex.h"
#include "server/optimizer_server.h"
#include "stiefel/v1/status.grpc.pb.h"

namespace stiefel {

class StatusWatch;

class StatusService final : public v1::Status::WithCallbackMethod_GetStatus<
                                v1::Status::WithCallbackMethod_WatchStatus<v1::Status::Service>> {
 public:
  // Both outlive the service.
  StatusService(OptimizerServer* server, const Clock* clock) : server_(server), clock_(clock) {}

  grpc::ServerUnaryReactor* GetStatus(grpc::CallbackServerContext* context,
                                      const v1::GetStatusRequest* request,
                                      v1::ServerStatus* response) override;
  // RESOURCE_EXHAUSTED: 64 watch already.
  grpc::ServerWriteReactor<v1::ServerStatus>* WatchStatus(
      grpc::CallbackServerContext* context, const v1::WatchStatusRequest* request) override;

  // Sends what has changed to the watches that are due.
  void Tick();
  void EndAll();

 private:
  friend class StatusWatch;
  std::set<std::shared_ptr<StatusWatch>> Watches() const;
  void Remove(const std::shared_ptr<StatusWatch>& watch);

  OptimizerServer* const server_;
  const Clock* const clock_;
  mutable Mutex mutex_;
  std::set<std::shared_ptr<StatusWatch>> watches_ ABSL_GUARDED_BY(mutex_);
  bool ending_ ABSL_GUARDED_BY(mutex_) = false;
};

}  // namespace stiefel

#endif  // STIEFEL_SERVER_STATUS_SERVICE_H_
