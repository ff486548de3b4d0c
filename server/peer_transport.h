// How a server reaches the other servers of its run: gRPC in production, the memory of one process
// in tests. Everything is pulled (proto/stiefel/v1/peer.proto).
#ifndef STIEFEL_SERVER_PEER_TRANSPORT_H_
#define STIEFEL_SERVER_PEER_TRANSPORT_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "stiefel/v1/peer.pb.h"

namespace stiefel {

// A call under way. Destroying it cancels it; when the destructor returns neither callback runs any
// more. REQUIRES: not destroyed by its own callbacks.
class PeerCall {
 public:
  virtual ~PeerCall() = default;
};

// Thread-safe. Calls never block and never call back on the calling thread. `chunk` is called in
// order, not at the same time as itself or `done`; `done` once, last.
class PeerTransport {
 public:
  using OnChunk = std::function<void(v1::PeerChunk)>;
  using Done = std::function<void(const absl::Status&)>;

  virtual ~PeerTransport() = default;
  virtual std::unique_ptr<PeerCall> FetchPart(const std::string& address,
                                              const v1::FetchPartRequest& request,
                                              int64_t timeout_micros, OnChunk chunk, Done done) = 0;
  virtual std::unique_ptr<PeerCall> FetchState(const std::string& address,
                                               const v1::FetchStateRequest& request,
                                               int64_t timeout_micros, OnChunk chunk,
                                               Done done) = 0;
};

// The answering end of one call. Write and Finish never block; they may be called from any thread,
// in order. Writes are dropped once the caller is gone. Destroying it without Finish ends the call
// with UNAVAILABLE: the caller asks again.
class PeerReply {
 public:
  virtual ~PeerReply() = default;
  virtual void Write(v1::PeerChunk chunk) = 0;
  virtual void Finish(const absl::Status& status) = 0;  // once, last
  // The caller does not wait any more: no need to answer.
  virtual bool caller_gone() const = 0;
};

// What answers the peers of one run. Thread-safe; never blocks, whatever bytes it is given.
class PeerHandler {
 public:
  virtual ~PeerHandler() = default;
  virtual void OnFetchPart(const v1::FetchPartRequest& request,
                           std::unique_ptr<PeerReply> reply) = 0;
  virtual void OnFetchState(const v1::FetchStateRequest& request,
                            std::unique_ptr<PeerReply> reply) = 0;
};

}  // namespace stiefel

#endif  // STIEFEL_SERVER_PEER_TRANSPORT_H_
