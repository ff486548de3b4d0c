// The Optimizer service on gRPC's callback API. Methods validate the form of a request, look the
// run up, act and convert; nothing here blocks or waits for mathematics.
#ifndef STIEFEL_SERVER_SERVICE_H_
#define STIEFEL_SERVER_SERVICE_H_

#include <grpcpp/grpcpp.h>

#include "server/optimizer_server.h"
#include "server/stream_registry.h"
#include "stiefel/v1/optimizer.grpc.pb.h"

namespace stiefel {

// Data and InitWeights take and give byte buffers, so that payload is never copied into messages.
using OptimizerServiceBase = v1::Optimizer::WithRawCallbackMethod_Data<
    v1::Optimizer::WithRawCallbackMethod_InitWeights<v1::Optimizer::WithCallbackMethod_Control<
        v1::Optimizer::WithCallbackMethod_GetServerInfo<v1::Optimizer::WithCallbackMethod_OpenRun<
            v1::Optimizer::WithCallbackMethod_TakeOver<v1::Optimizer::WithCallbackMethod_JoinRun<
                v1::Optimizer::WithCallbackMethod_CloseRun<
                    v1::Optimizer::WithCallbackMethod_Replan<v1::Optimizer::Service>>>>>>>>>;

class OptimizerService final : public OptimizerServiceBase {
 public:
  // Both outlive the service.
  OptimizerService(OptimizerServer* server, StreamRegistry* streams, const Clock* clock)
      : server_(server), streams_(streams), clock_(clock) {}

  grpc::ServerUnaryReactor* GetServerInfo(grpc::CallbackServerContext* context,
                                          const v1::GetServerInfoRequest* request,
                                          v1::ServerInfo* response) override;
  grpc::ServerUnaryReactor* OpenRun(grpc::CallbackServerContext* context,
                                    const v1::OpenRunRequest* request,
                                    v1::OpenRunResponse* response) override;
  grpc::ServerUnaryReactor* TakeOver(grpc::CallbackServerContext* context,
                                     const v1::TakeOverRequest* request,
                                     v1::TakeOverResponse* response) override;
  grpc::ServerUnaryReactor* JoinRun(grpc::CallbackServerContext* context,
                                    const v1::JoinRunRequest* request,
                                    v1::JoinRunResponse* response) override;
  grpc::ServerUnaryReactor* CloseRun(grpc::CallbackServerContext* context,
                                     const v1::CloseRunRequest* request,
                                     v1::CloseRunResponse* response) override;
  grpc::ServerUnaryReactor* Replan(grpc::CallbackServerContext* context,
                                   const v1::ReplanRequest* request,
                                   v1::ReplanResponse* response) override;
  grpc::ServerBidiReactor<v1::TrainerMessage, v1::ServerMessage>* Control(
      grpc::CallbackServerContext* context) override;
  grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>* Data(
      grpc::CallbackServerContext* context) override;
  grpc::ServerReadReactor<grpc::ByteBuffer>* InitWeights(grpc::CallbackServerContext* context,
                                                         grpc::ByteBuffer* response) override;

 private:
  OptimizerServer* const server_;
  StreamRegistry* const streams_;
  const Clock* const clock_;
};

}  // namespace stiefel

#endif  // STIEFEL_SERVER_SERVICE_H_
