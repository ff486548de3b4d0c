#ifndef STIEFEL_SERVER_TESTING_TEST_SERVER_H_
#define STIEFEL_SERVER_TESTING_TEST_SERVER_H_

#include <memory>
#include <string>

#include "grpcpp/grpcpp.h"
#include "server/grpc_server.h"
#include "server/options.h"

namespace stiefel {

// Small and quick: one thread, lazy or double staging as asked, a free loopback port.
ServerOptions TestServerOptions();

// A real server in this process, on a free loopback port. Aborts the test's process if it cannot
// start: there is nothing to test then.
class TestServer {
 public:
  explicit TestServer(ServerOptions options = TestServerOptions(),
                      const Clock& clock = RealClock());

  const std::string& address() const { return server_->address(); }
  OptimizerServer& core() { return server_->core(); }
  GrpcServer& server() { return *server_; }
  // A connection of its own.
  std::shared_ptr<grpc::Channel> NewChannel() const;
  // Ends everything without grace, as a process that is killed would, and frees the port.
  void Kill() { server_.reset(); }

 private:
  std::unique_ptr<GrpcServer> server_;
};

}  // namespace stiefel

#endif  // STIEFEL_SERVER_TESTING_TEST_SERVER_H_
