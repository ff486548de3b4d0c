#ifndef STIEFEL_SERVER_GRPC_PEER_TRANSPORT_H_
#define STIEFEL_SERVER_GRPC_PEER_TRANSPORT_H_

#include <grpcpp/grpcpp.h>

#include <map>
#include <memory>
#include <string>

#include "absl/base/thread_annotations.h"
#include "common/mutex.h"
#include "server/peer_transport.h"
#include "stiefel/v1/peer.grpc.pb.h"

namespace stiefel {

class GrpcFetch;

// Peers over gRPC: one connection to each address, made when first asked for and kept. Thread-safe.
// An unreachable peer fails a call at once with UNAVAILABLE.
class GrpcPeerTransport final : public PeerTransport {
 public:
  // What connections are made with; nothing else knows of credentials.
  explicit GrpcPeerTransport(std::shared_ptr<grpc::ChannelCredentials> credentials)
      : credentials_(std::move(credentials)) {}
  // Waits until gRPC has let go of every call. REQUIRES: no PeerCall is left.
  ~GrpcPeerTransport() override;

  std::unique_ptr<PeerCall> FetchPart(const std::string& address,
                                      const v1::FetchPartRequest& request, int64_t timeout_micros,
                                      OnChunk chunk, Done done) override;
  std::unique_ptr<PeerCall> FetchState(const std::string& address,
                                       const v1::FetchStateRequest& request, int64_t timeout_micros,
                                       OnChunk chunk, Done done) override;

 private:
  friend class GrpcFetch;
  struct Connection {
    std::shared_ptr<grpc::Channel> channel;
    std::unique_ptr<v1::Peer::Stub> stub;
  };
  // Counts a call in and returns the stub to make it on.
  v1::Peer::Stub* Begin(const std::string& address);
  void OnCallOver();

  const std::shared_ptr<grpc::ChannelCredentials> credentials_;
  Mutex mutex_;
  CondVar none_left_;
  std::map<std::string, Connection> connections_ ABSL_GUARDED_BY(mutex_);
  int outstanding_ ABSL_GUARDED_BY(mutex_) = 0;
};

}  // namespace stiefel

#endif  // STIEFEL_SERVER_GRPC_PEER_TRANSPORT_H_
