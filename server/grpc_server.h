// A server process: OptimizerServer behind gRPC, with its timer, health and reflection.
#ifndef STIEFEL_SERVER_GRPC_SERVER_H_
#define STIEFEL_SERVER_GRPC_SERVER_H_

#include <grpcpp/grpcpp.h>

#include <functional>
#include <memory>
#include <string>
#include <thread>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "common/clock.h"
#include "common/mutex.h"
#include "server/grpc_peer_transport.h"
#include "server/optimizer_server.h"
#include "server/options.h"
#include "server/peer_service.h"
#include "server/service.h"
#include "server/status_service.h"
#include "server/stream_registry.h"

namespace stiefel {

// Thread-safe.
class GrpcServer {
 public:
  // Listens and serves; health is SERVING when this returns. INVALID_ARGUMENT: options out of
  // range. FAILED_PRECONDITION: a bind beyond loopback without `insecure`. UNAVAILABLE: the address
  // is in use or not of this machine.
  static absl::StatusOr<std::unique_ptr<GrpcServer>> Start(ServerOptions options,
                                                           const Clock& clock = RealClock());
  // As Shutdown with no grace, unless it was called.
  ~GrpcServer();

  // As it was bound: "127.0.0.1:43017".
  const std::string& address() const { return address_; }
  int port() const { return port_; }
  OptimizerServer& core() { return *core_; }

  // Drains: health NOT_SERVING; waits up to options().grace_seconds, first for the run's leader to
  // move what is held here to other servers (options().drain_to_peers), then, without new attempts,
  // for the decision of a voted step; ends all streams and calls; returns when all is over. Once.
  void Shutdown();

 private:
  explicit GrpcServer(const Clock& clock) : clock_(clock) {}
  absl::Status Listen();
  void Loop();
  void ShutdownWithin(double grace_seconds);
  void WaitWhile(const std::function<bool()>& still, int64_t deadline_micros);

  // Constant after Start.
  const Clock& clock_;
  std::string address_;
  int port_ = 0;
  std::unique_ptr<GrpcPeerTransport> peers_;
  std::unique_ptr<OptimizerServer> core_;
  std::unique_ptr<StreamRegistry> streams_;
  std::unique_ptr<OptimizerService> optimizer_;
  std::unique_ptr<StatusService> status_;
  std::unique_ptr<PeerService> peer_service_;
  std::unique_ptr<grpc::Server> server_;
  std::thread timer_;

  Mutex mutex_;
  CondVar changed_;
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  bool shut_down_ ABSL_GUARDED_BY(mutex_) = false;
};

}  // namespace stiefel

#endif  // STIEFEL_SERVER_GRPC_SERVER_H_
