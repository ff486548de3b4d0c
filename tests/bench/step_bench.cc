// ./run bench step: a whole step of a GPT-2-124M-shaped model, at an eighth of its width and at
// full width: how long its parts take, what they cost, and what periodic refreshes save.
//
// For each width servers live side by side, one with a run of muon and one of
// periodic_rowwise_muon, and this process trains both, with the same gradients. Each repeat takes
// one cycle (K steps, so that every matrix refreshes once) of the one run and then of the other, so
// that both sides of the ratio see the same machine; idle servers only keep their lease. Figures
// are means over a cycle, per step; the table shows their median over the repeats. Those of
// periodic_rowwise_muon at full width have no prefix.
//
//   push_ms     Begin until the last gradient byte was handed to the network
//   compute_ms  time of the server's engine threads, added up
//   updates_ms  the first update byte here until the last; beside the computation
//   pull_ms     the same in a third run, of sgd, which computes next to nothing: the transfer alone
//   exposed_ms  from the last gradient on, until every update was here: what backward cannot hide
//   apply_ms    taking the updates into fp32 weights
//   step_ms     all of it
#include <unistd.h>

#include <cstdio>
#include <memory>
#include <string>
#include <vector>

#include "CLI/CLI.hpp"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "client/trainer.h"
#include "common/grpc_status.h"
#include "common/status.h"
#include "grpcpp/grpcpp.h"
#include "plan/memory.h"
#include "plan/model.h"
#include "stiefel/v1/status.grpc.pb.h"
#include "tests/bench/process.h"
#include "tests/bench/report.h"

namespace stiefel {
namespace {

constexpr int64_t kPeriod = 3;   // of periodic_rowwise_muon
constexpr int64_t kWidth = 768;  // of GPT-2 124M

struct BenchOptions {
  int repeats = 5;
  int threads = 0;
  double backward_ms = 0;
  bool full = true;
  bool eighth = true;
  std::string json;
};

double Now() { return absl::ToDoubleSeconds(absl::Now() - absl::UnixEpoch()); }

// Sums over the steps of a cycle; seconds, and bytes.
struct Cost {
  double push = 0, compute = 0, spectral_compute = 0, pull = 0, exposed = 0, apply = 0, total = 0;
  double trainer_cpu = 0, server_cpu = 0, bytes_pushed = 0, bytes_pulled = 0;
};

// The parameters of GPT-2 124M with hidden matrices on `preset` (sgd: all parameters) and its width
// divided by `divisor`.
absl::StatusOr<std::vector<ParameterSpec>> Parameters(const std::string& preset, int64_t divisor) {
  ModelOverrides overrides;
  overrides.preset = preset;
  STIEFEL_ASSIGN_OR_RETURN(const ModelSpec model,
                           ReadModel(BinaryPath("plan/models/gpt2_124m.json"), overrides));
  STIEFEL_ASSIGN_OR_RETURN(const Rule sgd, PresetRule("sgd"));
  std::vector<ParameterSpec> parameters;
  for (const ModelParameter& parameter : model.parameters) {
    const PlanMatrix& matrix = parameter.matrix;
    const auto narrow = [divisor](int64_t size) {
      return size % kWidth == 0 ? size / divisor : size;
    };
    ParameterSpec spec;
    spec.name = matrix.name;
    spec.shape = {narrow(matrix.cols)};
    if (parameter.dimensions == 2) spec.shape.insert(spec.shape.begin(), narrow(matrix.rows));
    spec.rule = preset == sgd.preset ? sgd : matrix.rule;
    spec.push_dtype = matrix.push_dtype;
    spec.pull_dtype = matrix.pull_dtype;
    parameters.push_back(std::move(spec));
  }
  return parameters;
}

// A run of its own on a server of its own.
class Side {
 public:
  static absl::StatusOr<std::unique_ptr<Side>> Start(const BenchOptions& options,
                                                     const std::string& preset, int64_t divisor) {
    std::unique_ptr<Side> side(new Side(options));
    STIEFEL_ASSIGN_OR_RETURN(side->parameters_, Parameters(preset, divisor));
    STIEFEL_ASSIGN_OR_RETURN(
        side->server_,
        ChildProcess::StartServer({BinaryPath("server/stiefel-server"), "--listen=127.0.0.1:0",
                                   absl::StrCat("--threads=", options.threads)}));
    side->status_ = v1::Status::NewStub(
        grpc::CreateChannel(side->server_->address(), grpc::InsecureChannelCredentials()));
    TrainerOptions trainer;
    trainer.servers = {side->server_->address()};
    trainer.run = "step-bench";
    trainer.step_timeout = absl::Minutes(10);
    STIEFEL_ASSIGN_OR_RETURN(side->trainer_, Trainer::Connect(trainer, side->parameters_));
    return side;
  }

  const std::vector<ParameterSpec>& parameters() const { return parameters_; }

  // The next K steps. `gradients` (wire dtype) and `weights` (fp32) hold all parameters, one after
  // the other.
  absl::StatusOr<Cost> Cycle(const std::vector<uint16_t>& gradients, std::vector<float>* weights) {
    Cost cost;
    STIEFEL_ASSIGN_OR_RETURN(const Compute before, EngineSeconds());
    const double trainer_cpu = CpuSeconds(getpid()), server_cpu = CpuSeconds(server_->pid());
    for (int64_t i = 0; i < kPeriod; ++i) {
      STIEFEL_RETURN_IF_ERROR(Step(gradients, weights, &cost));
    }
    STIEFEL_ASSIGN_OR_RETURN(const Compute after, EngineSeconds());
    cost.compute = after.all - before.all;
    cost.spectral_compute = after.spectral - before.spectral;
    cost.trainer_cpu = CpuSeconds(getpid()) - trainer_cpu;
    cost.server_cpu = CpuSeconds(server_->pid()) - server_cpu;
    return cost;
  }

  // Largest resident set of the server over the bytes that it owns: state, staged state, gradients
  // and deltas of its matrices.
  absl::StatusOr<double> ResidentOverOwned() const {
    STIEFEL_ASSIGN_OR_RETURN(const v1::ServerStatus status, Ask());
    MemoryOptions memory;
    STIEFEL_ASSIGN_OR_RETURN(memory.staging, ParseStaging(status.runs(0).staging()));
    int64_t owned = 0;
    for (const ParameterSpec& spec : parameters_) {
      PlanMatrix matrix{spec.name, spec.rows(),     spec.cols(),
                        spec.rule, spec.push_dtype, spec.pull_dtype.value_or(spec.push_dtype)};
      STIEFEL_ASSIGN_OR_RETURN(const MatrixBytes bytes,
                               BytesOfMatrix(matrix, matrix.rows * matrix.cols, memory));
      owned += bytes.Resident();
    }
    return static_cast<double>(PeakResidentBytes(server_->pid())) / static_cast<double>(owned);
  }

  // INTERNAL if the run did not do what was measured: a skipped or dropped step, another rule.
  absl::Status Check(const std::string& preset) const {
    STIEFEL_ASSIGN_OR_RETURN(const v1::ServerStatus status, Ask());
    const v1::RunStatus& run = status.runs(0);
    bool ran = false;
    for (const v1::MatrixStatus& matrix : run.matrices()) ran |= matrix.rule() == preset;
    if (run.skipped_steps() != 0 || run.dropped_attempts() != 0 || !ran) {
      return absl::InternalError(absl::StrCat(
          "run of ", preset, ": ", run.skipped_steps(), " steps skipped, ", run.dropped_attempts(),
          " attempts dropped, rule ", ran ? "as asked" : "another one"));
    }
    return absl::OkStatus();
  }

 private:
  struct Compute {
    double all = 0;
    double spectral = 0;
  };

  explicit Side(const BenchOptions& options) : options_(options) {}

  absl::StatusOr<v1::ServerStatus> Ask() const {
    grpc::ClientContext context;
    v1::ServerStatus answer;
    STIEFEL_RETURN_IF_ERROR(FromGrpcStatus(status_->GetStatus(&context, {}, &answer)));
    if (answer.runs_size() != 1) return absl::InternalError("the server has lost its run");
    return answer;
  }

  absl::StatusOr<Compute> EngineSeconds() const {
    STIEFEL_ASSIGN_OR_RETURN(const v1::ServerStatus status, Ask());
    Compute compute;
    compute.all = status.runs(0).compute_seconds();
    for (const v1::MatrixStatus& matrix : status.runs(0).matrices()) {
      if (matrix.rule() != "adamw") compute.spectral += matrix.compute_seconds();
    }
    return compute;
  }

  absl::Status Step(const std::vector<uint16_t>& gradients, std::vector<float>* weights,
                    Cost* cost) {
    const double begin = Now();
    STIEFEL_RETURN_IF_ERROR(trainer_->Begin(trainer_->next_step()));
    STIEFEL_RETURN_IF_ERROR(PushAll(gradients));
    STIEFEL_RETURN_IF_ERROR(trainer_->EndPush());
    const double pushed = Now();
    double first_update = 0;
    for (;;) {
      const absl::StatusOr<StepOutcome> outcome = trainer_->Wait(absl::Milliseconds(1));
      if (first_update == 0 && trainer_->timings().bytes_pulled > 0) first_update = Now();
      if (outcome.ok()) break;
      if (!absl::IsDeadlineExceeded(outcome.status()) || Now() - begin > 600) {
        return outcome.status();
      }
    }
    const double here = Now();
    std::vector<MutableTensorView> views;
    float* at = weights->data();
    for (const ParameterSpec& spec : parameters_) {
      views.push_back({at, ElementType::kFp32, spec.shape, {}});
      at += spec.rows() * spec.cols();
    }
    STIEFEL_RETURN_IF_ERROR(trainer_->ApplyAll(views));
    STIEFEL_RETURN_IF_ERROR(trainer_->Done());
    const StepTimings timings = trainer_->timings();
    cost->push += timings.push_s;
    cost->pull += here - first_update;
    cost->exposed += here - pushed;
    cost->apply += timings.apply_s;
    cost->total += Now() - begin;
    cost->bytes_pushed += static_cast<double>(timings.bytes_pushed);
    cost->bytes_pulled += static_cast<double>(timings.bytes_pulled);
    return absl::OkStatus();
  }

  // Last layer first, as backward makes them: at even distances over backward_ms, or at once.
  absl::Status PushAll(const std::vector<uint16_t>& gradients) {
    std::vector<const uint16_t*> starts;
    const uint16_t* at = gradients.data();
    for (const ParameterSpec& spec : parameters_) {
      starts.push_back(at);
      at += spec.rows() * spec.cols();
    }
    const double pause = options_.backward_ms / static_cast<double>(parameters_.size());
    for (size_t i = parameters_.size(); i-- > 0;) {
      if (pause > 0) absl::SleepFor(absl::Milliseconds(pause));
      const ParameterSpec& spec = parameters_[i];
      STIEFEL_RETURN_IF_ERROR(
          trainer_->Push(static_cast<int32_t>(i),
                         TensorView{starts[i], ToElementType(spec.push_dtype), spec.shape, {}}));
    }
    return absl::OkStatus();
  }

  const BenchOptions options_;
  std::vector<ParameterSpec> parameters_;
  std::unique_ptr<ChildProcess> server_;
  std::unique_ptr<v1::Status::Stub> status_;
  std::unique_ptr<Trainer> trainer_;
};

void AddCost(const std::string& prefix, const Cost& cost, Report* report) {
  const auto add = [&](const char* name, double sum) { report->Add(prefix + name, sum / kPeriod); };
  add("push_ms", cost.push * 1e3);
  add("compute_ms", cost.compute * 1e3);
  add("updates_ms", cost.pull * 1e3);
  add("exposed_ms", cost.exposed * 1e3);
  add("apply_ms", cost.apply * 1e3);
  add("step_ms", cost.total * 1e3);
  add("trainer_cpu_s", cost.trainer_cpu);
  add("server_cpu_s", cost.server_cpu);
  add("mb_pushed", cost.bytes_pushed * 1e-6);
  add("mb_pulled", cost.bytes_pulled * 1e-6);
}

absl::Status RunWidth(const BenchOptions& options, int64_t divisor, const std::string& prefix,
                      Report* report) {
  const std::string presets[] = {"muon", "periodic_rowwise_muon", "sgd"};
  std::unique_ptr<Side> sides[3];
  for (int i = 0; i < 3; ++i) {
    STIEFEL_ASSIGN_OR_RETURN(sides[i], Side::Start(options, presets[i], divisor));
  }
  int64_t elements = 0;
  for (const ParameterSpec& spec : sides[0]->parameters()) elements += spec.rows() * spec.cols();
  // Independent values of about 1e-3, in bf16: no matrix is of low rank.
  std::vector<uint16_t> gradients(elements);
  uint64_t state = 1;
  for (uint16_t& gradient : gradients) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    gradient = FloatToBf16((static_cast<float>(state >> 40) * 0x1p-24f - 0.5f) * 2e-3f);
  }
  std::vector<float> weights(elements, 0.0f);
  for (int repeat = 0; repeat <= options.repeats; ++repeat) {
    Cost costs[3];
    for (int i = 0; i < 3; ++i) {
      STIEFEL_ASSIGN_OR_RETURN(costs[i], sides[i]->Cycle(gradients, &weights));
    }
    if (repeat == 0) continue;  // warms everything up
    AddCost(prefix, costs[1], report);
    report->Add(prefix + "pull_ms", costs[2].pull * 1e3 / kPeriod);
    AddCost(prefix + "muon_", costs[0], report);
    report->Add(prefix + "periodic_over_muon_compute", costs[1].compute / costs[0].compute);
    report->Add(prefix + "periodic_over_muon_spectral_compute",
                costs[1].spectral_compute / costs[0].spectral_compute);
    STIEFEL_ASSIGN_OR_RETURN(const double ratio, sides[1]->ResidentOverOwned());
    report->Add(prefix + "server_rss_over_owned", ratio);
  }
  report->Note(prefix + "parameters", elements);
  for (int i = 0; i < 3; ++i) STIEFEL_RETURN_IF_ERROR(sides[i]->Check(presets[i]));
  return absl::OkStatus();
}

absl::Status Run(const BenchOptions& options) {
  Report report;
  if (options.full) STIEFEL_RETURN_IF_ERROR(RunWidth(options, 1, "", &report));
  if (options.eighth) STIEFEL_RETURN_IF_ERROR(RunWidth(options, 8, "eighth_", &report));
  report.Note("backward_ms", options.backward_ms);
  return report.Print(options.json);
}

}  // namespace
}  // namespace stiefel

int main(int argc, char** argv) {
  stiefel::BenchOptions options;
  std::string width = "both";
  CLI::App app("Whole steps of a GPT-2-124M-shaped model: one trainer, one server, on loopback");
  app.add_option("--repeats", options.repeats, "measured cycles of three steps")
      ->check(CLI::Range(1, 1000))
      ->capture_default_str();
  app.add_option("--width", width, "full, eighth or both")
      ->check(CLI::IsMember({"full", "eighth", "both"}))
      ->capture_default_str();
  app.add_option("--threads", options.threads, "of the server; 0: all processors")
      ->check(CLI::Range(0, 1024))
      ->capture_default_str();
  app.add_option("--backward-ms", options.backward_ms,
                 "gradients become ready over so long; 0: all are there at once")
      ->check(CLI::Range(0.0, 1e6))
      ->capture_default_str();
  app.add_option("--json", options.json, "also write the figures to this file");
  CLI11_PARSE(app, argc, argv);
  options.full = width != "eighth";
  options.eighth = width != "full";
  const absl::Status status = stiefel::Run(options);
  if (!status.ok()) std::fprintf(stderr, "step bench: %s\n", status.ToString().c_str());
  return status.ok() ? 0 : 1;
}
