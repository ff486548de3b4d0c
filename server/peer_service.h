// The Peer service on gRPC's callback API: checks the form of a request, finds the run and hands it
// the answering end. Nothing here blocks.
#ifndef STIEFEL_SERVER_PEER_SERVICE_H_
#define STIEFEL_SERVER_PEER_SERVICE_H_

#include <grpcpp/grpcpp.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <set>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "common/mutex.h"
#include "server/peer_transport.h"
#include "stiefel/v1/peer.grpc.pb.h"

namespace stiefel {

class PeerServiceCall;

// Answers leave as slices of the payload itself: they are not copied into messages.
using PeerServiceBase = v1::Peer::WithRawCallbackMethod_FetchPart<
    v1::Peer::WithRawCallbackMethod_FetchState<v1::Peer::Service>>;

class PeerService final : public PeerServiceBase {
 public:
  // What answers for a run; an error (NOT_FOUND: not open here) goes to the caller.
  using FindRun = std::function<absl::StatusOr<std::shared_ptr<PeerHandler>>(uint64_t run_uid)>;

  // RESOURCE_EXHAUSTED for calls beyond `max_calls` at once.
  PeerService(FindRun find, int max_calls) : find_(std::move(find)), max_calls_(max_calls) {}

  grpc::ServerWriteReactor<grpc::ByteBuffer>* FetchPart(grpc::CallbackServerContext* context,
                                                        const grpc::ByteBuffer* request) override;
  grpc::ServerWriteReactor<grpc::ByteBuffer>* FetchState(grpc::CallbackServerContext* context,
                                                         const grpc::ByteBuffer* request) override;

  // Ends every call, and those that come later, with this status.
  void EndAll(const absl::Status& status);

 private:
  friend class PeerServiceCall;
  template <typename Request>
  grpc::ServerWriteReactor<grpc::ByteBuffer>* Serve(
      const grpc::ByteBuffer& bytes,
      void (PeerHandler::*ask)(const Request&, std::unique_ptr<PeerReply>));
  absl::Status Add(const std::shared_ptr<PeerServiceCall>& call);
  void Remove(const std::shared_ptr<PeerServiceCall>& call);

  const FindRun find_;
  const int max_calls_;
  Mutex mutex_;
  std::set<std::shared_ptr<PeerServiceCall>> calls_ ABSL_GUARDED_BY(mutex_);
  absl::Status ending_ ABSL_GUARDED_BY(mutex_);  // OK: not yet
};

}  // namespace stiefel

#endif  // STIEFEL_SERVER_PEER_SERVICE_H_
