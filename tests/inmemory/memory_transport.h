// Trainers and servers in one process, without gRPC: the client's sessions drive OptimizerServer
// directly, so that ThreadSanitizer sees every thread. Faults are methods: a test cuts streams,
// kills servers or freezes them when it wants to.
#ifndef STIEFEL_TESTS_INMEMORY_MEMORY_TRANSPORT_H_
#define STIEFEL_TESTS_INMEMORY_MEMORY_TRANSPORT_H_

#include <map>
#include <memory>
#include <set>
#include <string>
#include <thread>

#include "client/transport.h"
#include "common/mutex.h"
#include "server/optimizer_server.h"
#include "server/peer_transport.h"

namespace stiefel {

class MemoryStream;

// A server, and the thread that ticks it. What peers ask of it goes to the run that they name.
class MemoryServer final : public PeerHandler {
 public:
  // `peers`: as OptimizerServer::Create takes it.
  explicit MemoryServer(ServerOptions options, PeerTransport* peers = nullptr);
  ~MemoryServer() override;

  OptimizerServer* core() { return core_.get(); }

  // Streams and calls fail with UNAVAILABLE from now on, as after SIGKILL.
  void Kill();
  // Nothing that is sent arrives, and nothing is answered, as after SIGSTOP. For good.
  void Freeze();
  // Every stream breaks; new ones can be opened.
  void CutStreams();

  void OnFetchPart(const v1::FetchPartRequest& request, std::unique_ptr<PeerReply> reply) override;
  void OnFetchState(const v1::FetchStateRequest& request,
                    std::unique_ptr<PeerReply> reply) override;

  bool dead() const;
  bool frozen() const;

 private:
  friend class MemoryStream;
  void Register(MemoryStream* stream);
  void Forget(MemoryStream* stream);

  const std::unique_ptr<OptimizerServer> core_;
  mutable Mutex mutex_;
  CondVar wake_;
  std::set<MemoryStream*> streams_ ABSL_GUARDED_BY(mutex_);
  bool dead_ ABSL_GUARDED_BY(mutex_) = false;
  bool frozen_ ABSL_GUARDED_BY(mutex_) = false;
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  std::thread ticker_;
};

// Finds servers by address; addresses that it does not know are refused with UNAVAILABLE.
class MemoryTransport final : public Transport {
 public:
  // Not owned; outlives every connection.
  void Add(const std::string& address, MemoryServer* server) { servers_[address] = server; }

  std::unique_ptr<ServerConnection> Connect(const std::string& address, int data_streams) override;

 private:
  std::map<std::string, MemoryServer*> servers_;
};

}  // namespace stiefel

#endif  // STIEFEL_TESTS_INMEMORY_MEMORY_TRANSPORT_H_
