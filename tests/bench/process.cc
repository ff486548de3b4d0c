#include "tests/bench/process.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <fstream>
#include <sstream>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"

namespace stiefel {
namespace {

std::string ReadFile(const std::string& path) {
  std::ifstream file(path);
  std::stringstream text;
  text << file.rdbuf();
  return text.str();
}

// The next line of a descriptor, without its end; false at end of file.
bool ReadLine(int descriptor, std::string* line) {
  line->clear();
  char c;
  while (read(descriptor, &c, 1) == 1) {
    if (c == '\n') return true;
    line->push_back(c);
  }
  return false;
}

}  // namespace

absl::StatusOr<std::unique_ptr<ChildProcess>> ChildProcess::StartServer(
    const std::vector<std::string>& argv) {
  int ends[2];
  if (pipe2(ends, O_CLOEXEC) != 0) return absl::ResourceExhaustedError("pipe");
  std::vector<char*> arguments;
  for (const std::string& argument : argv) arguments.push_back(const_cast<char*>(argument.c_str()));
  arguments.push_back(nullptr);
  const pid_t pid = fork();
  if (pid < 0) return absl::ResourceExhaustedError("fork");
  if (pid == 0) {
    prctl(PR_SET_PDEATHSIG, SIGTERM);  // also where this process is killed
    dup2(ends[1], STDOUT_FILENO);
    execvp(arguments[0], arguments.data());
    _exit(127);
  }
  close(ends[1]);
  auto child = std::unique_ptr<ChildProcess>(new ChildProcess(pid, ends[0]));
  const std::string mark = "listening on ";
  for (std::string line; ReadLine(ends[0], &line);) {
    const size_t at = line.find(mark);
    if (at == std::string::npos) continue;
    child->address_ =
        line.substr(at + mark.size(), line.find(' ', at + mark.size()) - at - mark.size());
    return child;
  }
  return absl::UnavailableError(absl::StrCat(argv[0], " ended before it listened"));
}

ChildProcess::~ChildProcess() {
  kill(pid_, SIGTERM);
  const absl::Time deadline = absl::Now() + absl::Seconds(20);
  while (waitpid(pid_, nullptr, WNOHANG) == 0) {
    if (absl::Now() > deadline) {
      kill(pid_, SIGKILL);
      waitpid(pid_, nullptr, 0);
      break;
    }
    absl::SleepFor(absl::Milliseconds(10));
  }
  close(output_);
}

double CpuSeconds(pid_t pid) {
  const std::string stat = ReadFile(absl::StrCat("/proc/", pid, "/stat"));
  std::istringstream fields(stat.substr(stat.rfind(')') + 1));
  std::string skipped;
  for (int field = 3; field < 14; ++field) fields >> skipped;
  double user = 0;
  double system = 0;
  fields >> user >> system;
  return (user + system) / static_cast<double>(sysconf(_SC_CLK_TCK));
}

int64_t PeakResidentBytes(pid_t pid) {
  std::istringstream status(ReadFile(absl::StrCat("/proc/", pid, "/status")));
  for (std::string line; std::getline(status, line);) {
    if (line.rfind("VmHWM:", 0) == 0) return std::stoll(line.substr(6)) * 1024;
  }
  return 0;
}

std::string BinaryPath(const std::string& relative) {
  char self[4096];
  const ssize_t length = readlink("/proc/self/exe", self, sizeof(self) - 1);
  const std::string path(self, length > 0 ? static_cast<size_t>(length) : 0);
  const size_t root = path.rfind("/tests/");
  const std::string beside = path.substr(0, root) + "/" + relative;
  return access(beside.c_str(), X_OK) == 0 ? beside : path + ".runfiles/stiefel/" + relative;
}

}  // namespace stiefel
