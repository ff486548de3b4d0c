// Real servers on loopback ports of this process, for tests of whole runs.
#ifndef STIEFEL_TESTS_E2E_GRPC_CLUSTER_H_
#define STIEFEL_TESTS_E2E_GRPC_CLUSTER_H_

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "client/trainer.h"
#include "plan/memory.h"

namespace stiefel {

class TestServer;

class GrpcCluster {
 public:
  explicit GrpcCluster(int servers, Staging staging = Staging::kDouble);
  ~GrpcCluster();

  // Small chunks, generous deadlines.
  TrainerOptions Options(int32_t rank, int32_t world_size) const;
  const std::vector<std::string>& addresses() const { return addresses_; }
  // Ends a server without grace.
  void Kill(int server);

  // Until every server has recorded the decision on the step: a trainer knows it from the first.
  void AwaitDecided(int64_t step) const;
  // Hashes of the committed state by parameter index, over all servers.
  std::map<int32_t, uint64_t> StateHashes() const;

 private:
  std::vector<std::string> addresses_;
  std::vector<std::unique_ptr<TestServer>> servers_;
};

// One thread for each rank; returns when all have ended.
void RunRanks(int32_t world_size, const std::function<void(int32_t)>& body);

// Full counts (STIEFEL_TEST_SCALE=full), or the few that every run of the tests has time for.
bool FullScale();

}  // namespace stiefel

#endif  // STIEFEL_TESTS_E2E_GRPC_CLUSTER_H_
