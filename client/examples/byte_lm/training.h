#ifndef STIEFEL_CLIENT_EXAMPLES_BYTE_LM_TRAINING_H_
#define STIEFEL_CLIENT_EXAMPLES_BYTE_LM_TRAINING_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "client/examples/byte_lm/exchange.h"
#include "client/examples/byte_lm/model.h"
#include "client/trainer.h"
#include "common/dtype.h"

namespace stiefel::byte_lm {

enum class Layout {
  kReplicated,  // every rank pushes whole gradients; the servers take the mean
  kRows,        // the ranks take the mean among themselves; each pushes its share of the rows
};

struct TrainingOptions {
  int rank = 0;
  int world_size = 1;
  std::vector<std::string> servers;  // host:port
  std::string run = "byte_lm";
  std::string exchange_address;  // see ExchangeOptions
  int exchange_fd = -1;

  std::string text_path;
  ModelShape shape;
  Layout layout = Layout::kReplicated;
  UpdateMode mode = UpdateMode::kDelta;
  // Rule of the hidden matrices; the rest is on adamw.
  std::string preset = "periodic_rowwise_muon";
  std::vector<std::string> rule_options;  // key=value: options of it, in order
  DType wire = DType::kFp32;
  int64_t steps = 700;     // that the learning rates are planned for
  int64_t stop_after = 0;  // the last step that is trained; 0: steps
  bool rejoin = false;     // weights mode: go on from the servers' weights, whatever their step
  double step_timeout_seconds = 60;
  int64_t batch = 1024;         // examples per step, over all ranks
  double hidden_lr = 0;         // peak; 0: that of the options, else a good one for the preset
  double adamw_lr = 0.002;      // peak, of embedding, output layer and biases
  uint64_t seed = 1;            // of weights and batches
  std::string trace_path;       // of a Chrome trace; empty: none
  int64_t evaluate_every = 50;  // steps; a look at the held-out text, and a line of progress
};

// Means are per step, over all steps, of this rank.
struct TrainingReport {
  int64_t steps = 0;
  int64_t skipped = 0;
  int64_t dropped = 0;
  double loss = 0;           // nats, mean of the last steps
  double bits_per_byte = 0;  // on all held-out text
  bool copies_identical = false;
  uint64_t weights_hash = 0;
  uint64_t state_hash = 0;  // the servers'; rank 0 only, like the next three
  double server_compute_ms_per_step = 0;
  int64_t server_resident_bytes = 0;
  int64_t server_dropped_attempts = 0;
  double training_seconds = 0;
  double step_ms = 0;
  double compute_ms = 0;   // forward and backward, with handing gradients over
  double exchange_ms = 0;  // the ranks' own exchange, a part of compute_ms
  double push_ms = 0;      // first byte of the step to the last, beside the computation
  double wait_ms = 0;      // for updates, after the last gradient: exposed
  double apply_ms = 0;
  int64_t bytes_pushed_per_step = 0;
  int64_t bytes_pulled_per_step = 0;
};

// Trains one rank from fresh weights (or, to rejoin, from the servers') to the last step, showing
// progress on standard output at rank 0. All ranks call it with options that differ in rank alone.
// Errors are those of Text, Exchange, Trainer and CollectFigures, and INVALID_ARGUMENT for options
// that make no sense.
absl::StatusOr<TrainingReport> Train(const TrainingOptions& options);

}  // namespace stiefel::byte_lm

#endif  // STIEFEL_CLIENT_EXAMPLES_BYTE_LM_TRAINING_H_
