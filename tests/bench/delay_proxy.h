// A TCP proxy that lets everything pass a constant time after it came, in both directions: the
// latency of a link, where the kernel has no netem. Fast enough for some gigabits a second.
#ifndef STIEFEL_TESTS_BENCH_DELAY_PROXY_H_
#define STIEFEL_TESTS_BENCH_DELAY_PROXY_H_

#include <cstdint>
#include <string>

namespace stiefel {

// Listens on any address and a free port, prints "listening on 0.0.0.0:PORT", and forwards to
// `target` (A.B.C.D:PORT) for ever. Returns 1 with a message on standard error where it cannot.
int RunDelayProxy(const std::string& target, int64_t delay_micros);

}  // namespace stiefel

#endif  // STIEFEL_TESTS_BENCH_DELAY_PROXY_H_
