// ./run bench transport: how fast gradients reach a server and weights come back, against memcpy
// and against the barest gRPC stream, in one run.
//
// One trainer process (this one) and one server process on loopback. The run has three ranks: rank
// 0 leads and never begins a step, so that the server computes nothing while it is measured; rank 1
// pushes every gradient; rank 2 joins without weights and pulls them all. Each repeat measures all
// rates in turn, so that both sides of every ratio see the same machine. Rates are payload bytes,
// one way, in GB (10^9 bytes) per second.
#include <unistd.h>

#include <cstdio>
#include <cstring>
#include <iostream>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "CLI/CLI.hpp"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "client/trainer.h"
#include "common/grpc_status.h"
#include "common/status.h"
#include "grpcpp/grpcpp.h"
#include "stiefel/v1/status.grpc.pb.h"
#include "tests/bench/bare_stream.h"
#include "tests/bench/process.h"
#include "tests/bench/report.h"

namespace stiefel {
namespace {

struct BenchOptions {
  int64_t megabytes = 1024;
  int matrices = 16;
  int channels = 2;
  int64_t message_bytes = 1 << 20;
  int repeats = 5;
  std::string json;
  bool bare_server = false;
};

// Wall-clock and CPU seconds of one measured transfer.
struct Cost {
  double wall_s = 0;
  double sender_cpu_s = 0;
  double receiver_cpu_s = 0;
};

// Measures `work`, which moves data from process `sender` to process `receiver`.
template <typename Work>
absl::StatusOr<Cost> Measure(pid_t sender, pid_t receiver, const Work& work) {
  const double sender_before = CpuSeconds(sender);
  const double receiver_before = CpuSeconds(receiver);
  const absl::Time start = absl::Now();
  STIEFEL_RETURN_IF_ERROR(work());
  Cost cost;
  cost.wall_s = absl::ToDoubleSeconds(absl::Now() - start);
  cost.sender_cpu_s = CpuSeconds(sender) - sender_before;
  cost.receiver_cpu_s = CpuSeconds(receiver) - receiver_before;
  return cost;
}

class Bench {
 public:
  explicit Bench(const BenchOptions& options)
      : options_(options), rows_(options.megabytes * (1 << 20) / options.matrices / 4 / 2048) {
    gradients_.resize(static_cast<size_t>(options.matrices) * rows_ * 2048);
    for (size_t i = 0; i < gradients_.size(); ++i)
      gradients_[i] = static_cast<float>((i * 2654435761u) % 1000003) /
                      1000003;  // not zeros: they would be faster
  }

  absl::Status Run() {
    STIEFEL_RETURN_IF_ERROR(Start());
    for (int repeat = 0; repeat <= options_.repeats; ++repeat) {
      measured_ = repeat > 0;  // the first one warms both sides up
      STIEFEL_RETURN_IF_ERROR(Memcpy());
      STIEFEL_RETURN_IF_ERROR(Bare());
      STIEFEL_RETURN_IF_ERROR(Push());
      STIEFEL_RETURN_IF_ERROR(Pull());
      STIEFEL_RETURN_IF_ERROR(Both());
    }
    report_.Note("payload_bytes", Bytes());
    report_.Note("channels", options_.channels);
    report_.Note("message_bytes", options_.message_bytes);
    report_.Note("push_over_bare", report_.Median("push_gbps") / report_.Median("bare_gbps"));
    report_.Note("pull_over_bare", report_.Median("pull_gbps") / report_.Median("bare_gbps"));
    report_.Note("push_sender_cpu_over_bare", report_.Median("push_sender_cpu_s_per_gb") /
                                                  report_.Median("bare_sender_cpu_s_per_gb"));
    report_.Note("push_receiver_cpu_over_bare", report_.Median("push_receiver_cpu_s_per_gb") /
                                                    report_.Median("bare_receiver_cpu_s_per_gb"));
    return report_.Print(options_.json);
  }

 private:
  int64_t Bytes() const { return static_cast<int64_t>(gradients_.size() * sizeof(float)); }
  double Gigabytes() const { return static_cast<double>(Bytes()) / 1e9; }

  absl::Status Start() {
    char self[4096];
    const ssize_t length = readlink("/proc/self/exe", self, sizeof(self) - 1);
    STIEFEL_ASSIGN_OR_RETURN(
        bare_process_,
        ChildProcess::StartServer({std::string(self, static_cast<size_t>(length)), "--bare-server",
                                   "--megabytes", absl::StrCat(options_.megabytes)}));
    STIEFEL_ASSIGN_OR_RETURN(bare_,
                             BareClient::Connect(bare_process_->address(), options_.channels));
    STIEFEL_ASSIGN_OR_RETURN(
        server_process_,
        ChildProcess::StartServer({BinaryPath("server/stiefel-server"), "--listen=127.0.0.1:0"}));
    status_ = v1::Status::NewStub(
        grpc::CreateChannel(server_process_->address(), grpc::InsecureChannelCredentials()));
    STIEFEL_ASSIGN_OR_RETURN(const Rule rule, PresetRule("sgd"));
    for (int i = 0; i < options_.matrices; ++i)
      parameters_.push_back({absl::StrCat("w.", i), {rows_, 2048}, rule});
    parameters_.push_back({"gate", {1}, rule});
    // All three join at once: JoinRun waits for the last of them.
    absl::Status joined[3];
    std::vector<std::thread> threads;
    for (int rank = 0; rank < 3; ++rank)
      threads.emplace_back([this, rank, &joined] { joined[rank] = Connect(rank, 0); });
    for (std::thread& thread : threads) thread.join();
    for (const absl::Status& status : joined) STIEFEL_RETURN_IF_ERROR(status);
    std::vector<float> zeros(rows_ * 2048);
    for (const ParameterSpec& parameter : parameters_) {
      STIEFEL_RETURN_IF_ERROR(trainers_[0]->InitWeights(
          parameter.name, TensorView{zeros.data(), ElementType::kFp32, parameter.shape}));
    }
    return absl::OkStatus();
  }

  absl::Status Connect(int rank, std::optional<int64_t> applied) {
    trainers_[rank].reset();
    TrainerOptions options;
    options.servers = {server_process_->address()};
    options.run = "transport-bench";
    options.rank = rank;
    options.world_size = 3;
    options.mode = UpdateMode::kWeights;
    options.applied_step = applied;
    options.data_streams = options_.channels;
    options.chunk_bytes = options_.message_bytes;
    options.step_timeout = absl::Minutes(10);
    const std::vector<PushBlock> push = WholePushBlocks(parameters_);
    const std::vector<PullBlock> pull = WholePullBlocks(parameters_);
    options.push = {push.back()};
    options.pull = {pull.back()};
    if (rank == 1) options.push.assign(push.begin(), push.end() - 1);
    if (rank == 2) options.pull.assign(pull.begin(), pull.end() - 1);
    STIEFEL_ASSIGN_OR_RETURN(trainers_[rank], Trainer::Connect(options, parameters_));
    return absl::OkStatus();
  }

  void Add(const std::string& name, const Cost& cost) {
    if (!measured_) return;
    report_.Add(name + "_gbps", Gigabytes() / cost.wall_s);
    report_.Add(name == "push" ? "cpu_s_per_gb" : name + "_cpu_s_per_gb",
                (cost.sender_cpu_s + cost.receiver_cpu_s) / Gigabytes());
    report_.Add(name + "_sender_cpu_s_per_gb", cost.sender_cpu_s / Gigabytes());
    report_.Add(name + "_receiver_cpu_s_per_gb", cost.receiver_cpu_s / Gigabytes());
  }

  absl::Status Memcpy() {
    if (copy_.empty()) copy_.resize(gradients_.size());
    const absl::Time start = absl::Now();
    std::memcpy(copy_.data(), gradients_.data(), static_cast<size_t>(Bytes()));
    if (measured_)
      report_.Add("memcpy_gbps", Gigabytes() / absl::ToDoubleSeconds(absl::Now() - start));
    return absl::OkStatus();
  }

  absl::Status Bare() {
    STIEFEL_ASSIGN_OR_RETURN(const Cost cost, Measure(getpid(), bare_process_->pid(), [this] {
                               return bare_->Send(reinterpret_cast<const char*>(gradients_.data()),
                                                  Bytes(), options_.message_bytes);
                             }));
    Add("bare", cost);
    return absl::OkStatus();
  }

  absl::StatusOr<int64_t> BytesPlaced() {
    grpc::ClientContext context;
    v1::ServerStatus answer;
    STIEFEL_RETURN_IF_ERROR(FromGrpcStatus(status_->GetStatus(&context, {}, &answer)));
    if (answer.runs_size() != 1) return absl::InternalError("the server has lost its run");
    return answer.runs(0).bytes_pushed();
  }

  // From the first Push until the server has put the last byte in its place.
  absl::Status PushAll() {
    STIEFEL_ASSIGN_OR_RETURN(const int64_t before, BytesPlaced());
    Trainer& trainer = *trainers_[1];
    const float* gradient = gradients_.data();
    for (int i = 0; i < options_.matrices; ++i, gradient += rows_ * 2048) {
      STIEFEL_RETURN_IF_ERROR(
          trainer.Push(i, TensorView{gradient, ElementType::kFp32, {rows_, 2048}}));
    }
    STIEFEL_RETURN_IF_ERROR(trainer.EndPush());
    while (trainer.timings().push_s == 0) absl::SleepFor(absl::Milliseconds(1));
    while (true) {
      STIEFEL_ASSIGN_OR_RETURN(const int64_t now, BytesPlaced());
      if (now - before >= Bytes()) break;
      absl::SleepFor(absl::Milliseconds(1));
    }
    placed_ = Bytes();
    return absl::OkStatus();
  }

  // A new incarnation drops the attempt that the last measurement left open; begins the one after
  // it.
  absl::Status ResetPusher() {
    STIEFEL_RETURN_IF_ERROR(Connect(1, 0));
    while (true) {
      STIEFEL_RETURN_IF_ERROR(trainers_[1]->Begin(1));
      const auto dropped = trainers_[1]->Wait(absl::Milliseconds(300));
      if (absl::IsDeadlineExceeded(dropped.status()))
        return absl::OkStatus();  // begun, and nobody drops it
      if (!dropped.ok()) return dropped.status();
      STIEFEL_RETURN_IF_ERROR(trainers_[1]->Done());
    }
  }

  absl::Status Push() {
    STIEFEL_RETURN_IF_ERROR(ResetPusher());
    STIEFEL_ASSIGN_OR_RETURN(
        const Cost cost, Measure(getpid(), server_process_->pid(), [this] { return PushAll(); }));
    Add("push", cost);
    const StepTimings timings = trainers_[1]->timings();
    if (measured_)
      report_.Add("copies_per_byte", static_cast<double>(timings.bytes_staged + placed_) /
                                         static_cast<double>(timings.bytes_pushed));
    return absl::OkStatus();
  }

  // Joins without weights, and waits for all of them. The servers send from the moment that the
  // streams are open, which is just before Connect returns: what had arrived by then is not
  // counted.
  absl::StatusOr<Cost> PullAll() {
    trainers_[2].reset();
    STIEFEL_RETURN_IF_ERROR(Connect(2, std::nullopt));
    const int64_t before = trainers_[2]->timings().bytes_pulled;
    STIEFEL_ASSIGN_OR_RETURN(Cost cost, Measure(server_process_->pid(), getpid(), [this] {
                               return trainers_[2]->PullWeights(absl::Minutes(2)).status();
                             }));
    const double counted = static_cast<double>(Bytes()) / static_cast<double>(Bytes() - before);
    cost.wall_s *= counted;
    cost.sender_cpu_s *= counted;
    cost.receiver_cpu_s *= counted;
    return cost;
  }

  absl::Status Pull() {
    STIEFEL_ASSIGN_OR_RETURN(const Cost cost, PullAll());
    Add("pull", cost);
    return absl::OkStatus();
  }

  // Both at once. Connecting is in the time, as the push starts with it.
  absl::Status Both() {
    STIEFEL_RETURN_IF_ERROR(ResetPusher());
    const absl::Time start = absl::Now();
    absl::Status pulled;
    std::thread puller([this, &pulled] { pulled = PullAll().status(); });
    const absl::Status pushed = PushAll();
    puller.join();
    STIEFEL_RETURN_IF_ERROR(pushed);
    STIEFEL_RETURN_IF_ERROR(pulled);
    if (measured_)
      report_.Add("both_gbps", Gigabytes() / absl::ToDoubleSeconds(absl::Now() - start));
    return absl::OkStatus();
  }

  const BenchOptions options_;
  const int64_t rows_;
  std::vector<float> gradients_;
  std::vector<float> copy_;
  std::vector<ParameterSpec> parameters_;
  std::unique_ptr<ChildProcess> bare_process_;
  std::unique_ptr<ChildProcess> server_process_;
  std::unique_ptr<BareClient> bare_;
  std::unique_ptr<v1::Status::Stub> status_;
  std::unique_ptr<Trainer> trainers_[3];
  bool measured_ = false;
  int64_t placed_ = 0;
  Report report_;
};

int ServeBare(const BenchOptions& options) {
  auto server = BareServer::Start(options.megabytes << 20);
  if (!server.ok()) return 1;
  std::cout << "listening on 127.0.0.1:" << (*server)->port() << std::endl;
  pause();
  return 0;
}

}  // namespace
}  // namespace stiefel

int main(int argc, char** argv) {
  stiefel::BenchOptions options;
  CLI::App app("Transport rates of one trainer and one server on loopback");
  app.add_option("--megabytes", options.megabytes, "payload of one measurement, MiB")
      ->check(CLI::Range(16, 16384));
  app.add_option("--matrices", options.matrices, "how many matrices it is cut into")
      ->check(CLI::Range(1, 1024));
  app.add_option("--channels", options.channels, "connections per direction")
      ->check(CLI::Range(1, 64));
  app.add_option("--message-bytes", options.message_bytes, "payload of one message")
      ->check(CLI::Range(4096, 3932160));
  app.add_option("--repeats", options.repeats, "measurements of each rate")
      ->check(CLI::Range(1, 1000));
  app.add_option("--json", options.json, "also write the figures to this file");
  app.add_flag("--bare-server", options.bare_server,
               "be the receiving process of the bare stream (used by the bench itself)");
  CLI11_PARSE(app, argc, argv);
  if (options.bare_server) return stiefel::ServeBare(options);
  const absl::Status status = stiefel::Bench(options).Run();
  if (!status.ok()) std::fprintf(stderr, "transport bench: %s\n", status.ToString().c_str());
  return status.ok() ? 0 : 1;
}
