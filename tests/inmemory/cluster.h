// A few servers and trainers in this process, for tests of the client.
#ifndef STIEFEL_TESTS_INMEMORY_CLUSTER_H_
#define STIEFEL_TESTS_INMEMORY_CLUSTER_H_

#include <functional>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "client/trainer.h"
#include "gmock/gmock.h"
#include "google/protobuf/unknown_field_set.h"
#include "gtest/gtest.h"
#include "spdlog/spdlog.h"
#include "tests/inmemory/memory_peers.h"
#include "tests/inmemory/memory_transport.h"

namespace stiefel::testing {

inline ServerOptions SmallServer() {
  ServerOptions options;
  options.threads = 1;
  options.matrices_in_flight = 2;
  options.memory_limit_bytes = int64_t{256} << 20;
  options.credit_window_bytes = 4 << 20;
  return options;
}

class MemoryCluster {
 public:
  explicit MemoryCluster(int servers, ServerOptions options = SmallServer()) {
    // What these libraries make at first use is made before there are threads: ThreadSanitizer does
    // not see their own locks.
    google::protobuf::UnknownFieldSet::default_instance();
    spdlog::default_logger();
    for (int s = 0; s < servers; ++s) {
      addresses_.push_back(absl::StrCat("server", s, ":1"));
      peer_transports_.push_back(peers_.Transport(addresses_.back()));
      servers_.push_back(std::make_unique<MemoryServer>(options, peer_transports_.back().get()));
      transport_.Add(addresses_.back(), servers_.back().get());
      peers_.Add(addresses_.back(), servers_.back().get());
    }
    peers_.StartThread();
  }
  ~MemoryCluster() {
    for (const std::string& address : addresses_) peers_.Kill(address);
  }
  MemoryServer& server(int s) { return *servers_[s]; }
  // Until every server has recorded the decision on the step: a trainer knows it from the first.
  void AwaitDecided(int64_t step) {
    for (const auto& server : servers_) {
      while (server->core()->StatusNow().runs(0).consumed_step() < step) std::this_thread::yield();
    }
  }
  // How servers reach each other.
  MemoryPeers& peers() { return peers_; }
  Transport* transport() { return &transport_; }
  const std::vector<std::string>& addresses() const { return addresses_; }

  TrainerOptions Options(int32_t rank, int32_t world_size) const {
    TrainerOptions options;
    options.servers = addresses_;
    options.run = "test";
    options.rank = rank;
    options.world_size = world_size;
    options.chunk_bytes = 4096;
    options.connect_timeout = absl::Seconds(20);
    options.join_timeout = absl::Seconds(20);
    options.step_timeout = absl::Seconds(20);
    options.lease = absl::Seconds(20);
    return options;
  }

 private:
  std::vector<std::string> addresses_;
  MemoryPeers peers_{1, &RealClock()};
  std::vector<std::unique_ptr<PeerTransport>> peer_transports_;
  std::vector<std::unique_ptr<MemoryServer>> servers_;
  MemoryTransport transport_;
};

inline ParameterSpec Param(const std::string& name, std::vector<int64_t> shape,
                           const std::string& preset = "sgd") {
  ParameterSpec parameter;
  parameter.name = name;
  parameter.shape = std::move(shape);
  parameter.rule = *PresetRule(preset);
  return parameter;
}

inline TensorView View(const std::vector<float>& values, std::vector<int64_t> shape = {}) {
  if (shape.empty()) shape = {static_cast<int64_t>(values.size())};
  return {values.data(), ElementType::kFp32, std::move(shape), {}};
}
inline MutableTensorView MutableView(std::vector<float>* values) {
  return {values->data(), ElementType::kFp32, {static_cast<int64_t>(values->size())}, {}};
}

// One thread for each rank; returns when all have ended.
inline void RunRanks(int32_t world_size, const std::function<void(int32_t)>& body) {
  std::vector<std::thread> threads;
  for (int32_t rank = 0; rank < world_size; ++rank) threads.emplace_back([&, rank] { body(rank); });
  for (std::thread& thread : threads) thread.join();
}

#define ASSERT_OK(expr)                   \
  do {                                    \
    const absl::Status status_ = (expr);  \
    ASSERT_TRUE(status_.ok()) << status_; \
  } while (false)
#define EXPECT_STATUS(expr, expected_code, text)                             \
  do {                                                                       \
    const absl::Status status_ = (expr);                                     \
    EXPECT_EQ(status_.code(), absl::StatusCode::expected_code) << status_;   \
    EXPECT_THAT(std::string(status_.message()), ::testing::HasSubstr(text)); \
  } while (false)

inline std::unique_ptr<Trainer> MustConnect(MemoryCluster& cluster, const TrainerOptions& options,
                                            const std::vector<ParameterSpec>& parameters) {
  auto trainer = Trainer::Connect(options, parameters, cluster.transport());
  EXPECT_TRUE(trainer.ok()) << trainer.status();
  return trainer.ok() ? *std::move(trainer) : nullptr;
}

// Drawn for this step, rank and parameter, within [-1, 1].
inline std::vector<float> Gradient(int64_t elements, int64_t step, int32_t rank,
                                   int32_t parameter) {
  std::mt19937_64 random(step * 1000003 + rank * 1009 + parameter);
  std::vector<float> values(elements);
  for (float& value : values) {
    value = static_cast<float>(static_cast<int64_t>(random() % 20001) - 10000) / 10000.0f;
  }
  return values;
}

}  // namespace stiefel::testing

#endif  // STIEFEL_TESTS_INMEMORY_CLUSTER_H_
