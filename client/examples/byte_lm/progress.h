#ifndef STIEFEL_CLIENT_EXAMPLES_BYTE_LM_PROGRESS_H_
#define STIEFEL_CLIENT_EXAMPLES_BYTE_LM_PROGRESS_H_

#include <cstdint>
#include <string>

#include "client/trainer.h"

namespace stiefel::byte_lm {

// How training goes, on standard output: one line rewritten in place on a terminal, a plain line
// now and then elsewhere. Thread-compatible.
class Progress {
 public:
  // Says nothing unless `enabled`.
  Progress(bool enabled, int64_t steps);
  // Ends the line on a terminal.
  ~Progress();

  // A look at the held-out text, shown from then on.
  void HeldOut(double bits_per_byte) { held_out_ = bits_per_byte; }
  // `loss` in nats; `milestone` asks for a line also where no terminal is.
  void Step(int64_t step, double loss, double step_ms, const StepTimings& timings, bool milestone);
  // An event, on a line of its own.
  void Note(const std::string& message);

 private:
  const bool enabled_;
  const bool terminal_;
  const int64_t steps_;
  double held_out_ = 8;
  bool line_open_ = false;
};

}  // namespace stiefel::byte_lm

#endif  // STIEFEL_CLIENT_EXAMPLES_BYTE_LM_PROGRESS_H_
