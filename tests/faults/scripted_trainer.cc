// A trainer process that does what a test tells it: one rank, or several in one process, pushing
// gradients that are a function of (seed, step, rank). Events go to standard output as one JSON
// object a line; at a --hold point it says so and waits for a line on standard input, so that the
// driver can kill or freeze it, or others, at that moment.

#include <cmath>
#include <functional>
#include <iostream>
#include <limits>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "CLI/CLI.hpp"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "client/grpc_transport.h"
#include "client/trainer.h"
#include "common/clock.h"
#include "common/mutex.h"
#include "common/status.h"
#include "nlohmann/json.hpp"
#include "tests/e2e/faulty_transport.h"
#include "tests/faults/scripted_model.h"

namespace stiefel {
namespace {

constexpr int64_t kNoWeights = -1;

struct ScriptOptions {
  TrainerOptions trainer;
  int32_t first_rank = 0;
  int32_t ranks = 1;  // In this process.
  std::string shapes = "64x96,96x64,17";
  std::string preset = "muon";
  DType wire = DType::kFp32;
  bool rows = false;            // Push RowPushBlocks.
  bool same_gradients = false;  // Of all ranks and steps: made once, shared by the ranks.
  int64_t steps = 4;
  uint64_t seed = 1;
  int64_t applied = 0;          // kNoWeights: WEIGHTS mode, pull them.
  std::string snapshot;         // DELTA: read at the start, if it is there, and written every step.
  int64_t inf_at = 0;           // This step's gradients have an infinity.
  std::set<std::string> holds;  // "STEP:POINT"
  int wait_retries = 0;         // Errors of Wait that are borne, in all.
  int drops = 20;               // Dropped attempts of one step that are redone.
  Faults faults;                // Done to the chunks that it sends.
  bool hold_close = false;
  double connect_s = 10, join_s = 30, step_s = 20, lease_s = 10, takeover_s = 60;
};

// Writes events, from any thread.
class Events {
 public:
  void Write(nlohmann::ordered_json event) {
    MutexLock lock(&mutex_);
    std::cout << event.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace) << std::endl;
  }

 private:
  Mutex mutex_;
};

double Seconds() { return static_cast<double>(RealClock().NowMicros()) * 1e-6; }

const char* OutcomeName(Outcome outcome) {
  switch (outcome) {
    case Outcome::kCommit:
      return "commit";
    case Outcome::kSkip:
      return "skip";
    case Outcome::kDrop:
      return "drop";
  }
  return "?";
}

// One rank. Thread-compatible.
class Script {
 public:
  Script(const ScriptOptions& options, std::vector<ParameterSpec> specs,
         const std::vector<Tensor>* shared_gradients, int32_t rank, Events* events)
      : options_(options),
        specs_(std::move(specs)),
        shared_gradients_(shared_gradients),
        rank_(rank),
        events_(events),
        transport_(GrpcTransport(), options.faults),
        holds_(options.holds),
        weights_(specs_, options.seed) {}

  // Everything, until the last step or the first error that is not borne.
  absl::Status Run();

 private:
  void Event(const char* name, nlohmann::ordered_json fields);
  // Calls and times; an error becomes an event.
  absl::Status Timed(const char* call, const std::function<absl::Status()>& function);
  void Hold(int64_t step, const std::string& point);
  absl::Status Join();
  absl::Status StartWeights();
  absl::Status Attempt(int64_t step, StepOutcome* outcome);
  absl::Status PushAll(int64_t step);
  absl::Status AwaitOutcome(StepOutcome* outcome);
  absl::Status TakeIn(const StepOutcome& outcome);

  const ScriptOptions& options_;
  const std::vector<ParameterSpec> specs_;
  const std::vector<Tensor>* const shared_gradients_;  // Null: made for each step.
  const int32_t rank_;
  Events* const events_;
  FaultyTransport transport_;
  std::set<std::string> holds_;
  Weights weights_;
  std::vector<PushBlock> push_;
  std::vector<Tensor> gradients_;  // Lent to the trainer until Done, so they outlive it.
  std::unique_ptr<Trainer> trainer_;
  int wait_errors_ = 0;
  int64_t dropped_ = 0;
  int64_t skipped_ = 0;
  int64_t reconnects_ = 0;
};

void Script::Event(const char* name, nlohmann::ordered_json fields) {
  nlohmann::ordered_json event = {{"event", name}, {"rank", rank_}};
  event.update(fields);
  events_->Write(std::move(event));
}

absl::Status Script::Timed(const char* call, const std::function<absl::Status()>& function) {
  const double begin = Seconds();
  const absl::Status status = function();
  if (!status.ok()) {
    Event("error", {{"call", call},
                    {"code", absl::StatusCodeToString(status.code())},
                    {"message", std::string(status.message())},
                    {"elapsed_s", Seconds() - begin}});
  }
  return status;
}

void Script::Hold(int64_t step, const std::string& point) {
  if (holds_.erase(absl::StrCat(step, ":", point)) == 0) return;  // Once, not in a redone attempt.
  Event("held", {{"step", step}, {"point", point}});
  std::string line;
  std::getline(std::cin, line);
}

absl::Status Script::Run() {
  Hold(0, "start");
  STIEFEL_RETURN_IF_ERROR(Join());
  STIEFEL_RETURN_IF_ERROR(StartWeights());
  int drops = 0;
  for (int64_t step = trainer_->next_step(); step <= options_.steps;) {
    StepOutcome outcome;
    STIEFEL_RETURN_IF_ERROR(Attempt(step, &outcome));
    if (outcome.outcome == Outcome::kDrop) {
      ++dropped_;
      if (++drops > options_.drops) return absl::AbortedError("too many drops");
      continue;
    }
    drops = 0;
    ++step;
  }
  Event("finished", {{"weights_hash", absl::StrFormat("%016x", weights_.Hash())},
                     {"dropped", dropped_},
                     {"skipped", skipped_},
                     {"reconnects", reconnects_},
                     {"reordered", transport_.reordered()}});
  if (options_.hold_close) {
    std::string line;
    std::getline(std::cin, line);
  }
  STIEFEL_RETURN_IF_ERROR(Timed("Close", [&] { return trainer_->Close(); }));
  Event("closed", nlohmann::ordered_json::object());
  return absl::OkStatus();
}

absl::Status Script::Join() {
  TrainerOptions options = options_.trainer;
  options.rank = rank_;
  push_ =
      options_.rows ? RowPushBlocks(specs_, rank_, options.world_size) : WholePushBlocks(specs_);
  options.push = push_;
  options.applied_step = options_.applied;
  if (options_.applied == kNoWeights) options.applied_step.reset();
  if (!options_.snapshot.empty()) {
    const absl::StatusOr<int64_t> step = weights_.Load(options_.snapshot);
    if (!step.ok() && !absl::IsNotFound(step.status())) return step.status();
    if (step.ok()) options.applied_step = *step;
  }
  Event("connecting", {{"applied", options.applied_step.value_or(kNoWeights)}});
  STIEFEL_RETURN_IF_ERROR(Timed("Connect", [&]() -> absl::Status {
    Transport* transport = options_.faults.shuffle || options_.faults.twice ? &transport_ : nullptr;
    STIEFEL_ASSIGN_OR_RETURN(trainer_, Trainer::Connect(options, specs_, transport));
    return absl::OkStatus();
  }));
  Event("joined", {{"next_step", trainer_->next_step()}});
  return absl::OkStatus();
}

absl::Status Script::StartWeights() {
  if (options_.trainer.mode != UpdateMode::kWeights) return absl::OkStatus();
  std::vector<MutableTensorView> views = weights_.Views();
  if (trainer_->weights_needed()) {
    for (size_t i = 0; i < specs_.size(); ++i) {
      STIEFEL_RETURN_IF_ERROR(
          Timed("InitWeights", [&] { return trainer_->InitWeights(specs_[i].name, views[i]); }));
    }
  }
  if (options_.applied != kNoWeights) return absl::OkStatus();
  STIEFEL_RETURN_IF_ERROR(Timed("PullWeights", [&]() -> absl::Status {
    STIEFEL_ASSIGN_OR_RETURN(const StepOutcome pulled, trainer_->PullWeights());
    Event("pulled", {{"step", pulled.step}});
    return absl::OkStatus();
  }));
  STIEFEL_RETURN_IF_ERROR(Timed("ApplyAll", [&] { return trainer_->ApplyAll(views); }));
  return Timed("Done", [&] { return trainer_->Done(); });
}

absl::Status Script::Attempt(int64_t step, StepOutcome* outcome) {
  const double begin = Seconds();
  if (shared_gradients_ == nullptr) {
    gradients_.clear();
    for (size_t i = 0; i < specs_.size(); ++i) {
      gradients_.push_back(
          MakeGradient(specs_[i], options_.seed, step, rank_, static_cast<int32_t>(i)));
    }
  }
  Hold(step, "before");
  STIEFEL_RETURN_IF_ERROR(Timed("Begin", [&] { return trainer_->Begin(step); }));
  Event("begun", {{"step", step}});
  Hold(step, "begun");
  STIEFEL_RETURN_IF_ERROR(PushAll(step));
  STIEFEL_RETURN_IF_ERROR(Timed("EndPush", [&] { return trainer_->EndPush(); }));
  Event("pushed", {{"step", step}});
  Hold(step, "ended");
  STIEFEL_RETURN_IF_ERROR(AwaitOutcome(outcome));
  Event("outcome", {{"step", outcome->step},
                    {"attempt", outcome->attempt},
                    {"outcome", OutcomeName(outcome->outcome)},
                    {"reason", outcome->reason},
                    {"elapsed_s", Seconds() - begin}});
  Hold(step, "decided");
  return TakeIn(*outcome);
}

absl::Status Script::PushAll(int64_t step) {
  const std::vector<Tensor>& gradients =
      shared_gradients_ != nullptr ? *shared_gradients_ : gradients_;
  if (step == options_.inf_at) {
    const float infinity = std::numeric_limits<float>::infinity();
    Tensor& first = gradients_.front();
    Convert(&infinity, DType::kFp32, first.words.data(), first.dtype, 1);
  }
  for (size_t block = 0; block < push_.size(); ++block) {
    if (block == (push_.size() + 1) / 2) Hold(step, "pushing");
    const int32_t parameter = std::stoi(push_[block].parameter.substr(1));
    const TensorView view = gradients[parameter].View(push_[block].rect);
    STIEFEL_RETURN_IF_ERROR(
        Timed("Push", [&] { return trainer_->Push(static_cast<int32_t>(block), view); }));
  }
  return absl::OkStatus();
}

absl::Status Script::AwaitOutcome(StepOutcome* outcome) {
  for (;;) {
    const absl::Status status = Timed("Wait", [&]() -> absl::Status {
      STIEFEL_ASSIGN_OR_RETURN(*outcome, trainer_->Wait());
      return absl::OkStatus();
    });
    if (status.ok() || ++wait_errors_ > options_.wait_retries) return status;
  }
}

absl::Status Script::TakeIn(const StepOutcome& outcome) {
  reconnects_ += trainer_->timings().reconnects;
  if (outcome.outcome == Outcome::kSkip) ++skipped_;
  if (outcome.outcome == Outcome::kCommit) {
    STIEFEL_RETURN_IF_ERROR(
        Timed("ApplyAll", [&] { return trainer_->ApplyAll(weights_.Views()); }));
  }
  if (outcome.outcome != Outcome::kDrop) {
    Hold(outcome.step, "applied");
    if (!options_.snapshot.empty()) {
      STIEFEL_RETURN_IF_ERROR(weights_.Save(options_.snapshot, outcome.step));
    }
    Hold(outcome.step, "saved");
  }
  return Timed("Done", [&] { return trainer_->Done(); });
}

void AddFlags(CLI::App* app, ScriptOptions* options) {
  app->add_option("--servers", options->trainer.servers)->required()->delimiter(',');
  app->add_option("--run", options->trainer.run)->default_val("faults");
  app->add_option("--rank", options->first_rank);
  app->add_option("--ranks", options->ranks, "this many from --rank on, in one process");
  app->add_option("--world-size", options->trainer.world_size)->required();
  app->add_option("--steps", options->steps);
  app->add_option("--mode", options->trainer.mode)
      ->transform(CLI::CheckedTransformer(std::map<std::string, UpdateMode>{
          {"delta", UpdateMode::kDelta}, {"weights", UpdateMode::kWeights}}));
  app->add_option("--wire", options->wire)
      ->transform(CLI::CheckedTransformer(std::map<std::string, DType>{
          {"fp32", DType::kFp32}, {"bf16", DType::kBf16}, {"fp16", DType::kFp16}}));
  app->add_option("--preset", options->preset);
  app->add_option("--shapes", options->shapes, "ROWSxCOLS*COPIES,...; one size: a vector on adamw");
  app->add_flag("--rows", options->rows, "push only this rank's share of the rows");
  app->add_flag("--same-gradients", options->same_gradients);
  app->add_option("--seed", options->seed);
  app->add_option("--applied", options->applied)
      ->transform(CLI::Transformer(std::map<std::string, int64_t>{{"none", kNoWeights}}));
  app->add_option("--snapshot", options->snapshot);
  app->add_option("--inf-at", options->inf_at);
  app->add_option("--hold", options->holds,
                  "STEP:POINT; before, begun, pushing, ended, decided, applied, saved; 0:start");
  app->add_option("--wait-retries", options->wait_retries);
  app->add_option("--drops", options->drops);
  app->add_flag("--hold-close", options->hold_close);
  app->add_flag("--shuffle", options->faults.shuffle, "chunks leave in random order");
  app->add_flag("--twice", options->faults.twice, "every chunk is sent twice");
  app->add_option("--data-streams", options->trainer.data_streams);
  app->add_option("--chunk-bytes", options->trainer.chunk_bytes);
  app->add_option("--connect-timeout", options->connect_s);
  app->add_option("--join-timeout", options->join_s);
  app->add_option("--step-timeout", options->step_s);
  app->add_option("--lease", options->lease_s);
  app->add_option("--takeover-timeout", options->takeover_s);
}

absl::Status RunRanks(ScriptOptions options) {
  options.trainer.connect_timeout = absl::Seconds(options.connect_s);
  options.trainer.join_timeout = absl::Seconds(options.join_s);
  options.trainer.step_timeout = absl::Seconds(options.step_s);
  options.trainer.lease = absl::Seconds(options.lease_s);
  options.trainer.takeover_timeout = absl::Seconds(options.takeover_s);
  STIEFEL_ASSIGN_OR_RETURN(const std::vector<ParameterSpec> specs,
                           ParseShapes(options.shapes, options.preset, options.wire));
  std::vector<Tensor> shared;
  if (options.same_gradients) {
    for (size_t i = 0; i < specs.size(); ++i) {
      shared.push_back(MakeGradient(specs[i], options.seed, 0, 0, static_cast<int32_t>(i)));
    }
  }
  Events events;
  std::vector<absl::Status> results(static_cast<size_t>(options.ranks));
  std::vector<std::thread> threads;
  for (int32_t i = 0; i < options.ranks; ++i) {
    threads.emplace_back([&, i] {
      Script script(options, specs, options.same_gradients ? &shared : nullptr,
                    options.first_rank + i, &events);
      results[i] = script.Run();
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const absl::Status& result : results) STIEFEL_RETURN_IF_ERROR(result);
  return absl::OkStatus();
}

}  // namespace
}  // namespace stiefel

int main(int argc, char** argv) {
  stiefel::ScriptOptions options;
  CLI::App app("A trainer that does what a test tells it.");
  stiefel::AddFlags(&app, &options);
  CLI11_PARSE(app, argc, argv);
  const absl::Status status = stiefel::RunRanks(options);
  if (status.ok()) return 0;
  std::cerr << "scripted_trainer: rank " << options.first_rank << ": " << status << std::endl;
  return 1;
}
