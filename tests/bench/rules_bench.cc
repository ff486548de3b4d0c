// ./run bench rules: what the rules cost on the CPU backend, against our own muon in the same run.
//
// The matrices are those of GPT-2 124M that its model file puts under a spectral rule (48 hidden
// matrices, 85 million parameters; embeddings, gains and biases are left out), with gradients and
// deltas in the dtype of that file. They run as on a server, several at once (rules_set.h). Each
// repeat measures every rule over one whole cycle, right after a step of muon: figures are medians
// over repeats of the time of a step, and of its ratio to that step of muon.
#include <cstdio>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "CLI/CLI.hpp"
#include "absl/strings/str_cat.h"
#include "common/status.h"
#include "kernels/cpu/cpu_backend.h"
#include "plan/model.h"
#include "tests/bench/process.h"
#include "tests/bench/report.h"
#include "tests/bench/rules_set.h"

namespace stiefel {
namespace {

constexpr int64_t kSmallMatrices = 200;
constexpr int64_t kSmallSize = 64;
constexpr int kSmallSteps = 20;
constexpr int64_t kSmallPresetDivisor = 4;

struct BenchOptions {
  int repeats = 5;
  int threads = 0;
  bool full = true;
  std::string json;
};

struct Contender {
  std::string name;
  std::string preset;
  std::vector<std::pair<std::string, std::string>> options;
};

const std::vector<Contender>& Contenders() {
  static const auto* const kContenders = new std::vector<Contender>{
      {"periodic_k3", "periodic_rowwise_muon", {{"period", "3"}}},
      {"dion3_quarter", "dion3", {{"select_fraction", "0.25"}}},
      {"turbo", "turbo_muon", {}},
      {"himuon_256", "himuon", {{"tile", "256"}}},
  };
  return *kContenders;
}

absl::StatusOr<Rule> MakeRule(const Contender& contender) {
  STIEFEL_ASSIGN_OR_RETURN(Rule rule, PresetRule(contender.preset));
  for (const auto& [key, value] : contender.options)
    STIEFEL_RETURN_IF_ERROR(SetOption(rule, key, value));
  return rule;
}

// The spectral matrices of GPT-2 124M, all sizes divided by `divisor`.
absl::StatusOr<std::vector<PlanMatrix>> HiddenMatrices(int64_t divisor) {
  STIEFEL_ASSIGN_OR_RETURN(const ModelSpec model,
                           ReadModel(BinaryPath("plan/models/gpt2_124m.json")));
  std::vector<PlanMatrix> hidden;
  for (PlanMatrix matrix : Matrices(model)) {
    if (matrix.rule.family != RuleFamily::kSpectral) continue;
    matrix.rows /= divisor;
    matrix.cols /= divisor;
    hidden.push_back(std::move(matrix));
  }
  return hidden;
}

absl::StatusOr<std::unique_ptr<RuleSet>> MakeSet(Backend* backend, std::vector<PlanMatrix> matrices,
                                                 const Contender& contender) {
  STIEFEL_ASSIGN_OR_RETURN(const Rule rule, MakeRule(contender));
  for (PlanMatrix& matrix : matrices) matrix.rule = rule;
  return RuleSet::Create(backend, std::move(matrices), RuleSet::Mode::kDelta);
}

class Bench {
 public:
  explicit Bench(const BenchOptions& options) : options_(options) {}

  absl::Status Run() {
    STIEFEL_RETURN_IF_ERROR(Start());
    for (int repeat = 0; repeat <= options_.repeats; ++repeat) {
      measured_ = repeat > 0;  // the first one warms everything up
      for (size_t i = 0; i < sets_.size(); ++i) STIEFEL_RETURN_IF_ERROR(Compare(i));
      STIEFEL_RETURN_IF_ERROR(RowWise());
      STIEFEL_RETURN_IF_ERROR(Small());
    }
    Notes();
    return report_.Print(options_.json);
  }

 private:
  absl::Status Start() {
    const int threads = options_.threads > 0
                            ? options_.threads
                            : static_cast<int>(std::thread::hardware_concurrency());
    STIEFEL_ASSIGN_OR_RETURN(backend_, CreateCpuBackend(threads));
    STIEFEL_ASSIGN_OR_RETURN(const std::vector<PlanMatrix> matrices,
                             HiddenMatrices(options_.full ? 1 : kSmallPresetDivisor));
    STIEFEL_ASSIGN_OR_RETURN(gradients_, RandomGradients::Create(backend_.get(), matrices));
    STIEFEL_ASSIGN_OR_RETURN(muon_, MakeSet(backend_.get(), matrices, {"muon", "muon", {}}));
    for (const Contender& contender : Contenders()) {
      STIEFEL_ASSIGN_OR_RETURN(std::unique_ptr<RuleSet> set,
                               MakeSet(backend_.get(), matrices, contender));
      sets_.push_back(std::move(set));
    }
    PlanMatrix small = matrices[0];
    small.rows = small.cols = kSmallSize;
    const std::vector<PlanMatrix> smalls(kSmallMatrices, small);
    STIEFEL_ASSIGN_OR_RETURN(small_gradients_, RandomGradients::Create(backend_.get(), smalls));
    STIEFEL_ASSIGN_OR_RETURN(small_, MakeSet(backend_.get(), smalls, {"small", "muon", {}}));
    return absl::OkStatus();
  }

  void Add(const std::string& name, double value) {
    if (measured_) report_.Add(name, value);
  }

  absl::Status Compare(size_t contender) {
    RuleSet* const set = sets_[contender].get();
    const std::string& name = Contenders()[contender].name;
    STIEFEL_ASSIGN_OR_RETURN(const double muon, muon_->Step(gradients_.data()));
    double sum = 0;
    for (int64_t i = 0; i < set->cycle_steps(); ++i) {
      STIEFEL_ASSIGN_OR_RETURN(const double seconds, set->Step(gradients_.data()));
      sum += seconds;
    }
    const double mean = sum / static_cast<double>(set->cycle_steps());
    Add("muon_ms", muon * 1e3);
    Add(name + "_ms", mean * 1e3);
    Add(name, mean / muon);
    return absl::OkStatus();
  }

  // A step in which every matrix takes the row-wise step, in bytes that it must move per second,
  // against those that memcpy moves (it reads and writes each).
  absl::Status RowWise() {
    RuleSet* const set = sets_[0].get();
    const double copy = set->CopySeconds();
    STIEFEL_ASSIGN_OR_RETURN(const double seconds,
                             set->Step(gradients_.data(), StepKind::kOffRefresh));
    const PlanMatrix& any = set->matrices()[0];
    const int64_t bytes_per_element = DTypeSize(any.push_dtype) + DTypeSize(any.pull_dtype) +
                                      2 * static_cast<int64_t>(sizeof(float));
    const double moved = static_cast<double>(set->elements() * bytes_per_element) / seconds;
    const double copied = 2 * static_cast<double>(set->CopiedBytes()) / copy;
    Add("row_wise_ms", seconds * 1e3);
    Add("row_wise_gbps", moved * 1e-9);
    Add("memcpy_gbps", copied * 1e-9);
    Add("row_wise_memcpy_share", moved / copied);
    return absl::OkStatus();
  }

  // Many small matrices, against their operations at the rate of large products.
  absl::Status Small() {
    STIEFEL_ASSIGN_OR_RETURN(const double rate, GemmRate(backend_.get(), DType::kFp32));
    double sum = 0;
    for (int i = 0; i < kSmallSteps; ++i) {
      STIEFEL_ASSIGN_OR_RETURN(const double seconds, small_->Step(small_gradients_.data()));
      sum += seconds;
    }
    const double seconds = sum / kSmallSteps;
    Add("gemm_fp32_gflops", rate * 1e-9);
    Add("small_200_ms", seconds * 1e3);
    Add("small_200_us_per_matrix", seconds * 1e6 / kSmallMatrices);
    Add("small_200_over_flops", seconds * rate / small_->FlopsPerStep());
    return absl::OkStatus();
  }

  void Notes() {
    const DeviceInfo& device = backend_->Info();
    const PlanMatrix& any = muon_->matrices()[0];
    report_.Note("device", device.name);
    report_.Note("instruction_set", device.instruction_set);
    report_.Note("threads", device.threads);
    report_.Note("matrices", muon_->matrices().size());
    report_.Note("parameters", muon_->elements());
    report_.Note("gradient_dtype", std::string(DTypeName(any.push_dtype)));
    report_.Note("delta_dtype", std::string(DTypeName(any.pull_dtype)));
    for (size_t i = 0; i < sets_.size(); ++i) {
      const std::string& name = Contenders()[i].name;
      report_.Note(name + "_rule", DescribeRule(sets_[i]->matrices()[0].rule));
      report_.Note(name + "_method", sets_[i]->rule(0).Method());
      report_.Note(name + "_flops", sets_[i]->FlopsPerStep() / muon_->FlopsPerStep());
    }
    report_.Note("muon_method", muon_->rule(0).Method());
    report_.Note("muon_gflop", muon_->FlopsPerStep() * 1e-9);
  }

  const BenchOptions options_;
  std::unique_ptr<Backend> backend_;
  RandomGradients gradients_, small_gradients_;
  std::unique_ptr<RuleSet> muon_, small_;
  std::vector<std::unique_ptr<RuleSet>> sets_;  // of Contenders(), in order
  Report report_;
  bool measured_ = false;
};

}  // namespace
}  // namespace stiefel

int main(int argc, char** argv) {
  stiefel::BenchOptions options;
  std::string size = "full";
  CLI::App app(
      "Time of a step under each rule over that of muon, on the hidden matrices of GPT-2 124M");
  app.add_option("--repeats", options.repeats, "measured cycles")
      ->check(CLI::Range(1, 1000))
      ->capture_default_str();
  app.add_option("--preset-size", size, "full, or small: all sizes divided by 4")
      ->check(CLI::IsMember({"full", "small"}))
      ->capture_default_str();
  app.add_option("--threads", options.threads, "0: all processors")
      ->check(CLI::Range(0, 1024))
      ->capture_default_str();
  app.add_option("--json", options.json, "also write the figures to this file");
  CLI11_PARSE(app, argc, argv);
  options.full = size == "full";
  const absl::Status status = stiefel::Bench(options).Run();
  if (!status.ok()) std::fprintf(stderr, "rules bench: %s\n", status.ToString().c_str());
  return status.ok() ? 0 : 1;
}
