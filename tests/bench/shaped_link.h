// A link with a rate and a latency between this process and others of the same machine: two network
// namespaces joined by a veth pair, tc tbf on both ends for the rate, delaying proxies
// (delay_proxy.h) for the latency. The namespaces have no names: they are gone when the processes
// in them are, however those end.
#ifndef STIEFEL_TESTS_BENCH_SHAPED_LINK_H_
#define STIEFEL_TESTS_BENCH_SHAPED_LINK_H_

#include <sys/types.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "tests/bench/process.h"

namespace stiefel {

class ShapedLink {
 public:
  // Moves this process into a namespace of its own, and makes the other. `delay_micros`: each way.
  // `self`: this program, which runs RunDelayProxy and RunLinkPeer where it is started with
  // --delay-proxy=TARGET --delay-us=N and --link-peer. REQUIRES: this process has one thread.
  // PERMISSION_DENIED: not root; UNAVAILABLE: what ip, tc or nsenter said.
  static absl::StatusOr<std::unique_ptr<ShapedLink>> Create(const std::string& self,
                                                            int64_t delay_micros);
  ~ShapedLink();

  // Both directions. A bucket of 128 KiB passes at once.
  absl::Status SetRate(double bits_per_second);

  // A server on the other end, and the address at which this end reaches it.
  struct Far {
    std::unique_ptr<ChildProcess> process, proxy;
    std::string address;
  };
  // argv: listens on 127.0.0.1 and says so (ChildProcess::StartServer).
  absl::StatusOr<Far> StartFar(const std::vector<std::string>& argv);

 private:
  ShapedLink(std::string self, int64_t delay_micros, pid_t holder)
      : self_(std::move(self)), delay_micros_(delay_micros), holder_(holder) {}
  std::vector<std::string> InFar(const std::vector<std::string>& argv) const;

  const std::string self_;
  const int64_t delay_micros_;
  const pid_t holder_;  // a process that does nothing but live in the other namespace
};

// What a link can do, measured through it.
struct LinkFigures {
  double push_bytes_per_s = 0;
  double pull_bytes_per_s = 0;
  double latency_s = 0;  // one way: half of the median round trip of a byte
};

// The other end of MeasureLink: prints "listening on 127.0.0.1:PORT" and serves for ever.
int RunLinkPeer();
// Medians of `repeats` transfers of `bytes` each way. UNAVAILABLE: the connection broke.
absl::StatusOr<LinkFigures> MeasureLink(const std::string& address, int64_t bytes, int repeats);

}  // namespace stiefel

#endif  // STIEFEL_TESTS_BENCH_SHAPED_LINK_H_
