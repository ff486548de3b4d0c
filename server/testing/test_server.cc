#include "server/testing/test_server.h"

#include <cstdio>
#include <cstdlib>
#include <utility>

namespace stiefel {

ServerOptions TestServerOptions() {
  ServerOptions options;
  options.listen = "127.0.0.1:0";
  options.threads = 2;
  options.memory_limit_bytes = int64_t{4} << 30;
  options.grace_seconds = 2;
  return options;
}

TestServer::TestServer(ServerOptions options, const Clock& clock) {
  auto server = GrpcServer::Start(std::move(options), clock);
  if (!server.ok()) {
    std::fprintf(stderr, "no test server: %s\n", server.status().ToString().c_str());
    std::abort();
  }
  server_ = *std::move(server);
}

std::shared_ptr<grpc::Channel> TestServer::NewChannel() const {
  grpc::ChannelArguments arguments;
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  arguments.SetInt(GRPC_ARG_ENABLE_RETRIES, 0);
  arguments.SetMaxReceiveMessageSize(4 << 20);
  return grpc::CreateCustomChannel(address(), grpc::InsecureChannelCredentials(), arguments);
}

}  // namespace stiefel
