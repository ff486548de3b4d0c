#include "server/service.h"

#include <memory>
#include <utility>

#include "common/grpc_status.h"
#include "common/status.h"
#include "server/streams.h"
#include "server/unknown_fields.h"

namespace stiefel {
namespace {

grpc::ServerUnaryReactor* Answer(grpc::CallbackServerContext* context, const absl::Status& status) {
  grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
  reactor->Finish(ToGrpcStatus(status));
  return reactor;
}

absl::Status OpenRunOn(OptimizerServer* server, const v1::OpenRunRequest& request,
                       v1::OpenRunResponse* response) {
  STIEFEL_RETURN_IF_ERROR(RefuseUnknownFields(request));
  STIEFEL_ASSIGN_OR_RETURN(*response, server->OpenRun(request));
  return absl::OkStatus();
}

absl::Status TakeOverOn(OptimizerServer* server, const v1::TakeOverRequest& request,
                        v1::TakeOverResponse* response) {
  STIEFEL_RETURN_IF_ERROR(RefuseUnknownFields(request));
  STIEFEL_ASSIGN_OR_RETURN(const std::shared_ptr<RunHost> run, server->FindRun(request.name()));
  STIEFEL_ASSIGN_OR_RETURN(*response, run->TakeOver(request));
  return absl::OkStatus();
}

absl::Status CloseRunOn(OptimizerServer* server, const v1::CloseRunRequest& request,
                        v1::CloseRunResponse* response) {
  STIEFEL_RETURN_IF_ERROR(RefuseUnknownFields(request));
  STIEFEL_ASSIGN_OR_RETURN(*response, server->CloseRun(request));
  return absl::OkStatus();
}

// A JoinRun that waits for the other ranks. The host answers it, or it is cancelled: whichever
// comes first finishes the call.
class JoinCall final : public grpc::ServerUnaryReactor {
 public:
  void Start(const std::shared_ptr<RunHost>& run, const v1::JoinRunRequest& request,
             v1::JoinRunResponse* response) {
    run_ = run;
    token_ = run->Join(
        request, [this, response](const absl::Status& status, const v1::JoinRunResponse& answer) {
          *response = answer;
          Finish(ToGrpcStatus(status));
        });
  }
  // Comes after Start only: gRPC calls a reactor when the method has returned it.
  void OnCancel() override {
    if (run_->CancelJoin(token_))
      Finish(grpc::Status(grpc::StatusCode::CANCELLED, "the peer went away"));
  }
  void OnDone() override { delete this; }

 private:
  std::shared_ptr<RunHost> run_;
  uint64_t token_ = 0;
};

// A Replan that waits for the placement to agree. Whoever asked may go away meanwhile: it is done
// all the same.
class ReplanCall final : public grpc::ServerUnaryReactor {
 public:
  void Start(const std::shared_ptr<RunHost>& run, const v1::ReplanRequest& request,
             v1::ReplanResponse* response) {
    run->Replan(request,
                [this, response](const absl::Status& status, const v1::ReplanResponse& answer) {
                  *response = answer;
                  Finish(ToGrpcStatus(status));
                });
  }
  void OnDone() override { delete this; }
};

}  // namespace

grpc::ServerUnaryReactor* OptimizerService::GetServerInfo(grpc::CallbackServerContext* context,
                                                          const v1::GetServerInfoRequest*,
                                                          v1::ServerInfo* response) {
  *response = server_->Info();
  return Answer(context, absl::OkStatus());
}

grpc::ServerUnaryReactor* OptimizerService::OpenRun(grpc::CallbackServerContext* context,
                                                    const v1::OpenRunRequest* request,
                                                    v1::OpenRunResponse* response) {
  return Answer(context, OpenRunOn(server_, *request, response));
}

grpc::ServerUnaryReactor* OptimizerService::TakeOver(grpc::CallbackServerContext* context,
                                                     const v1::TakeOverRequest* request,
                                                     v1::TakeOverResponse* response) {
  return Answer(context, TakeOverOn(server_, *request, response));
}

grpc::ServerUnaryReactor* OptimizerService::CloseRun(grpc::CallbackServerContext* context,
                                                     const v1::CloseRunRequest* request,
                                                     v1::CloseRunResponse* response) {
  return Answer(context, CloseRunOn(server_, *request, response));
}

grpc::ServerUnaryReactor* OptimizerService::JoinRun(grpc::CallbackServerContext* context,
                                                    const v1::JoinRunRequest* request,
                                                    v1::JoinRunResponse* response) {
  if (absl::Status known = RefuseUnknownFields(*request); !known.ok())
    return Answer(context, known);
  absl::StatusOr<std::shared_ptr<RunHost>> run = server_->FindRun(request->name());
  if (!run.ok()) return Answer(context, run.status());
  auto* call = new JoinCall;
  call->Start(*run, *request, response);
  return call;
}

grpc::ServerUnaryReactor* OptimizerService::Replan(grpc::CallbackServerContext* context,
                                                   const v1::ReplanRequest* request,
                                                   v1::ReplanResponse* response) {
  if (absl::Status known = RefuseUnknownFields(*request); !known.ok())
    return Answer(context, known);
  absl::StatusOr<std::shared_ptr<RunHost>> run = server_->FindRun(request->name());
  if (!run.ok()) return Answer(context, run.status());
  auto* call = new ReplanCall;
  call->Start(*run, *request, response);
  return call;
}

grpc::ServerBidiReactor<v1::TrainerMessage, v1::ServerMessage>* OptimizerService::Control(
    grpc::CallbackServerContext* context) {
  auto stream = std::make_shared<ControlStream>(context, streams_, clock_, server_);
  stream->Start();
  return stream.get();
}

grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>* OptimizerService::Data(
    grpc::CallbackServerContext* context) {
  auto stream = std::make_shared<DataChannel>(context, streams_, clock_, server_);
  stream->Start();
  return stream.get();
}

grpc::ServerReadReactor<grpc::ByteBuffer>* OptimizerService::InitWeights(
    grpc::CallbackServerContext*, grpc::ByteBuffer* response) {
  return new InitWeightsCall(server_, response);
}

}  // namespace stiefel
