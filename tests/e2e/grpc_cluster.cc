#include "tests/e2e/grpc_cluster.h"

#include <cstdlib>
#include <thread>

#include "server/testing/state_hashes.h"
#include "server/testing/test_server.h"

namespace stiefel {

GrpcCluster::GrpcCluster(int servers, Staging staging) {
  for (int s = 0; s < servers; ++s) {
    ServerOptions options = TestServerOptions();
    options.staging = staging;
    servers_.push_back(std::make_unique<TestServer>(options));
    addresses_.push_back(servers_.back()->address());
  }
}

GrpcCluster::~GrpcCluster() = default;

TrainerOptions GrpcCluster::Options(int32_t rank, int32_t world_size) const {
  TrainerOptions options;
  options.servers = addresses_;
  options.run = "e2e";
  options.rank = rank;
  options.world_size = world_size;
  options.chunk_bytes = 4096;
  options.connect_timeout = absl::Seconds(60);
  options.join_timeout = absl::Seconds(60);
  options.step_timeout = absl::Seconds(60);
  options.lease = absl::Seconds(60);
  return options;
}

void GrpcCluster::Kill(int server) { servers_[server]->Kill(); }

void GrpcCluster::AwaitDecided(int64_t step) const {
  for (const auto& server : servers_) {
    while (server->core().StatusNow().runs(0).consumed_step() < step) std::this_thread::yield();
  }
}

std::map<int32_t, uint64_t> GrpcCluster::StateHashes() const {
  std::map<int32_t, uint64_t> hashes;
  for (const auto& server : servers_) testing::AddStateHashes(&server->core(), &hashes);
  return hashes;
}

void RunRanks(int32_t world_size, const std::function<void(int32_t)>& body) {
  std::vector<std::thread> threads;
  for (int32_t rank = 0; rank < world_size; ++rank) {
    threads.emplace_back([&body, rank] { body(rank); });
  }
  for (std::thread& thread : threads) thread.join();
}

bool FullScale() {
  const char* scale = std::getenv("STIEFEL_TEST_SCALE");
  return scale != nullptr && std::string(scale) == "full";
}

}  // namespace stiefel
