#include "tests/bench/shaped_link.h"

#include <sched.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "common/clock.h"
#include "common/status.h"
#include "tests/bench/tcp.h"

namespace stiefel {
namespace {

constexpr char kNearAddress[] = "10.199.0.1";
constexpr char kFarAddress[] = "10.199.0.2";
constexpr char kNearDevice[] = "near";
constexpr char kFarDevice[] = "far";
constexpr int64_t kRoundTrips = 200;

double Seconds() { return static_cast<double>(RealClock().NowMicros()) / 1e6; }

// Runs a program to its end. UNAVAILABLE with the command where it fails; it says why itself.
absl::Status RunProgram(const std::vector<std::string>& argv) {
  const pid_t pid = fork();
  if (pid < 0) return absl::ResourceExhaustedError("fork");
  if (pid == 0) {
    std::vector<char*> arguments;
    for (const std::string& argument : argv)
      arguments.push_back(const_cast<char*>(argument.c_str()));
    arguments.push_back(nullptr);
    execvp(arguments[0], arguments.data());
    _exit(127);
  }
  int status = 0;
  waitpid(pid, &status, 0);
  if (WIFEXITED(status) && WEXITSTATUS(status) == 0) return absl::OkStatus();
  return absl::UnavailableError(absl::StrCat("\"", absl::StrJoin(argv, " "), "\" failed (status ",
                                             WEXITSTATUS(status),
                                             "; packages iproute2, util-linux)"));
}

absl::Status RunEach(const std::vector<std::vector<std::string>>& commands) {
  for (const auto& command : commands) STIEFEL_RETURN_IF_ERROR(RunProgram(command));
  return absl::OkStatus();
}

// A child in a network namespace of its own, which ends with this process.
absl::StatusOr<pid_t> StartHolder() {
  int ready[2];
  if (pipe(ready) != 0) return absl::ResourceExhaustedError("pipe");
  const pid_t pid = fork();
  if (pid < 0) return absl::ResourceExhaustedError("fork");
  if (pid == 0) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    const char made = unshare(CLONE_NEWNET) == 0 ? 1 : 0;
    if (write(ready[1], &made, 1) != 1) _exit(1);
    for (;;) pause();
  }
  char made = 0;
  const bool answered = read(ready[0], &made, 1) == 1;
  close(ready[0]);
  close(ready[1]);
  if (answered && made == 1) return pid;
  kill(pid, SIGKILL);
  waitpid(pid, nullptr, 0);
  return absl::PermissionDeniedError("no network namespace can be made (needs CAP_SYS_ADMIN)");
}

}  // namespace

absl::StatusOr<std::unique_ptr<ShapedLink>> ShapedLink::Create(const std::string& self,
                                                               int64_t delay_micros) {
  if (geteuid() != 0) {
    return absl::PermissionDeniedError(
        "needs root: the link is made of network namespaces and tc, which only root may set up");
  }
  STIEFEL_ASSIGN_OR_RETURN(const pid_t holder, StartHolder());
  std::unique_ptr<ShapedLink> link(new ShapedLink(self, delay_micros, holder));
  if (unshare(CLONE_NEWNET) != 0)
    return absl::PermissionDeniedError("cannot enter a network namespace");
  STIEFEL_RETURN_IF_ERROR(RunEach({
      {"ip", "link", "set", "lo", "up"},
      link->InFar({"ip", "link", "set", "lo", "up"}),
      {"ip", "link", "add", kNearDevice, "type", "veth", "peer", "name", kFarDevice, "netns",
       absl::StrCat(holder)},
      {"ip", "addr", "add", absl::StrCat(kNearAddress, "/24"), "dev", kNearDevice},
      {"ip", "link", "set", kNearDevice, "up"},
      link->InFar({"ip", "addr", "add", absl::StrCat(kFarAddress, "/24"), "dev", kFarDevice}),
      link->InFar({"ip", "link", "set", kFarDevice, "up"}),
  }));
  return link;
}

ShapedLink::~ShapedLink() {
  kill(holder_, SIGKILL);
  waitpid(holder_, nullptr, 0);
}

std::vector<std::string> ShapedLink::InFar(const std::vector<std::string>& argv) const {
  std::vector<std::string> command = {"nsenter", "-t", absl::StrCat(holder_), "-n", "--"};
  command.insert(command.end(), argv.begin(), argv.end());
  return command;
}

absl::Status ShapedLink::SetRate(double bits_per_second) {
  const auto shape = [bits_per_second](const char* device) {
    return std::vector<std::string>{
        "tc",    "qdisc", "replace",
        "dev",   device,  "root",
        "tbf",   "rate",  absl::StrCat(static_cast<int64_t>(bits_per_second / 1e6), "mbit"),
        "burst", "128k",  "latency",
        "20ms"};
  };
  return RunEach({shape(kNearDevice), InFar(shape(kFarDevice))});
}

absl::StatusOr<ShapedLink::Far> ShapedLink::StartFar(const std::vector<std::string>& argv) {
  Far far;
  STIEFEL_ASSIGN_OR_RETURN(far.process, ChildProcess::StartServer(InFar(argv)));
  STIEFEL_ASSIGN_OR_RETURN(far.proxy,
                           ChildProcess::StartServer(
                               InFar({self_, absl::StrCat("--delay-proxy=", far.process->address()),
                                      absl::StrCat("--delay-us=", delay_micros_)})));
  const std::string& bound = far.proxy->address();
  far.address = absl::StrCat(kFarAddress, bound.substr(bound.rfind(':')));
  return far;
}

// ---------------------------------------------------------------- measuring

namespace {

// One request: 'E'cho a byte, take 'U'p so many bytes and answer with one, send so many 'D'own.
struct Request {
  char kind = 'E';
  int64_t bytes = 0;
};

bool Serve(int connection, std::vector<char>* buffer) {
  Request request;
  if (!ReceiveAll(connection, &request, sizeof(request))) return false;
  int64_t left = request.kind == 'E' ? 0 : request.bytes;
  while (left > 0) {
    const auto part = static_cast<size_t>(std::min<int64_t>(left, buffer->size()));
    const bool passed = request.kind == 'U' ? ReceiveAll(connection, buffer->data(), part)
                                            : SendAll(connection, buffer->data(), part);
    if (!passed) return false;
    left -= static_cast<int64_t>(part);
  }
  return request.kind == 'D' || SendAll(connection, "", 1);
}

// Seconds from the request until all of its answer is here.
absl::StatusOr<double> Ask(int connection, Request request, std::vector<char>* buffer) {
  const double begin = Seconds();
  bool passed = SendAll(connection, &request, sizeof(request));
  int64_t left = request.kind == 'E' ? 0 : request.bytes;
  while (passed && left > 0) {
    const auto part = static_cast<size_t>(std::min<int64_t>(left, buffer->size()));
    passed = request.kind == 'U' ? SendAll(connection, buffer->data(), part)
                                 : ReceiveAll(connection, buffer->data(), part);
    left -= static_cast<int64_t>(part);
  }
  char answer;
  if (passed && request.kind != 'D') passed = ReceiveAll(connection, &answer, 1);
  if (!passed) return absl::UnavailableError("the measured link broke");
  return Seconds() - begin;
}

double MedianOf(std::vector<double> values) {
  std::nth_element(values.begin(), values.begin() + values.size() / 2, values.end());
  return values[values.size() / 2];
}

absl::StatusOr<double> MedianTime(int connection, Request request, int64_t repeats) {
  std::vector<char> buffer(1 << 20);
  std::vector<double> times;
  for (int64_t i = 0; i < repeats; ++i) {
    STIEFEL_ASSIGN_OR_RETURN(const double time, Ask(connection, request, &buffer));
    times.push_back(time);
  }
  return MedianOf(std::move(times));
}

}  // namespace

int RunLinkPeer() {
  const int listener = ListenTcp();
  if (listener < 0) {
    std::fprintf(stderr, "link peer: cannot listen: %s\n", std::strerror(errno));
    return 1;
  }
  std::printf("listening on 127.0.0.1:%d\n", PortOf(listener));
  std::fflush(stdout);
  std::vector<char> buffer(1 << 20);
  for (;;) {
    const int connection = accept(listener, nullptr, nullptr);
    if (connection < 0) continue;
    SetNoDelay(connection);
    while (Serve(connection, &buffer)) {
    }
    close(connection);
  }
}

absl::StatusOr<LinkFigures> MeasureLink(const std::string& address, int64_t bytes, int repeats) {
  const int connection = ConnectTcp(address);
  if (connection < 0) return absl::UnavailableError(absl::StrCat("cannot connect to ", address));
  const auto measure = [&]() -> absl::StatusOr<LinkFigures> {
    STIEFEL_ASSIGN_OR_RETURN(const double round, MedianTime(connection, {'E', 0}, kRoundTrips));
    STIEFEL_ASSIGN_OR_RETURN(const double up, MedianTime(connection, {'U', bytes}, repeats));
    STIEFEL_ASSIGN_OR_RETURN(const double down, MedianTime(connection, {'D', bytes}, repeats));
    LinkFigures figures;
    figures.latency_s = round / 2;
    figures.push_bytes_per_s = static_cast<double>(bytes) / (up - round);
    figures.pull_bytes_per_s = static_cast<double>(bytes) / (down - round);
    return figures;
  };
  const absl::StatusOr<LinkFigures> figures = measure();
  close(connection);
  return figures;
}

}  // namespace stiefel
