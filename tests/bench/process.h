// Child processes of the benches: started, measured through /proc, and always ended.
#ifndef STIEFEL_TESTS_BENCH_PROCESS_H_
#define STIEFEL_TESTS_BENCH_PROCESS_H_

#include <sys/types.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"

namespace stiefel {

class ChildProcess {
 public:
  // Starts argv[0] (looked for in PATH), which ends with this process, and reads its standard
  // output until a line holds "listening on HOST:PORT". UNAVAILABLE if it ends before that.
  static absl::StatusOr<std::unique_ptr<ChildProcess>> StartServer(
      const std::vector<std::string>& argv);
  // SIGTERM, then waits; SIGKILL after 20 s.
  ~ChildProcess();

  pid_t pid() const { return pid_; }
  // "127.0.0.1:41234"
  const std::string& address() const { return address_; }

 private:
  ChildProcess(pid_t pid, int output) : pid_(pid), output_(output) {}

  const pid_t pid_;
  const int output_;
  std::string address_;
};

// User and system time of a process so far, in seconds.
double CpuSeconds(pid_t pid);
// Largest resident set of a process so far, in bytes.
int64_t PeakResidentBytes(pid_t pid);

// Where Bazel put a binary of this workspace ("server/stiefel-server"): beside the running bench,
// or in its runfiles.
std::string BinaryPath(const std::string& relative);

}  // namespace stiefel

#endif  // STIEFEL_TESTS_BENCH_PROCESS_H_
