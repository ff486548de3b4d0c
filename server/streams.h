// The gRPC ends of control and data streams, and of InitWeights. They adapt; RunHost decides.
#ifndef STIEFEL_SERVER_STREAMS_H_
#define STIEFEL_SERVER_STREAMS_H_

#include <grpcpp/grpcpp.h>

#include <cstdint>
#include <memory>

#include "server/bidi_stream.h"
#include "server/optimizer_server.h"
#include "server/run_host.h"
#include "server/sinks.h"
#include "stiefel/v1/optimizer.pb.h"

namespace stiefel {

class ControlStream final : public BidiStream<v1::TrainerMessage, v1::ServerMessage>,
                            public ControlSink {
 public:
  ControlStream(grpc::CallbackServerContext* context, StreamRegistry* registry, const Clock* clock,
                OptimizerServer* server);

  void Send(const v1::ServerMessage& message) override { Enqueue(message); }
  void Close(const absl::Status& status) override { End(status); }
  void OnReadDone(bool ok) override;

 private:
  void Read() override { StartRead(&message_); }
  void OnEnded() override;
  absl::Status Open();

  OptimizerServer* const server_;
  // Touched by one reaction at a time.
  v1::TrainerMessage message_;
  std::shared_ptr<RunHost> run_;  // null before Hello
  uint64_t id_ = 0;
};

class DataChannel final : public BidiStream<grpc::ByteBuffer, grpc::ByteBuffer>, public DataSink {
 public:
  DataChannel(grpc::CallbackServerContext* context, StreamRegistry* registry, const Clock* clock,
              OptimizerServer* server);

  void Write(OutgoingChunk chunk) override;
  void Close(const absl::Status& status) override { End(status); }
  void OnReadDone(bool ok) override;

 private:
  void Read() override { StartRead(&message_); }
  void OnWritten() override;
  void OnEnded() override;
  absl::Status Take();

  OptimizerServer* const server_;
  // Touched by one reaction at a time, but for the two below.
  grpc::ByteBuffer message_;
  std::shared_ptr<RunHost> run_;
  uint64_t id_ = 0;

  // Writes end in reactions that run beside the reads: they need the stream's name as soon as the
  // host may have written.
  Mutex name_mutex_;
  bool named_ ABSL_GUARDED_BY(name_mutex_) = false;
  bool written_early_ ABSL_GUARDED_BY(name_mutex_) = false;
};

class InitWeightsCall final : public grpc::ServerReadReactor<grpc::ByteBuffer> {
 public:
  InitWeightsCall(OptimizerServer* server, grpc::ByteBuffer* response)
      : server_(server), response_(response) {
    StartRead(&message_);
  }
  void OnReadDone(bool ok) override;
  void OnDone() override { delete this; }

 private:
  absl::Status Take();

  OptimizerServer* const server_;
  grpc::ByteBuffer* const response_;
  grpc::ByteBuffer message_;
  v1::InitWeightsResponse answer_;
};

}  // namespace stiefel

#endif  // STIEFEL_SERVER_STREAMS_H_
