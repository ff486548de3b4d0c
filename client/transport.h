// The seam between the client library and whatever carries its messages: gRPC in production
// (grpc_transport.h), a decorator or the memory of one process in tests.
//
// Rules for every implementation
// - Open*, Send, Call and Cancel never block and never call a listener or `done` on the calling
//   thread, so that they may be called under a lock.
// - OnClosed and `done` come exactly once; OnClosed is the last call that a listener gets. A
//   listener outlives it. Callbacks of one stream never run at the same time, but for OnSent beside
//   OnChunk.
// - A stream object is destroyed by its owner, after OnClosed and never on a thread of the
//   transport.
#ifndef STIEFEL_CLIENT_TRANSPORT_H_
#define STIEFEL_CLIENT_TRANSPORT_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "proto/chunk.h"
#include "stiefel/v1/optimizer.pb.h"

namespace stiefel {

class ControlListener {
 public:
  virtual ~ControlListener() = default;
  virtual void OnMessage(const v1::ServerMessage& message) = 0;
  virtual void OnClosed(const absl::Status& why) = 0;
};

// Not to be confused with the server's half.
class ClientControlStream {
 public:
  virtual ~ClientControlStream() = default;
  // Queued, sent in order. Dropped once the stream has ended.
  virtual void Send(const v1::TrainerMessage& message) = 0;
  // Ends the stream; OnClosed follows.
  virtual void Cancel() = 0;
};

class DataListener {
 public:
  virtual ~DataListener() = default;
  // The chunk of the last Send was handed over; the next may be sent. Its memory is free only when
  // its keepalive is dropped.
  virtual void OnSent() = 0;
  // The next chunk is read after this returns.
  virtual void OnChunk(IncomingChunk* chunk) = 0;
  virtual void OnClosed(const absl::Status& why) = 0;
};

class ClientDataStream {
 public:
  virtual ~ClientDataStream() = default;
  // REQUIRES: no chunk is between Send and OnSent. Dropped, without OnSent, once the stream has
  // ended.
  virtual void Send(OutgoingChunk chunk) = 0;
  virtual void Cancel() = 0;
};

class ServerConnection {
 public:
  // Cancels and waits for what is left of Call and InitWeights. REQUIRES: all streams are
  // destroyed.
  virtual ~ServerConnection() = default;

  // One unary method of v1.Optimizer by name, request and response serialized.
  using Done = std::function<void(const absl::Status& status, const std::string& response)>;
  virtual void Call(const std::string& method, std::string request, int64_t timeout_micros,
                    Done done) = 0;
  // InitWeights: all chunks on one stream, in order.
  virtual void InitWeights(std::vector<OutgoingChunk> chunks, int64_t timeout_micros,
                           Done done) = 0;
  // Ends every Call and InitWeights that is under way, with CANCELLED.
  virtual void CancelCalls() = 0;

  virtual std::unique_ptr<ClientControlStream> OpenControl(ControlListener* listener) = 0;
  // `index` < the number of data streams that the connection was made for; streams of different
  // index are different connections.
  virtual std::unique_ptr<ClientDataStream> OpenData(int index, DataListener* listener) = 0;
};

class Transport {
 public:
  virtual ~Transport() = default;
  // Nothing is sent yet, so this never fails.
  virtual std::unique_ptr<ServerConnection> Connect(const std::string& address,
                                                    int data_streams) = 0;
};

}  // namespace stiefel

#endif  // STIEFEL_CLIENT_TRANSPORT_H_
