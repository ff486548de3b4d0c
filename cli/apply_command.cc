#include "cli/apply_command.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <filesystem>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "cli/apply_backend.h"
#include "cli/apply_output.h"
#include "cli/apply_report.h"
#include "common/safetensors/reader.h"
#include "common/status.h"
#include "plan/nearest.h"

namespace stiefel {
namespace {

constexpr int kMaxThreads = 1024;
constexpr int64_t kMaxSteps = 1000000;

absl::Status Check(const ApplyCommandOptions& options) {
  if (options.backend != "cpu" && options.backend != "reference") {
    return absl::InvalidArgumentError(absl::StrCat("--backend=", PrintableName(options.backend),
                                                   " is neither cpu nor reference"));
  }
  if (options.steps.has_value() && (*options.steps < 1 || *options.steps > kMaxSteps)) {
    return absl::InvalidArgumentError(
        absl::StrCat("--steps=", *options.steps, " is outside 1..", kMaxSteps));
  }
  if (options.threads < 0 || options.threads > kMaxThreads) {
    return absl::InvalidArgumentError(
        absl::StrCat("--threads=", options.threads, " is outside 0..", kMaxThreads));
  }
  for (const std::string& input : {options.grads, options.weights}) {
    std::error_code none;  // a path that is not there is no input to lose
    if (options.overwrite && std::filesystem::equivalent(input, options.out, none)) {
      return absl::InvalidArgumentError(absl::StrCat("--out ", options.out, " is the input ", input,
                                                     "; --overwrite would destroy it"));
    }
  }
  return absl::OkStatus();
}

std::string KindName(const ApplyParameter& p, StepKind kind) {
  if (p.rule.family == RuleFamily::kPolora) return "polora";
  if (p.rule.family != RuleFamily::kSpectral) return "element_wise";
  if (kind == StepKind::kRefresh) return "refresh";
  return p.rule.off_refresh == OffRefresh::kTiled ? "tiled" : "row_wise";
}

// The bytes of one tensor of each parameter, as the file has them.
using RawTensors = std::vector<std::vector<char>>;

class ApplyRun {
 public:
  static absl::StatusOr<std::unique_ptr<ApplyRun>> Open(const ApplyCommandOptions& options) {
    std::unique_ptr<ApplyRun> run(new ApplyRun(options));
    STIEFEL_ASSIGN_OR_RETURN(run->grads_, SafetensorsReader::Open(options.grads));
    absl::StatusOr<std::vector<GradientSeries>> series =
        ListGradients(run->grads_->index(), options.steps);
    if (!series.ok()) {
      return absl::Status(
          series.status().code(),
          absl::StrCat(options.grads, ": ", std::string(series.status().message())));
    }
    STIEFEL_ASSIGN_OR_RETURN(run->parameters_, AssignRules(*std::move(series), options.rules));
    if (options.backend == "cpu") {
      STIEFEL_ASSIGN_OR_RETURN(
          run->backend_, CreateCpuApply(run->parameters_, run->with_weights(), run->threads_));
    } else {
      run->backend_ = CreateReferenceApply(run->parameters_, run->with_weights(), run->threads_);
    }
    STIEFEL_RETURN_IF_ERROR(run->LoadWeights());
    STIEFEL_ASSIGN_OR_RETURN(
        run->output_,
        ApplyOutput::Create(
            options.out, options.overwrite ? ExistingFile::kReplace : ExistingFile::kRefuse,
            options.backend, run->parameters_, run->with_weights(), run->backend_.get()));
    return run;
  }

  absl::StatusOr<std::string> Report() {
    ApplyReportInput report;
    report.backend = options_.backend;
    report.device = backend_->Description();
    report.out = options_.out;
    report.parameters = &parameters_;
    report.figures.resize(parameters_.size());
    const int64_t steps = static_cast<int64_t>(parameters_.front().gradients.steps.size());
    for (int64_t step = 1; step <= steps; ++step) {
      STIEFEL_RETURN_IF_ERROR(Step(step, &report));
    }
    STIEFEL_RETURN_IF_ERROR(output_->Finish());
    if (options_.explain) {
      int64_t first = 0;
      for (const ApplyParameter& p : parameters_) {
        report.explanations.push_back(backend_->Explain(first));
        first += p.matrices;
      }
    }
    return options_.json ? ApplyJson(report) : ApplyText(report);
  }

 private:
  explicit ApplyRun(const ApplyCommandOptions& options)
      : options_(options),
        threads_(options.threads > 0
                     ? options.threads
                     : std::clamp<int>(std::thread::hardware_concurrency(), 1, kMaxThreads)) {}

  bool with_weights() const { return !options_.weights.empty(); }

  // Reads tensors[p] for each parameter p, checks that they are finite, and returns the pieces of
  // all matrices; `raw` holds their memory.
  absl::StatusOr<std::vector<FileElements>> Load(const SafetensorsReader& reader,
                                                 const std::vector<const TensorInfo*>& tensors,
                                                 RawTensors* raw) const {
    const bool as_fp32 = backend_->dtype() == "F32";
    std::vector<FileElements> elements;
    raw->resize(parameters_.size());
    for (size_t p = 0; p < parameters_.size(); ++p) {
      const TensorInfo& tensor = *tensors[p];
      std::vector<char>& bytes = (*raw)[p];
      bytes.resize(tensor.end - tensor.begin);
      STIEFEL_RETURN_IF_ERROR(reader.Read(tensor, 0, bytes.data(), tensor.end - tensor.begin));
      STIEFEL_RETURN_IF_ERROR(CheckValues(tensor, bytes.data(), as_fp32));
      const int64_t piece = static_cast<int64_t>(bytes.size()) / parameters_[p].matrices;
      for (int64_t i = 0; i < parameters_[p].matrices; ++i) {
        elements.push_back({bytes.data() + i * piece, tensor.dtype});
      }
    }
    return elements;
  }

  absl::Status LoadWeights() {
    if (!with_weights()) {
      for (const ApplyParameter& p : parameters_) {
        if (!NeedsWeights(p.rule)) continue;
        return absl::InvalidArgumentError(
            absl::StrCat(PrintableName(p.gradients.name), ": ", p.rule.preset,
                         " reads weights: give --weights=FILE with a tensor of that name"));
      }
      return absl::OkStatus();
    }
    STIEFEL_ASSIGN_OR_RETURN(const auto reader, SafetensorsReader::Open(options_.weights));
    std::vector<const TensorInfo*> tensors;
    for (const ApplyParameter& p : parameters_) {
      const std::string name = PrintableName(p.gradients.name);
      const TensorInfo* tensor = reader->index().Find(p.gradients.name);
      if (tensor == nullptr) {
        return absl::InvalidArgumentError(absl::StrCat(options_.weights, ": no weights of ", name));
      }
      STIEFEL_RETURN_IF_ERROR(CheckFloating(*tensor));
      if (tensor->shape != p.gradients.shape) {
        return absl::InvalidArgumentError(absl::StrCat(options_.weights, ": ", name, " is ",
                                                       ShapeText(tensor->shape), ", its gradient ",
                                                       ShapeText(p.gradients.shape)));
      }
      tensors.push_back(tensor);
    }
    RawTensors raw;
    STIEFEL_ASSIGN_OR_RETURN(const auto elements, Load(*reader, tensors, &raw));
    backend_->SetWeights(elements);
    return absl::OkStatus();
  }

  absl::Status Step(int64_t step, ApplyReportInput* report) {
    std::vector<const TensorInfo*> tensors;
    for (const ApplyParameter& p : parameters_) tensors.push_back(p.gradients.steps[step - 1]);
    STIEFEL_ASSIGN_OR_RETURN(const auto elements, Load(*grads_, tensors, &raw_));
    std::vector<ApplyFigures> figures;
    STIEFEL_RETURN_IF_ERROR(backend_->Step(step, elements, &figures));
    STIEFEL_RETURN_IF_ERROR(CheckUpdates(step, figures));
    STIEFEL_RETURN_IF_ERROR(output_->WriteDeltas(step));
    std::vector<int64_t> first;
    int64_t count = 0;
    for (const ApplyParameter& p : parameters_) {
      first.push_back(count);
      count += p.matrices;
    }
    std::vector<ApplyStepFigures> rows(parameters_.size());
    OnThreads(threads_, static_cast<int64_t>(parameters_.size()), [&](int64_t p) {
      rows[p] = FiguresOf(parameters_[p], step, first[p], &figures[first[p]]);
    });
    for (size_t p = 0; p < rows.size(); ++p) report->figures[p].push_back(std::move(rows[p]));
    return absl::OkStatus();
  }

  absl::Status CheckUpdates(int64_t step, const std::vector<ApplyFigures>& figures) const {
    size_t m = 0;
    for (const ApplyParameter& p : parameters_) {
      for (int64_t i = 0; i < p.matrices; ++i, ++m) {
        if (figures[m].nonfinite_update == 0) continue;
        return absl::InvalidArgumentError(absl::StrCat(
            PrintableName(p.gradients.name), ": ", figures[m].nonfinite_update,
            " elements of the update or the new state of step ", step, " are not finite"));
      }
    }
    return absl::OkStatus();
  }

  // Of a parameter whose matrices are first, first + 1 ...
  ApplyStepFigures FiguresOf(const ApplyParameter& p, int64_t step, int64_t first,
                             const ApplyFigures* figures) const {
    const StepArgs args = ArgsOfStep(p, step);
    ApplyStepFigures row;
    row.step = step;
    row.kind = KindName(p, args.kind);
    std::vector<Dense> deltas;
    double sum = 0;
    bool rms = true;
    for (int64_t i = 0; i < p.matrices; ++i) {
      deltas.push_back(DeltaOf(p, first + i));
      row.delta_max = std::max(row.delta_max, MaxAbs(deltas.back()));
      if (figures[i].residual.has_value()) {
        row.residual = std::max(row.residual.value_or(0), *figures[i].residual);
      }
      rms = rms && figures[i].update_rms.has_value();
      sum += figures[i].update_rms.value_or(0) * figures[i].update_rms.value_or(0);
    }
    if (rms) row.update_rms = std::sqrt(sum / static_cast<double>(p.matrices));
    row.singular_values = SummariseUpdates(p.rule, args, deltas);
    return row;
  }

  Dense DeltaOf(const ApplyParameter& p, int64_t matrix) const {
    Dense delta(p.rows, p.cols);
    const int64_t n = p.rows * p.cols;
    if (backend_->dtype() == "F64") {
      const double* values = static_cast<const double*>(backend_->Delta(matrix));
      std::copy(values, values + n, delta.values.begin());
    } else {
      const float* values = static_cast<const float*>(backend_->Delta(matrix));
      std::copy(values, values + n, delta.values.begin());
    }
    return delta;
  }

  const ApplyCommandOptions& options_;
  const int threads_;
  std::unique_ptr<SafetensorsReader> grads_;
  std::vector<ApplyParameter> parameters_;
  std::unique_ptr<ApplyBackend> backend_;
  std::unique_ptr<ApplyOutput> output_;
  RawTensors raw_;  // the gradients of the step
};

void AddRuleOptions(CLI::App* command, RuleArguments* rules) {
  command->add_option("--preset", rules->preset, "rule of the parameters that no --rule matches");
  command
      ->add_option("--set", rules->set,
                   "key=value: an option of --preset; PATTERN:key=value: of the parameters that "
                   "match, whatever their rule; may be repeated")
      ->take_all();
  command
      ->add_option("--rule", rules->rules,
                   "PATTERN:preset[,key=value ...]: rule of the parameters whose name matches (* "
                   "and ? stand for any characters); the last match counts")
      ->take_all();
  command
      ->add_option("--stack-dims", rules->stack_dims,
                   "how many leading axes of a 3-D or 4-D parameter count matrices; the next is "
                   "the rows, the rest is flattened; PATTERN:N for some only")
      ->take_all();
}

}  // namespace

absl::StatusOr<std::string> ApplyReport(const ApplyCommandOptions& options) {
  STIEFEL_RETURN_IF_ERROR(Check(options));
  STIEFEL_ASSIGN_OR_RETURN(const std::unique_ptr<ApplyRun> run, ApplyRun::Open(options));
  return run->Report();
}

void AddApplyCommand(CLI::App* app, absl::Status* result) {
  CLI::App* command =
      app->add_subcommand("apply", "what a rule makes of gradients in a safetensors file");
  command->footer(
      "Gradients are tensors NAME/step1, NAME/step2 ..., or NAME for one step (with --steps N the "
      "same N times).\nOUT gets every delta (weight decay apart) under the name of its gradient, "
      "state/NAME/... and, with --weights,\nweights/NAME. Periodic rules have phase 0, unless "
      "--set phase=N.");
  auto options = std::make_shared<ApplyCommandOptions>();
  AddRuleOptions(command, &options->rules);
  command->add_option("--grads", options->grads, "safetensors file; F64, F32, BF16 or F16")
      ->required();
  command->add_option("--out", options->out, "safetensors file to write")->required();
  command->add_option("--weights", options->weights,
                      "safetensors file with the weights of every NAME, updated step by step");
  command
      ->add_option("--backend", options->backend,
                   "cpu: fp32, as servers compute; reference: fp64, slow")
      ->capture_default_str();
  command->add_option("--steps", options->steps, "how many steps to run; all that there are");
  command->add_option("--threads", options->threads, "0: one for each processor")
      ->capture_default_str();
  command->add_flag("--overwrite", options->overwrite, "replace OUT where it exists");
  command->add_flag("--explain", options->explain, "how each parameter is computed, and why");
  command->add_flag("--json", options->json, "one JSON object instead of tables");
  command->callback([options, result] {
    const absl::StatusOr<std::string> report = ApplyReport(*options);
    *result = report.status();
    if (report.ok()) std::fputs(report->c_str(), stdout);
  });
}

}  // namespace stiefel
