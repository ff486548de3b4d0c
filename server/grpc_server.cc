#include "server/grpc_server.h"

#include <grpcpp/ext/proto_server_reflection_plugin.h>
#include <grpcpp/health_check_service_interface.h>
#include <grpcpp/resource_quota.h>

#include <algorithm>
#include <chrono>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/status.h"
#include "proto/protocol.h"
#include "server/listen_address.h"
#include "spdlog/spdlog.h"

namespace stiefel {
namespace {

constexpr int64_t kTickMicros = 250000;
constexpr int64_t kDrainPollMicros = 20000;
// What gRPC may hold in buffers of its own, beside the streams' windows.
constexpr int64_t kMinQuotaBytes = int64_t{256} << 20;
constexpr int64_t kMaxQuotaBytes = int64_t{4} << 30;
// One stream's flow-control window: fixed, since probing for it costs more than it gains here.
constexpr int kStreamWindowBytes = 8 << 20;

void Configure(const ServerOptions& options, grpc::ServerBuilder* builder) {
  builder->SetMaxReceiveMessageSize(static_cast<int>(kMaxMessageBytes));
  builder->AddChannelArgument(GRPC_ARG_ALLOW_REUSEPORT, 0);
  // Clients ping every 10 s, also when no call is open (CASES E6).
  builder->AddChannelArgument(GRPC_ARG_KEEPALIVE_TIME_MS, 10000);
  builder->AddChannelArgument(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, 10000);
  builder->AddChannelArgument(GRPC_ARG_KEEPALIVE_PERMIT_WITHOUT_CALLS, 1);
  builder->AddChannelArgument(GRPC_ARG_HTTP2_MIN_RECV_PING_INTERVAL_WITHOUT_DATA_MS, 5000);
  builder->AddChannelArgument(GRPC_ARG_HTTP2_BDP_PROBE, 0);
  builder->AddChannelArgument(GRPC_ARG_HTTP2_STREAM_LOOKAHEAD_BYTES, kStreamWindowBytes);
  builder->AddChannelArgument(GRPC_ARG_MAX_CONCURRENT_STREAMS, options.max_streams);
  grpc::ResourceQuota quota("stiefel-server");
  quota.Resize(static_cast<size_t>(
      std::clamp(options.memory_limit_bytes / 4, kMinQuotaBytes, kMaxQuotaBytes)));
  builder->SetResourceQuota(quota);
}

}  // namespace

absl::StatusOr<std::unique_ptr<GrpcServer>> GrpcServer::Start(ServerOptions options,
                                                              const Clock& clock) {
  std::unique_ptr<GrpcServer> server(new GrpcServer(clock));
  server->peers_ = std::make_unique<GrpcPeerTransport>(grpc::InsecureChannelCredentials());
  STIEFEL_ASSIGN_OR_RETURN(
      server->core_, OptimizerServer::Create(std::move(options), &clock, server->peers_.get()));
  server->streams_ = std::make_unique<StreamRegistry>(server->core_->options().max_streams);
  server->optimizer_ =
      std::make_unique<OptimizerService>(server->core_.get(), server->streams_.get(), &clock);
  server->status_ = std::make_unique<StatusService>(server->core_.get(), &clock);
  server->peer_service_ = std::make_unique<PeerService>(
      [core =
           server->core_.get()](uint64_t run_uid) -> absl::StatusOr<std::shared_ptr<PeerHandler>> {
        STIEFEL_ASSIGN_OR_RETURN(std::shared_ptr<RunHost> run, core->FindRun(run_uid));
        return std::shared_ptr<PeerHandler>(std::move(run));
      },
      server->core_->options().max_streams);
  STIEFEL_RETURN_IF_ERROR(server->Listen());
  server->timer_ = std::thread([self = server.get()] { self->Loop(); });
  return server;
}

absl::Status GrpcServer::Listen() {
  const ServerOptions& options = core_->options();
  STIEFEL_ASSIGN_OR_RETURN(const ListenAddress listen, ResolveListenAddress(options.listen));
  if (!listen.loopback && !options.insecure) {
    return absl::FailedPreconditionError(absl::StrCat(
        "\"", options.listen, "\" (", listen.numeric,
        ") is not a loopback address, and the protocol is neither encrypted nor authenticated: "
        "anyone who reaches the port can change the run. Give --insecure to listen there all the "
        "same"));
  }
  STIEFEL_RETURN_IF_ERROR(ProbeListen(listen));
  grpc::EnableDefaultHealthCheckService(true);
  grpc::reflection::InitProtoReflectionServerBuilderPlugin();
  grpc::ServerBuilder builder;
  Configure(options, &builder);
  builder.AddListeningPort(absl::StrCat(listen.numeric, ":", listen.port),
                           grpc::InsecureServerCredentials(), &port_);
  builder.RegisterService(optimizer_.get());
  builder.RegisterService(status_.get());
  builder.RegisterService(peer_service_.get());
  server_ = builder.BuildAndStart();
  if (server_ == nullptr || port_ == 0)
    return absl::UnavailableError(absl::StrCat("cannot listen on ", options.listen));
  address_ = absl::StrCat(listen.numeric, ":", port_);
  core_->set_address(address_);
  server_->GetHealthCheckService()->SetServingStatus(true);
  return absl::OkStatus();
}

void GrpcServer::Loop() {
  for (;;) {
    {
      MutexLock lock(&mutex_);
      const int64_t due = RealClock().NowMicros() + kTickMicros;
      while (!stopping_ && changed_.WaitUntilMicros(&mutex_, due)) {
      }
      if (stopping_) return;
    }
    core_->Tick();
    streams_->Tick(clock_.NowMicros());
    status_->Tick();
  }
}

void GrpcServer::Shutdown() { ShutdownWithin(core_->options().grace_seconds); }

GrpcServer::~GrpcServer() { ShutdownWithin(0); }

void GrpcServer::WaitWhile(const std::function<bool()>& still, int64_t deadline_micros) {
  while (still() && RealClock().NowMicros() < deadline_micros) {
    MutexLock lock(&mutex_);
    changed_.WaitForMicros(&mutex_, kDrainPollMicros);
  }
}

void GrpcServer::ShutdownWithin(double grace_seconds) {
  {
    MutexLock lock(&mutex_);
    if (shut_down_) return;
    shut_down_ = true;
  }
  if (server_ != nullptr) {
    server_->GetHealthCheckService()->SetServingStatus(false);
    const int64_t deadline = RealClock().NowMicros() + static_cast<int64_t>(grace_seconds * 1e6);
    if (grace_seconds > 0 && core_->options().drain_to_peers && core_->AskToLeave())
      WaitWhile([this] { return core_->Leaving() || (core_->Away() && !core_->Left()); }, deadline);
    core_->Drain();
    WaitWhile([this] { return !core_->Drained(); }, deadline);
    if (!core_->Drained())
      spdlog::warn("stopping although a step is not decided, or its updates not sent");
  }
  {
    MutexLock lock(&mutex_);
    stopping_ = true;
  }
  changed_.NotifyAll();
  if (timer_.joinable()) timer_.join();
  if (server_ == nullptr) return;
  const absl::Status stop =
      absl::UnavailableError(absl::StrCat("server ", address_, " is shutting down"));
  core_->Disconnect(stop);
  streams_->EndAll(stop);
  status_->EndAll();
  peer_service_->EndAll(stop);
  // Open calls get a moment to take their status, then are cancelled (CASES E10).
  server_->Shutdown(std::chrono::system_clock::now() + std::chrono::milliseconds(500));
  server_->Wait();
}

}  // namespace stiefel
