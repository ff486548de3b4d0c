// stiefel-server: flags into ServerOptions, a server, and its end by signal.
#include <malloc.h>
#include <pthread.h>
#include <signal.h>

#include <cstdio>
#include <fstream>
#include <string>

#include "CLI/CLI.hpp"
#include "proto/protocol.h"
#include "server/grpc_server.h"
#include "server/options.h"
#include "spdlog/sinks/stdout_color_sinks.h"
#include "spdlog/spdlog.h"

namespace stiefel {
namespace {

struct Flags {
  ServerOptions options;
  std::string staging = "auto";
  std::string log_level = "info";
  std::string port_file;
};

void Define(CLI::App* app, Flags* flags) {
  ServerOptions& options = flags->options;
  const auto bytes = CLI::AsSizeValue(/*kb_is_1000=*/false);
  app->set_version_flag("--version", std::string("stiefel-server ") + kSoftwareVersion);
  app->add_option("--listen", options.listen, "HOST:PORT; port 0 takes a free one")
      ->capture_default_str();
  app->add_option("--port-file", flags->port_file, "Write the bound port to this file");
  app->add_flag("--insecure", options.insecure,
                "Listen beyond loopback without encryption or authentication");
  app->add_option("--threads", options.threads, "Processors for computing; 0: all")
      ->capture_default_str();
  app->add_option("--matrices-in-flight", options.matrices_in_flight,
                  "Matrices computed at once, each with a workspace; 0: as threads, up to 8")
      ->capture_default_str();
  app->add_option("--memory-limit", options.memory_limit_bytes,
                  "Bytes a run may need (8G, 512M); 0: 80 % of memory")
      ->transform(bytes)
      ->capture_default_str();
  app->add_option("--staging", flags->staging, "Where a step's new state waits: double, lazy, auto")
      ->check(CLI::IsMember({"double", "lazy", "auto"}))
      ->capture_default_str();
  app->add_option("--credit-window", options.credit_window_bytes,
                  "Gradient bytes a rank may have under way")
      ->transform(bytes)
      ->capture_default_str();
  app->add_option("--max-streams", options.max_streams, "Open streams, of all ranks")
      ->capture_default_str();
  app->add_option("--max-streams-per-rank", options.max_streams_per_rank,
                  "Open data streams of one rank")
      ->capture_default_str();
  app->add_option("--grace-seconds", options.grace_seconds,
                  "How long SIGTERM waits to be emptied, and for the decision of a voted step")
      ->capture_default_str();
  app->add_flag("--drain-to-peers,!--no-drain-to-peers", options.drain_to_peers,
                "On SIGTERM have the run's other servers take over what this one holds (default)");
  app->add_option("--speed", options.speed, "Relative speed, for placement")->capture_default_str();
  app->add_option("--trace", options.trace_file,
                  "Write a Chrome trace of pushes, computations, pulls and decisions to this file");
  app->add_option("--log-level", flags->log_level, "debug, info, warning, error or off")
      ->check(CLI::IsMember({"debug", "info", "warning", "error", "off"}))
      ->capture_default_str();
}

// Blocked in every thread, so that only WaitForSignal gets them.
sigset_t BlockSignals() {
  sigset_t signals;
  sigemptyset(&signals);
  sigaddset(&signals, SIGTERM);
  sigaddset(&signals, SIGINT);
  pthread_sigmask(SIG_BLOCK, &signals, nullptr);
  signal(SIGPIPE, SIG_IGN);
  return signals;
}

int Serve(const Flags& flags) {
  const sigset_t signals = BlockSignals();
  absl::StatusOr<std::unique_ptr<GrpcServer>> server = GrpcServer::Start(flags.options);
  if (!server.ok()) {
    std::fprintf(stderr, "stiefel-server: %s\n", std::string(server.status().message()).c_str());
    return 1;
  }
  if (!flags.port_file.empty()) {
    std::ofstream file(flags.port_file);
    file << (*server)->port() << "\n";
    if (!file.flush()) {
      std::fprintf(stderr, "stiefel-server: cannot write %s\n", flags.port_file.c_str());
      return 1;
    }
  }
  std::printf("stiefel-server: listening on %s\n", (*server)->address().c_str());
  std::fflush(stdout);
  int number = 0;
  sigwait(&signals, &number);
  spdlog::info("signal {}: draining for up to {} s", number, flags.options.grace_seconds);
  (*server)->Shutdown();
  spdlog::info("stopped");
  return 0;
}

int Main(int argc, char** argv) {
  CLI::App app("Holds the optimizer state of a model and computes its updates.", "stiefel-server");
  Flags flags;
  Define(&app, &flags);
  CLI11_PARSE(app, argc, argv);
  if (flags.staging != "auto") flags.options.staging = *ParseStaging(flags.staging);
  spdlog::set_default_logger(spdlog::stderr_color_mt("stiefel"));
  spdlog::set_level(spdlog::level::from_str(flags.log_level));
  // Large buffers go back to the system when a run ends.
  mallopt(M_MMAP_THRESHOLD, 1 << 20);
  return Serve(flags);
}

}  // namespace
}  // namespace stiefel

int main(int argc, char** argv) { return stiefel::Main(argc, argv); }
