#include "client/examples/byte_lm/progress.h"

#include <unistd.h>

#include <cmath>
#include <cstdio>

#include "absl/strings/str_format.h"

namespace stiefel::byte_lm {

Progress::Progress(bool enabled, int64_t steps)
    : enabled_(enabled), terminal_(isatty(STDOUT_FILENO) == 1), steps_(steps) {}

Progress::~Progress() {
  if (line_open_) std::printf("\n");
  std::fflush(stdout);
}

void Progress::Step(int64_t step, double loss, double step_ms, const StepTimings& timings,
                    bool milestone) {
  if (!enabled_ || (!terminal_ && !milestone)) return;
  const std::string line = absl::StrFormat(
      "step %d/%d  loss %.3f  bits/byte: training %.3f, held out %.3f  %.0f ms/step "
      "(push %.0f, wait %.0f, apply %.1f)  %.2f MB pushed, %.2f pulled",
      step, steps_, loss, loss / std::log(2.0), held_out_, step_ms, timings.push_s * 1e3,
      timings.wait_s * 1e3, timings.apply_s * 1e3, static_cast<double>(timings.bytes_pushed) * 1e-6,
      static_cast<double>(timings.bytes_pulled) * 1e-6);
  // On a terminal: back to the start of the line, and what the last one leaves over is erased.
  std::printf(terminal_ ? "\r%s\x1b[K" : "%s\n", line.c_str());
  line_open_ = terminal_;
  std::fflush(stdout);
}

void Progress::Note(const std::string& message) {
  if (!enabled_) return;
  std::printf("%s%s\n", line_open_ ? "\n" : "", message.c_str());
  line_open_ = false;
  std::fflush(stdout);
}

}  // namespace stiefel::byte_lm
