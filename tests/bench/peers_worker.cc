// Our side of ./run bench peers: holds a CPU backend and does what its standard input says, one
// JSON object per line, each answered by one line of JSON ({"error": TEXT} where it failed). Idle
// in between.
//
//   {"op": "case", "preset": P, "options": {KEY: VALUE}, "shapes": [[rows, cols]], "gradients":
//   FILE}
//       starts afresh: weights and state are zero. FILE holds the fp32 gradients, one after the
//       other. Answer: methods, gflop (by plan/cost.h, in the form and precision that really run),
//       dtype of the products
//   {"op": "steps", "count": N}          the next N steps. Answer: seconds, of all
//   {"op": "weights", "file": FILE}      writes the fp32 weights, one after the other
//   {"op": "copy"}                       memcpy of one state buffer of all. Answer: seconds, bytes
//   {"op": "gemm", "dtype": "fp32"}      Answer: gflops (per second)
#include <cstdio>
#include <fstream>
#include <iostream>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "CLI/CLI.hpp"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "common/status.h"
#include "kernels/cpu/cpu_backend.h"
#include "nlohmann/json.hpp"
#include "plan/cost.h"
#include "tests/bench/rules_set.h"

namespace stiefel {
namespace {

using nlohmann::json;

// The rule with its form and precision as `method` says that they run: "newton-schulz gram bf16".
Rule AsItRuns(Rule rule, const std::string& method) {
  if (rule.family != RuleFamily::kSpectral) return rule;
  const std::set<std::string> words = absl::StrSplit(method, ' ');
  rule.form = words.count("gram") > 0 ? PolarForm::kGram : PolarForm::kStandard;
  rule.compute = words.count("bf16") > 0 ? ComputeType::kBf16 : ComputeType::kFp32;
  return rule;
}

class Worker {
 public:
  explicit Worker(std::unique_ptr<Backend> backend) : backend_(std::move(backend)) {}

  json Introduce() const {
    const DeviceInfo& device = backend_->Info();
    return {{"device", device.name},
            {"instruction_set", device.instruction_set},
            {"threads", device.threads},
            {"bf16", device.has_bf16}};
  }

  absl::StatusOr<json> Do(const json& request) {
    const auto op = request.at("op").get<std::string>();
    if (op == "case") return Case(request);
    if (op == "gemm") return Gemm(request.at("dtype").get<std::string>());
    if (set_ == nullptr) return absl::InvalidArgumentError(op + " before the first case");
    if (op == "steps") return Steps(request.at("count").get<int64_t>());
    if (op == "weights") return Weights(request.at("file").get<std::string>());
    if (op == "copy") return Copy();
    return absl::InvalidArgumentError("unknown op " + op);
  }

 private:
  absl::StatusOr<json> Case(const json& request) {
    set_.reset();
    gradients_.clear();
    STIEFEL_ASSIGN_OR_RETURN(Rule rule, PresetRule(request.at("preset").get<std::string>()));
    for (const auto& [key, value] : request.at("options").items())
      STIEFEL_RETURN_IF_ERROR(SetOption(rule, key, value.get<std::string>()));
    std::vector<PlanMatrix> matrices;
    for (const auto& [rows, cols] :
         request.at("shapes").get<std::vector<std::pair<int64_t, int64_t>>>())
      matrices.push_back({absl::StrCat(matrices.size()), rows, cols, rule});
    STIEFEL_RETURN_IF_ERROR(ReadGradients(request.at("gradients").get<std::string>(), matrices));
    STIEFEL_ASSIGN_OR_RETURN(
        set_, RuleSet::Create(backend_.get(), std::move(matrices), RuleSet::Mode::kWeights));
    return Describe();
  }

  json Describe() const {
    std::set<std::string> methods;
    double flops = 0;
    for (size_t i = 0; i < set_->matrices().size(); ++i) {
      PlanMatrix matrix = set_->matrices()[i];
      const std::string& method = set_->rule(i).Method();
      methods.insert(method);
      matrix.rule = AsItRuns(matrix.rule, method);
      flops += StepCost(matrix, StepKind::kRefresh).flops;
    }
    const bool bf16 =
        AsItRuns(set_->matrices()[0].rule, set_->rule(0).Method()).compute == ComputeType::kBf16;
    return {{"methods", methods}, {"gflop", flops * 1e-9}, {"dtype", bf16 ? "bf16" : "fp32"}};
  }

  absl::Status ReadGradients(const std::string& file, const std::vector<PlanMatrix>& matrices) {
    std::ifstream in(file, std::ios::binary);
    for (const PlanMatrix& matrix : matrices) {
      const int64_t bytes = matrix.rows * matrix.cols * static_cast<int64_t>(sizeof(float));
      STIEFEL_ASSIGN_OR_RETURN(DeviceBuffer gradient, backend_->Allocate(bytes));
      if (!in.read(gradient.as<char>(), bytes))
        return absl::InvalidArgumentError(absl::StrCat(file, " ends within matrix ", matrix.name));
      gradients_.push_back(std::move(gradient));
    }
    return absl::OkStatus();
  }

  absl::StatusOr<json> Steps(int64_t count) {
    std::vector<const void*> gradients;
    for (const DeviceBuffer& gradient : gradients_) gradients.push_back(gradient.data());
    double sum = 0;
    for (int64_t i = 0; i < count; ++i) {
      STIEFEL_ASSIGN_OR_RETURN(const double seconds, set_->Step(gradients));
      sum += seconds;
    }
    return json{{"seconds", sum}};
  }

  absl::StatusOr<json> Weights(const std::string& file) {
    std::ofstream out(file, std::ios::binary);
    for (size_t i = 0; i < set_->matrices().size(); ++i) {
      const PlanMatrix& matrix = set_->matrices()[i];
      out.write(reinterpret_cast<const char*>(set_->weights(i)),
                matrix.rows * matrix.cols * static_cast<int64_t>(sizeof(float)));
    }
    if (!out.flush()) return absl::UnavailableError("cannot write " + file);
    return json::object();
  }

  absl::StatusOr<json> Copy() {
    const double seconds = set_->CopySeconds();
    return json{{"seconds", seconds}, {"bytes", set_->CopiedBytes()}};
  }

  absl::StatusOr<json> Gemm(const std::string& name) {
    STIEFEL_ASSIGN_OR_RETURN(const DType dtype, ParseDType(name));
    if (dtype != DType::kFp32 && !backend_->Info().has_bf16)
      return absl::InvalidArgumentError("no products in " + name + " here");
    STIEFEL_ASSIGN_OR_RETURN(const double rate, GemmRate(backend_.get(), dtype));
    return json{{"gflops", rate * 1e-9}};
  }

  const std::unique_ptr<Backend> backend_;
  std::vector<DeviceBuffer> gradients_;
  std::unique_ptr<RuleSet> set_;
};

json Answer(Worker* worker, const std::string& line) {
  try {
    const absl::StatusOr<json> answer = worker->Do(json::parse(line));
    return answer.ok() ? *answer : json{{"error", answer.status().ToString()}};
  } catch (const json::exception& error) {
    return {{"error", error.what()}};
  }
}

int Serve(int threads) {
  if (threads == 0) threads = static_cast<int>(std::thread::hardware_concurrency());
  absl::StatusOr<std::unique_ptr<Backend>> backend = CreateCpuBackend(threads);
  if (!backend.ok()) {
    std::fprintf(stderr, "peers worker: %s\n", backend.status().ToString().c_str());
    return 1;
  }
  Worker worker(*std::move(backend));
  std::cout << worker.Introduce() << std::endl;
  for (std::string line; std::getline(std::cin, line);)
    std::cout << Answer(&worker, line) << std::endl;
  return 0;
}

}  // namespace
}  // namespace stiefel

int main(int argc, char** argv) {
  int threads = 0;
  CLI::App app("Our side of ./run bench peers");
  app.add_option("--threads", threads, "0: all processors")->check(CLI::Range(0, 1024));
  CLI11_PARSE(app, argc, argv);
  return stiefel::Serve(threads);
}
