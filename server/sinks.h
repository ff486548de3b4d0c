// What a transport gives the host of a run: somewhere to send to. gRPC streams implement these, and
// so do queues in memory (tests).
#ifndef STIEFEL_SERVER_SINKS_H_
#define STIEFEL_SERVER_SINKS_H_

#include "absl/status/status.h"
#include "proto/chunk.h"
#include "stiefel/v1/optimizer.pb.h"

namespace stiefel {

// The downward half of a control stream. Called outside all locks of the host, in the order of the
// host's decisions, from any thread but one at a time. Must neither block nor call the host back.
class ControlSink {
 public:
  virtual ~ControlSink() = default;
  virtual void Send(const v1::ServerMessage& message) = 0;
  // The stream must end with this status (OK: it is simply over). Messages sent before should still
  // arrive; what is sent afterwards is dropped. May be called more than once: the first counts.
  virtual void Close(const absl::Status& status) = 0;
};

// The downward half of a data stream. The host writes one chunk at a time: after Write it waits for
// RunHost::OnDataWritten, so a slow reader holds up nothing but itself. Must neither block nor call
// the host back.
class DataSink {
 public:
  virtual ~DataSink() = default;
  virtual void Write(OutgoingChunk chunk) = 0;
  // As ControlSink::Close. May come while a write is under way, and from another thread.
  virtual void Close(const absl::Status& status) = 0;
};

}  // namespace stiefel

#endif  // STIEFEL_SERVER_SINKS_H_
