// byte_lm: one trainer process of the example. See README.md beside this file.

#include <cstdio>
#include <fstream>
#include <iostream>
#include <map>
#include <string>

#include "CLI/CLI.hpp"
#include "absl/strings/str_format.h"
#include "client/examples/byte_lm/training.h"
#include "nlohmann/json.hpp"

namespace stiefel::byte_lm {
namespace {

nlohmann::ordered_json ToJson(const TrainingReport& report) {
  return {
      {"steps", report.steps},
      {"bits_per_byte", report.bits_per_byte},
      {"skipped", report.skipped},
      {"copies_identical", report.copies_identical},
      {"state_hash", absl::StrFormat("%016x", report.state_hash)},
      {"weights_hash", absl::StrFormat("%016x", report.weights_hash)},
      {"server_compute_ms_per_step", report.server_compute_ms_per_step},
      {"bytes_pushed_per_step", report.bytes_pushed_per_step},
      {"bytes_pulled_per_step", report.bytes_pulled_per_step},
      {"dropped", report.dropped},
      {"loss", report.loss},
      {"training_seconds", report.training_seconds},
      {"step_ms", report.step_ms},
      {"compute_ms", report.compute_ms},
      {"exchange_ms", report.exchange_ms},
      {"push_ms", report.push_ms},
      {"wait_ms", report.wait_ms},
      {"apply_ms", report.apply_ms},
      {"server_resident_bytes", report.server_resident_bytes},
      {"server_dropped_attempts", report.server_dropped_attempts},
  };
}

void AddFlags(CLI::App* app, TrainingOptions* options, std::string* json_path) {
  app->add_option("--rank", options->rank, "this trainer, 0 .. world size - 1")->required();
  app->add_option("--world-size", options->world_size, "number of trainers")->required();
  app->add_option("--servers", options->servers, "host:port,... ; the same on all ranks")
      ->required()
      ->delimiter(',');
  app->add_option("--text", options->text_path,
                  "text to learn; the King James Bible is printed into it if there is no such file")
      ->required();
  app->add_option("--exchange", options->exchange_address,
                  "127.0.0.1:port where rank 0 listens for the other ranks");
  app->add_option("--exchange-fd", options->exchange_fd,
                  "rank 0: an inherited listening socket instead");
  app->add_option("--run", options->run, "name of the run")->capture_default_str();
  app->add_option("--layout", options->layout, "replicated or rows")
      ->transform(CLI::CheckedTransformer(std::map<std::string, Layout>{
          {"replicated", Layout::kReplicated}, {"rows", Layout::kRows}}));
  app->add_option("--mode", options->mode, "delta: trainers keep the weights; weights: servers do")
      ->transform(CLI::CheckedTransformer(std::map<std::string, UpdateMode>{
          {"delta", UpdateMode::kDelta}, {"weights", UpdateMode::kWeights}}));
  app->add_option("--wire", options->wire, "element type on the wire: fp32, bf16 or fp16")
      ->transform(CLI::CheckedTransformer(std::map<std::string, DType>{
          {"fp32", DType::kFp32}, {"bf16", DType::kBf16}, {"fp16", DType::kFp16}}));
  app->add_option("--preset", options->preset, "rule of the hidden matrices")
      ->capture_default_str();
  app->add_option("--set", options->rule_options,
                  "key=value: an option of that rule; may be repeated")
      ->take_all();
  app->add_option("--steps", options->steps, "steps to train")->capture_default_str();
  app->add_option("--stop-after", options->stop_after,
                  "the last step, where it is not the one that learning rates are planned for");
  app->add_flag("--rejoin", options->rejoin,
                "with --mode=weights: go on from the servers' weights, whatever their step");
  app->add_option("--step-timeout", options->step_timeout_seconds,
                  "seconds until a step that misses somebody is dropped")
      ->capture_default_str();
  app->add_option("--batch", options->batch, "examples per step, over all ranks")
      ->capture_default_str();
  app->add_option("--lr", options->hidden_lr,
                  "peak rate of hidden matrices; 0: that of --set, else by preset");
  app->add_option("--adamw-lr", options->adamw_lr, "peak rate of everything else")
      ->capture_default_str();
  app->add_option("--seed", options->seed, "of weights and batches")->capture_default_str();
  app->add_option("--context", options->shape.context, "bytes that are seen")
      ->capture_default_str();
  app->add_option("--embedding", options->shape.embedding, "values per byte")
      ->capture_default_str();
  app->add_option("--hidden", options->shape.hidden, "width of the hidden layers")
      ->capture_default_str();
  app->add_option("--evaluate-every", options->evaluate_every, "steps between looks")
      ->capture_default_str();
  app->add_option("--trace", options->trace_path, "file for a Chrome trace of this trainer");
  app->add_option("--json", *json_path, "file for the results");
}

int Main(int argc, char** argv) {
  TrainingOptions options;
  std::string json_path;
  CLI::App app("Trains one rank of a byte-level language model through optimizer servers.");
  AddFlags(&app, &options, &json_path);
  CLI11_PARSE(app, argc, argv);

  const absl::StatusOr<TrainingReport> report = Train(options);
  if (!report.ok()) {
    std::cerr << "byte_lm: rank " << options.rank << ": " << report.status() << std::endl;
    return 1;
  }
  if (!json_path.empty()) {
    std::ofstream out(json_path);
    out << ToJson(*report).dump(2) << "\n";
    out.close();
    if (!out) {
      std::cerr << "byte_lm: cannot write " << json_path << std::endl;
      return 1;
    }
  }
  if (options.rank == 0) {
    absl::PrintF("held-out bits per byte %.4f after %d steps in %.1f s\n", report->bits_per_byte,
                 report->steps, report->training_seconds);
  }
  return 0;
}

}  // namespace
}  // namespace stiefel::byte_lm

int main(int argc, char** argv) { return stiefel::byte_lm::Main(argc, argv); }
