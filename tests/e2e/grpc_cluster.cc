#include "tests/e2e/grpc_cluster.h"

#include <cstdlib>
#include <future>
#include <thread>

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

std::map<int32_t, uint64_t> GrpcCluster::StateHashes() const {
  std::map<int32_t, uint64_t> hashes;
  for (const auto& server : servers_) {
    v1::GetStatusRequest request;
    request.set_state_hash(true);
    std::promise<v1::ServerStatus> answer;
    server->core().GetStatus(request, [&answer](v1::ServerStatus s) { answer.set_value(s); });
    const v1::ServerStatus status = answer.get_future().get();
    for (const v1::RunStatus& run : status.runs()) {
      for (const v1::MatrixStatus& matrix : run.matrices()) {
        if (matrix.has_state_hash()) hashes[matrix.index()] = matrix.state_hash();
      }
    }
  }
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
