// ./run bench overlap: how much of a step's optimizer time backward hides.
//
// A trainer replays the backward pass of a GPT-2-shaped model without using the processor: it
// sleeps until each matrix's gradient is due and pushes a buffer that was filled before. Servers
// are processes behind a link of 1 Gb/s and 0.2 ms (shaped_link.h). Backward takes 1.5 times the
// longer of link time and computing time. Before the run, and through the same link, the rates, the
// latency and the computing time of every matrix are measured; from them alone plan/step_timeline.h
// predicts the critical path.
//
//   exposed_ms        from the last gradient until the outcome and all updates are here
//   no_overlap_ms     the same where all gradients are pushed after backward, in one go
//   critical_path_ms  the prediction for exposed_ms
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "CLI/CLI.hpp"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "client/trainer.h"
#include "common/clock.h"
#include "common/dtype.h"
#include "common/grpc_status.h"
#include "common/status.h"
#include "grpcpp/grpcpp.h"
#include "plan/step_timeline.h"
#include "stiefel/v1/status.grpc.pb.h"
#include "tests/bench/delay_proxy.h"
#include "tests/bench/process.h"
#include "tests/bench/report.h"
#include "tests/bench/shaped_link.h"

namespace stiefel {
namespace {

constexpr double kBackwardOverSlowest = 1.5;
constexpr int kCalibrationSteps = 5;
constexpr int64_t kCalibrationBytes = 16 << 20;

struct BenchOptions {
  int repeats = 7;
  int layers = 12;
  int64_t width = 384;
  int servers = 1;
  int threads = 1;
  int64_t delay_micros = 200;
  bool ten_gigabit = true;
  std::string trace;  // folder
  std::string json;
};

std::string SelfPath() {
  char path[4096];
  const ssize_t length = readlink("/proc/self/exe", path, sizeof(path));
  return std::string(path, length > 0 ? static_cast<size_t>(length) : 0);
}

double Now() { return static_cast<double>(RealClock().NowMicros()) / 1e6; }

void SleepUntil(double time) {
  const double left = time - Now();
  if (left > 0) absl::SleepFor(absl::Seconds(left));
}

// The hidden matrices of GPT-2, in the order in which forward needs them, bf16 both ways.
absl::StatusOr<std::vector<ParameterSpec>> Parameters(const BenchOptions& options) {
  std::vector<ParameterSpec> parameters;
  const int64_t w = options.width;
  const std::pair<const char*, std::vector<int64_t>> shapes[] = {{"attn.c_attn", {3 * w, w}},
                                                                 {"attn.c_proj", {w, w}},
                                                                 {"mlp.c_fc", {4 * w, w}},
                                                                 {"mlp.c_proj", {w, 4 * w}}};
  for (int layer = 0; layer < options.layers; ++layer) {
    for (const auto& [name, shape] : shapes) {
      ParameterSpec parameter;
      parameter.name = absl::StrCat("h.", layer, ".", name, ".weight");
      parameter.shape = shape;
      STIEFEL_ASSIGN_OR_RETURN(parameter.rule, PresetRule("muon"));
      parameter.push_dtype = DType::kBf16;
      parameters.push_back(std::move(parameter));
    }
  }
  return parameters;
}

double BytesOf(const ParameterSpec& parameter) {
  return static_cast<double>(parameter.rows() * parameter.cols() * DTypeSize(parameter.push_dtype));
}

// Servers, the trainer, and the steps that it replays.
class Bench {
 public:
  Bench(const BenchOptions& options, ShapedLink* link) : options_(options), link_(link) {}

  absl::Status Start() {
    STIEFEL_ASSIGN_OR_RETURN(parameters_, Parameters(options_));
    STIEFEL_ASSIGN_OR_RETURN(peer_, link_->StartFar({SelfPath(), "--link-peer"}));
    TrainerOptions trainer;
    for (int s = 0; s < options_.servers; ++s) {
      std::vector<std::string> argv = {BinaryPath("server/stiefel-server"), "--listen=127.0.0.1:0",
                                       absl::StrCat("--threads=", options_.threads),
                                       "--matrices-in-flight=1", "--log-level=warning"};
      if (!options_.trace.empty())
        argv.push_back(absl::StrCat("--trace=", options_.trace, "/server", s, ".json"));
      STIEFEL_ASSIGN_OR_RETURN(ShapedLink::Far server, link_->StartFar(argv));
      trainer.servers.push_back(server.address);
      status_.push_back(v1::Status::NewStub(
          grpc::CreateChannel(server.address, grpc::InsecureChannelCredentials())));
      servers_.push_back(std::move(server));
    }
    trainer.run = "overlap-bench";
    trainer.step_timeout = absl::Minutes(5);
    if (!options_.trace.empty()) trainer.trace_file = options_.trace + "/trainer.json";
    STIEFEL_ASSIGN_OR_RETURN(trainer_, Trainer::Connect(trainer, parameters_));
    FillGradients();
    return absl::OkStatus();
  }

  // Measures the link as it is shaped now, and what the matrices cost; fixes the timeline.
  absl::Status Calibrate() {
    STIEFEL_ASSIGN_OR_RETURN(figures_, MeasureLink(peer_.address, kCalibrationBytes, 5));
    backward_s_ = 0;
    STIEFEL_RETURN_IF_ERROR(MeasureCompute(/*overlap=*/false));
    FixTimeline();
    // What a matrix costs while others travel at the pace of the run, on processors that the server
    // shares with the trainer and the network.
    return MeasureCompute(/*overlap=*/true);
  }

  double PredictedExposed(bool overlap) const {
    std::vector<TimelineMatrix> matrices;
    for (size_t i = 0; i < parameters_.size(); ++i) {
      const double bytes = BytesOf(parameters_[i]);
      matrices.push_back(
          {overlap ? ready_s_[i] : backward_s_, bytes, compute_s_[i], bytes, owners_[i]});
    }
    const TimelineLink link{figures_.push_bytes_per_s, figures_.pull_bytes_per_s,
                            figures_.latency_s};
    return SimulateStep(matrices, link, 1).exposed_s;
  }

  // One step; how long after the last gradient all updates are here.
  absl::StatusOr<double> Step(bool overlap) {
    STIEFEL_RETURN_IF_ERROR(trainer_->Begin(trainer_->next_step()));
    const double begin = Now();
    double last_gradient = begin + backward_s_;
    if (!overlap) SleepUntil(last_gradient);
    for (size_t i = parameters_.size(); i-- > 0;) {
      if (overlap) SleepUntil(begin + ready_s_[i]);
      if (overlap || i + 1 == parameters_.size()) last_gradient = Now();
      STIEFEL_RETURN_IF_ERROR(trainer_->Push(
          static_cast<int32_t>(i),
          TensorView{gradients_[i].data(), ElementType::kBf16, parameters_[i].shape, {}}));
    }
    STIEFEL_RETURN_IF_ERROR(trainer_->EndPush());
    STIEFEL_ASSIGN_OR_RETURN(const StepOutcome outcome, trainer_->Wait(absl::Minutes(2)));
    const double exposed = Now() - last_gradient;
    if (outcome.outcome != Outcome::kCommit)
      return absl::InternalError(absl::StrCat("step ", outcome.step, ": ", outcome.reason));
    STIEFEL_RETURN_IF_ERROR(trainer_->Done());
    return exposed;
  }

  absl::Status Measure(const std::string& prefix, int repeats, Report* report) {
    STIEFEL_RETURN_IF_ERROR(Calibrate());
    const double predicted = PredictedExposed(true);
    const auto add = [&](const char* name, double value) { report->Add(prefix + name, value); };
    for (int repeat = 0; repeat < repeats; ++repeat) {
      STIEFEL_ASSIGN_OR_RETURN(const double exposed, Step(true));
      STIEFEL_ASSIGN_OR_RETURN(const double no_overlap, Step(false));
      add("exposed_ms", exposed * 1e3);
      add("no_overlap_ms", no_overlap * 1e3);
      add("exposed_over_no_overlap", exposed / no_overlap);
      add("exposed_over_critical_path", exposed / predicted);
    }
    const auto note = [&](const char* name, double value) { report->Note(prefix + name, value); };
    note("critical_path_ms", predicted * 1e3);
    note("predicted_no_overlap_ms", PredictedExposed(false) * 1e3);
    note("link_push_mbit_s", figures_.push_bytes_per_s * 8e-6);
    note("link_pull_mbit_s", figures_.pull_bytes_per_s * 8e-6);
    note("link_latency_ms", figures_.latency_s * 1e3);
    note("link_ms", link_s_ * 1e3);
    note("compute_ms", compute_total_s_ * 1e3);
    note("paced_compute_ms", BusiestServerSeconds() * 1e3);
    note("backward_ms", backward_s_ * 1e3);
    note("last_matrix_compute_ms", compute_s_[0] * 1e3);
    return absl::OkStatus();
  }

 private:
  double BusiestServerSeconds() const {
    std::vector<double> seconds(servers_.size(), 0);
    for (size_t i = 0; i < parameters_.size(); ++i) seconds[owners_[i]] += compute_s_[i];
    return *std::max_element(seconds.begin(), seconds.end());
  }

  // Backward from the link and the computing time as they are known now.
  void FixTimeline() {
    double bytes = 0;
    for (const ParameterSpec& parameter : parameters_) bytes += BytesOf(parameter);
    compute_total_s_ = BusiestServerSeconds();
    link_s_ = bytes / std::min(figures_.push_bytes_per_s, figures_.pull_bytes_per_s);
    backward_s_ = kBackwardOverSlowest * std::max(link_s_, compute_total_s_);
    // Backward goes through the layers from the last to the first; a matrix takes its share of the
    // multiplications, which is that of its elements.
    ready_s_.assign(parameters_.size(), 0);
    double elements = 0;
    for (size_t i = parameters_.size(); i-- > 0;) {
      elements += BytesOf(parameters_[i]);
      ready_s_[i] = backward_s_ * elements / bytes;
    }
  }

  // Independent values of about 1e-3: no matrix is of low rank.
  void FillGradients() {
    uint64_t state = 1;
    for (const ParameterSpec& parameter : parameters_) {
      gradients_.emplace_back(parameter.rows() * parameter.cols());
      for (uint16_t& gradient : gradients_.back()) {
        state = state * 6364136223846793005u + 1442695040888963407u;
        gradient = FloatToBf16((static_cast<float>(state >> 40) * 0x1p-24f - 0.5f) * 2e-3f);
      }
    }
  }

  // Seconds that servers have spent on each matrix so far, and who owns it.
  absl::StatusOr<std::vector<double>> ComputeSeconds() {
    std::map<std::string, size_t> index;
    for (size_t i = 0; i < parameters_.size(); ++i) index[parameters_[i].name] = i;
    std::vector<double> seconds(parameters_.size(), 0);
    owners_.assign(parameters_.size(), 0);
    for (size_t s = 0; s < status_.size(); ++s) {
      grpc::ClientContext context;
      v1::ServerStatus answer;
      STIEFEL_RETURN_IF_ERROR(FromGrpcStatus(status_[s]->GetStatus(&context, {}, &answer)));
      if (answer.runs_size() != 1) return absl::InternalError("a server has lost its run");
      for (const v1::MatrixStatus& matrix : answer.runs(0).matrices()) {
        const auto found = index.find(matrix.name());
        if (found == index.end())
          return absl::InternalError(absl::StrCat("no matrix is called ", matrix.name()));
        seconds[found->second] += matrix.compute_seconds();
        owners_[found->second] = static_cast<int32_t>(s);
      }
    }
    return seconds;
  }

  // The median over some steps; the first of all warms everything up.
  absl::Status MeasureCompute(bool overlap) {
    std::vector<std::vector<double>> samples(parameters_.size());
    for (int step = 0; step <= kCalibrationSteps; ++step) {
      STIEFEL_ASSIGN_OR_RETURN(const std::vector<double> before, ComputeSeconds());
      STIEFEL_RETURN_IF_ERROR(Step(overlap).status());
      STIEFEL_ASSIGN_OR_RETURN(const std::vector<double> after, ComputeSeconds());
      for (size_t i = 0; step > 0 && i < samples.size(); ++i)
        samples[i].push_back(after[i] - before[i]);
    }
    compute_s_.clear();
    for (std::vector<double>& sample : samples) {
      std::sort(sample.begin(), sample.end());
      compute_s_.push_back(sample[sample.size() / 2]);
    }
    return absl::OkStatus();
  }

  const BenchOptions options_;
  ShapedLink* const link_;
  std::vector<ParameterSpec> parameters_;
  std::vector<std::vector<uint16_t>> gradients_;
  ShapedLink::Far peer_;
  std::vector<ShapedLink::Far> servers_;
  std::vector<std::unique_ptr<v1::Status::Stub>> status_;
  std::unique_ptr<Trainer> trainer_;

  // By matrix, and of all of them.
  LinkFigures figures_;
  std::vector<double> compute_s_, ready_s_;
  std::vector<int32_t> owners_;
  double compute_total_s_ = 0;  // of the busiest server, without pauses
  double link_s_ = 0;
  double backward_s_ = 0;
};

absl::Status Run(const BenchOptions& options) {
  STIEFEL_ASSIGN_OR_RETURN(const std::unique_ptr<ShapedLink> link,
                           ShapedLink::Create(SelfPath(), options.delay_micros));
  STIEFEL_RETURN_IF_ERROR(link->SetRate(1e9));
  Bench bench(options, link.get());
  STIEFEL_RETURN_IF_ERROR(bench.Start());
  Report report;
  STIEFEL_RETURN_IF_ERROR(bench.Measure("", options.repeats, &report));
  if (options.ten_gigabit) {
    STIEFEL_RETURN_IF_ERROR(link->SetRate(1e10));
    STIEFEL_RETURN_IF_ERROR(bench.Measure("ten_gigabit_", std::min(options.repeats, 3), &report));
  }
  report.Note("layers", options.layers);
  report.Note("width", options.width);
  report.Note("servers", options.servers);
  report.Note("server_threads", options.threads);
  report.Note("delay_us", options.delay_micros);
  return report.Print(options.json);
}

}  // namespace
}  // namespace stiefel

int main(int argc, char** argv) {
  stiefel::BenchOptions options;
  std::string proxy_target;
  bool link_peer = false;
  CLI::App app(
      "Optimizer time that backward does not hide, over a link of 1 Gb/s and 0.2 ms. Needs root "
      "(network namespaces, tc)");
  app.add_option("--repeats", options.repeats, "measured steps of each kind")
      ->check(CLI::Range(1, 1000))
      ->capture_default_str();
  app.add_option("--layers", options.layers, "of the GPT-2-shaped model")
      ->check(CLI::Range(1, 96))
      ->capture_default_str();
  app.add_option("--width", options.width, "of the model; 768 is GPT-2 124M")
      ->check(CLI::Range(16, 12288))
      ->capture_default_str();
  app.add_option("--servers", options.servers, "how many processes")
      ->check(CLI::Range(1, 64))
      ->capture_default_str();
  app.add_option("--threads", options.threads, "of each server")
      ->check(CLI::Range(1, 1024))
      ->capture_default_str();
  app.add_option("--delay-us", options.delay_micros, "latency of the link each way, microseconds")
      ->check(CLI::Range(0, 1000000))
      ->capture_default_str();
  app.add_flag("--ten-gigabit,!--no-ten-gigabit", options.ten_gigabit,
               "measure with 10 Gb/s as well");
  app.add_option("--trace", options.trace, "write Chrome traces of all processes to this folder")
      ->check(CLI::ExistingDirectory);
  app.add_option("--json", options.json, "also write the figures to this file");
  app.add_option("--delay-proxy", proxy_target,
                 "be the proxy in front of this address (used by the bench itself)");
  app.add_flag("--link-peer", link_peer,
               "be the other end of the measured link (used by the bench itself)");
  CLI11_PARSE(app, argc, argv);
  if (!proxy_target.empty()) return stiefel::RunDelayProxy(proxy_target, options.delay_micros);
  if (link_peer) return stiefel::RunLinkPeer();
  const absl::Status status = stiefel::Run(options);
  if (!status.ok())
    std::fprintf(stderr, "overlap bench: %s\n", std::string(status.message()).c_str());
  return status.ok() ? 0 : 1;
}
