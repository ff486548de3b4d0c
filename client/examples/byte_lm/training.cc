#include "client/examples/byte_lm/training.h"

#include <algorithm>
#include <cmath>
#include <memory>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "client/examples/byte_lm/learning_rate.h"
#include "client/examples/byte_lm/progress.h"
#include "client/examples/byte_lm/server_figures.h"
#include "client/examples/byte_lm/text.h"
#include "common/clock.h"
#include "common/status.h"
#include "plan/rule.h"

namespace stiefel::byte_lm {
namespace {

constexpr int32_t kAdamwGroup = 0;
constexpr int32_t kHiddenGroup = 1;
constexpr int kMaxDropsInARow = 10;
constexpr int64_t kEvaluationSample = 2048;  // held-out examples of a look during training
constexpr int64_t kEvaluationBatch = 1024;

double Seconds() { return static_cast<double>(RealClock().NowMicros()) * 1e-6; }

absl::Status CheckOptions(const TrainingOptions& options) {
  if (options.steps < 1 || options.batch < options.world_size || options.evaluate_every < 1) {
    return absl::InvalidArgumentError(
        absl::StrCat("steps ", options.steps, ", batch ", options.batch, " of ", options.world_size,
                     " ranks, a look every ", options.evaluate_every,
                     " steps: expected at least one step, one example for each rank and one step"));
  }
  if (options.shape.context < 1 || options.shape.embedding < 1 || options.shape.hidden < 1) {
    return absl::InvalidArgumentError(
        absl::StrCat("context ", options.shape.context, ", embedding ", options.shape.embedding,
                     ", hidden ", options.shape.hidden, ": each must be at least 1"));
  }
  if (!(options.step_timeout_seconds > 0)) {
    return absl::InvalidArgumentError(
        absl::StrCat("a step timeout of ", options.step_timeout_seconds, " s is not positive"));
  }
  if (options.stop_after < 0 || options.stop_after > options.steps) {
    return absl::InvalidArgumentError(absl::StrCat("the last step ", options.stop_after,
                                                   " is not within [1, ", options.steps,
                                                   "], the planned ones"));
  }
  if (options.rejoin && options.mode != UpdateMode::kWeights) {
    return absl::InvalidArgumentError(
        "rejoining takes the weights from the servers, which hold them in mode weights only");
  }
  return absl::OkStatus();
}

absl::StatusOr<Rule> HiddenRule(const TrainingOptions& options) {
  STIEFEL_ASSIGN_OR_RETURN(Rule rule, PresetRule(options.preset));
  for (const std::string& option : options.rule_options) {
    const size_t equals = option.find('=');
    if (equals == std::string::npos) {
      return absl::InvalidArgumentError(
          absl::StrCat("option \"", option, "\" of the rule is not key=value"));
    }
    STIEFEL_RETURN_IF_ERROR(SetOption(rule, option.substr(0, equals), option.substr(equals + 1)));
  }
  if (NeedsWeights(rule)) {
    return absl::InvalidArgumentError(
        absl::StrCat(options.preset, " is for low-rank adapters, which this model does not have"));
  }
  return rule;
}

// Element-wise rules move each entry by about lr, and so do those that match their scale; other
// spectral ones move the whole matrix.
double HiddenLr(const TrainingOptions& options, const Rule& rule) {
  if (options.hidden_lr > 0) return options.hidden_lr;
  for (const std::string& option : options.rule_options) {
    if (option.rfind("lr=", 0) == 0) return rule.lr;
  }
  const bool own_scale = rule.family == RuleFamily::kSpectral &&
                         (rule.scale == ScaleKind::kOriginal || rule.scale == ScaleKind::kSpectral);
  return own_scale ? 0.02 : options.adamw_lr;
}

absl::StatusOr<std::vector<ParameterSpec>> Specs(const TrainingOptions& options,
                                                 const std::vector<ModelParameter>& parameters) {
  STIEFEL_ASSIGN_OR_RETURN(const Rule hidden, HiddenRule(options));
  STIEFEL_ASSIGN_OR_RETURN(const Rule adamw, PresetRule("adamw"));
  std::vector<ParameterSpec> specs;
  for (const ModelParameter& parameter : parameters) {
    ParameterSpec spec;
    spec.name = parameter.name;
    spec.shape = parameter.is_vector ? std::vector<int64_t>{parameter.cols}
                                     : std::vector<int64_t>{parameter.rows, parameter.cols};
    spec.rule = parameter.is_hidden ? hidden : adamw;
    spec.group = parameter.is_hidden ? kHiddenGroup : kAdamwGroup;
    spec.push_dtype = options.wire;
    specs.push_back(std::move(spec));
  }
  return specs;
}

// One rank of the training run. Thread-compatible.
class Training {
 public:
  Training(const TrainingOptions& options, Text text)
      : options_(options), text_(std::move(text)), model_(options.shape, options.seed) {}

  absl::StatusOr<TrainingReport> Run();

 private:
  absl::Status ConnectExchange();
  absl::Status Join();
  absl::Status GiveInitialWeights();
  absl::Status TakeServersWeights();
  int64_t LastStep() const {
    return options_.stop_after > 0 ? options_.stop_after : options_.steps;
  }
  std::vector<MutableTensorView> AllWeights();
  absl::Status Steps();
  // One attempt: the outcome is in *outcome, the loss of this rank's part in *loss.
  absl::Status Attempt(int64_t step, StepOutcome* outcome, double* loss);
  absl::Status PushGradient(int index);
  StepOptions CommonFields(int64_t step) const;
  void AddTimings();
  double BitsPerByte(int64_t first, int64_t count);
  absl::Status Finish();

  const TrainingOptions options_;
  const Text text_;
  ByteModel model_;
  double hidden_lr_ = 0;
  std::unique_ptr<Exchange> exchange_;
  std::unique_ptr<Trainer> trainer_;
  TrainingReport report_;
};

absl::StatusOr<TrainingReport> Training::Run() {
  STIEFEL_RETURN_IF_ERROR(Join());
  if (trainer_->weights_needed()) STIEFEL_RETURN_IF_ERROR(GiveInitialWeights());
  if (options_.rejoin) STIEFEL_RETURN_IF_ERROR(TakeServersWeights());
  STIEFEL_RETURN_IF_ERROR(Steps());
  STIEFEL_RETURN_IF_ERROR(Finish());
  return report_;
}

absl::Status Training::ConnectExchange() {
  ExchangeOptions exchange;
  exchange.rank = options_.rank;
  exchange.world_size = options_.world_size;
  exchange.address = options_.exchange_address;
  exchange.listen_fd = options_.exchange_fd;
  STIEFEL_ASSIGN_OR_RETURN(exchange_, Exchange::Connect(exchange));
  return absl::OkStatus();
}

// Replicated ranks exchange nothing before the end, so that until then each may be replaced alone.
absl::Status Training::Join() {
  if (options_.layout == Layout::kRows) STIEFEL_RETURN_IF_ERROR(ConnectExchange());

  STIEFEL_ASSIGN_OR_RETURN(const std::vector<ParameterSpec> specs,
                           Specs(options_, model_.parameters()));
  STIEFEL_ASSIGN_OR_RETURN(const Rule hidden, HiddenRule(options_));
  hidden_lr_ = HiddenLr(options_, hidden);
  TrainerOptions trainer;
  trainer.servers = options_.servers;
  trainer.run = options_.run;
  trainer.rank = options_.rank;
  trainer.world_size = options_.world_size;
  trainer.mode = options_.mode;
  trainer.push = options_.layout == Layout::kRows
                     ? RowPushBlocks(specs, options_.rank, options_.world_size)
                     : WholePushBlocks(specs);
  trainer.pull = WholePullBlocks(specs);
  trainer.step_timeout = absl::Seconds(options_.step_timeout_seconds);
  trainer.trace_file = options_.trace_path;
  if (options_.rejoin) trainer.applied_step.reset();
  STIEFEL_ASSIGN_OR_RETURN(trainer_, Trainer::Connect(trainer, specs));
  return absl::OkStatus();
}

MutableTensorView WeightsOf(ModelParameter& parameter) {
  return {parameter.weights.data(), ElementType::kFp32, {parameter.rows * parameter.cols}, {}};
}

std::vector<MutableTensorView> Training::AllWeights() {
  std::vector<MutableTensorView> weights;
  for (ModelParameter& parameter : model_.parameters()) weights.push_back(WeightsOf(parameter));
  return weights;
}

absl::Status Training::GiveInitialWeights() {
  for (ModelParameter& parameter : model_.parameters()) {
    STIEFEL_RETURN_IF_ERROR(trainer_->InitWeights(parameter.name, WeightsOf(parameter)));
  }
  return absl::OkStatus();
}

absl::Status Training::TakeServersWeights() {
  STIEFEL_RETURN_IF_ERROR(trainer_->PullWeights().status());
  STIEFEL_RETURN_IF_ERROR(trainer_->ApplyAll(AllWeights()));
  return trainer_->Done();
}

StepOptions Training::CommonFields(int64_t step) const {
  const double factor = LearningRateFactor(step, options_.steps);
  StepOptions common;
  common.groups[kAdamwGroup].lr = options_.adamw_lr * factor;
  common.groups[kHiddenGroup].lr = hidden_lr_ * factor;
  return common;
}

// Hands over the gradient of parameter `index`: all of it, or this rank's share of the mean.
absl::Status Training::PushGradient(int index) {
  ModelParameter& parameter = model_.parameters()[index];
  const int64_t unit = parameter.is_vector ? 1 : parameter.cols;
  const int64_t units = parameter.rows * parameter.cols / unit;
  Share share{0, units};
  if (options_.layout == Layout::kRows) {
    const double begin = Seconds();
    STIEFEL_RETURN_IF_ERROR(exchange_->ReduceScatterMean(unit, &parameter.gradients));
    report_.exchange_ms += (Seconds() - begin) * 1e3;
    share = ShareOf(units, options_.rank, options_.world_size);
    if (share.begin == share.end) return absl::OkStatus();
  }
  TensorView view;
  view.data = parameter.gradients.data() + share.begin * unit;
  view.shape = {(share.end - share.begin) * unit};
  return trainer_->Push(parameter.name, view);
}

absl::Status Training::Attempt(int64_t step, StepOutcome* outcome, double* loss) {
  STIEFEL_RETURN_IF_ERROR(trainer_->Begin(step, CommonFields(step)));
  const Examples batch =
      text_.TrainingBatch(options_.seed, step, options_.batch, options_.rank, options_.world_size);
  absl::Status pushed;
  const double begin = Seconds();
  *loss = model_.LossAndGradients(batch.contexts.data(), batch.targets.data(), batch.count,
                                  [&](int index) {
                                    if (pushed.ok()) pushed = PushGradient(index);
                                  });
  report_.compute_ms += (Seconds() - begin) * 1e3;
  STIEFEL_RETURN_IF_ERROR(pushed);
  STIEFEL_RETURN_IF_ERROR(trainer_->EndPush());
  STIEFEL_ASSIGN_OR_RETURN(*outcome, trainer_->Wait());
  if (outcome->outcome == Outcome::kCommit) {
    STIEFEL_RETURN_IF_ERROR(trainer_->ApplyAll(AllWeights()));
  }
  AddTimings();
  return trainer_->Done();
}

void Training::AddTimings() {
  const StepTimings timings = trainer_->timings();
  report_.push_ms += timings.push_s * 1e3;
  report_.wait_ms += timings.wait_s * 1e3;
  report_.apply_ms += timings.apply_s * 1e3;
  report_.bytes_pushed_per_step += timings.bytes_pushed;
  report_.bytes_pulled_per_step += timings.bytes_pulled;
}

absl::Status Training::Steps() {
  Progress progress(options_.rank == 0, LastStep());
  const double begin = Seconds();
  int drops_in_a_row = 0;
  for (int64_t step = trainer_->next_step(); step <= LastStep();) {
    StepOutcome outcome;
    double loss = 0;
    STIEFEL_RETURN_IF_ERROR(Attempt(step, &outcome, &loss));
    if (outcome.outcome == Outcome::kDrop) {
      ++report_.dropped;
      progress.Note(absl::StrCat("step ", step, " dropped: ", outcome.reason));
      if (++drops_in_a_row >= kMaxDropsInARow) {
        return absl::AbortedError(absl::StrCat("step ", step, " was dropped ", drops_in_a_row,
                                               " times in a row, last: ", outcome.reason));
      }
      continue;
    }
    drops_in_a_row = 0;
    if (outcome.outcome == Outcome::kSkip) {
      ++report_.skipped;
      progress.Note(absl::StrCat("step ", step, " skipped: ", outcome.reason));
    }
    report_.loss = step == 1 ? loss : 0.95 * report_.loss + 0.05 * loss;
    const bool look = step == 1 || step % options_.evaluate_every == 0;
    if (options_.rank == 0 && look) {
      progress.HeldOut(BitsPerByte(0, std::min(kEvaluationSample, text_.held_out_count())));
    }
    progress.Step(step, report_.loss, (Seconds() - begin) * 1e3 / static_cast<double>(step),
                  trainer_->timings(), look || step == LastStep());
    ++step;
  }
  report_.training_seconds = Seconds() - begin;
  return absl::OkStatus();
}

// Mean over held-out examples [first, first + count).
double Training::BitsPerByte(int64_t first, int64_t count) {
  double nats = 0;
  for (int64_t done = 0; done < count; done += kEvaluationBatch) {
    const Examples part = text_.HeldOut(first + done, std::min(kEvaluationBatch, count - done));
    nats += part.count * model_.Loss(part.contexts.data(), part.targets.data(), part.count);
  }
  return nats / std::log(2.0) / static_cast<double>(std::max<int64_t>(count, 1));
}

// The held-out text is shared out over the ranks, and so is the word on whether the copies agree.
absl::Status Training::Finish() {
  if (exchange_ == nullptr) STIEFEL_RETURN_IF_ERROR(ConnectExchange());
  const Share part = ShareOf(text_.held_out_count(), options_.rank, options_.world_size);
  const int64_t count = part.end - part.begin;
  STIEFEL_ASSIGN_OR_RETURN(const std::vector<double> bits,
                           exchange_->AllGather(BitsPerByte(part.begin, count) * count));
  for (double rank_bits : bits) report_.bits_per_byte += rank_bits;
  report_.bits_per_byte /= static_cast<double>(text_.held_out_count());

  report_.steps = LastStep();
  const double steps = static_cast<double>(LastStep());
  report_.step_ms = report_.training_seconds * 1e3 / steps;
  for (double* sum : {&report_.compute_ms, &report_.exchange_ms, &report_.push_ms, &report_.wait_ms,
                      &report_.apply_ms}) {
    *sum /= steps;
  }
  report_.bytes_pushed_per_step /= LastStep();
  report_.bytes_pulled_per_step /= LastStep();

  report_.weights_hash = model_.WeightsHash();
  STIEFEL_ASSIGN_OR_RETURN(const std::vector<uint64_t> hashes,
                           exchange_->AllGather(report_.weights_hash));
  report_.copies_identical =
      std::all_of(hashes.begin(), hashes.end(), [&](uint64_t hash) { return hash == hashes[0]; });
  if (options_.rank == 0) {
    STIEFEL_ASSIGN_OR_RETURN(
        const ServerFigures figures,
        CollectFigures(options_.servers, options_.run, LastStep(), absl::Seconds(30)));
    report_.state_hash = figures.state_hash;
    report_.server_compute_ms_per_step = figures.compute_seconds * 1e3 / steps;
    report_.server_resident_bytes = figures.resident_bytes;
    report_.server_dropped_attempts = figures.dropped_attempts;
  }
  return trainer_->Close();
}

}  // namespace

absl::StatusOr<TrainingReport> Train(const TrainingOptions& options) {
  STIEFEL_RETURN_IF_ERROR(CheckOptions(options));
  STIEFEL_ASSIGN_OR_RETURN(Text text, Text::Load(options.text_path, options.shape.context));
  return Training(options, std::move(text)).Run();
}

}  // namespace stiefel::byte_lm
