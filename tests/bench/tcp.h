// Bare sockets, for what measures or shapes a link.
#ifndef STIEFEL_TESTS_BENCH_TCP_H_
#define STIEFEL_TESTS_BENCH_TCP_H_

#include <cstddef>
#include <string>

namespace stiefel {

// A listening socket on any address and a free port; negative: errno says why.
int ListenTcp();
int PortOf(int socket);
// Connects to A.B.C.D:PORT, blocking, without Nagle's delay; negative: it could not.
int ConnectTcp(const std::string& address);
void SetNonblocking(int socket);
void SetNoDelay(int socket);
// All of it, or false.
bool SendAll(int socket, const void* data, size_t bytes);
bool ReceiveAll(int socket, void* data, size_t bytes);

}  // namespace stiefel

#endif  // STIEFEL_TESTS_BENCH_TCP_H_
