// The yardstick of the transport bench: the plainest one-way gRPC ByteBuffer streams there can be.
// Each message is a 4-byte CRC-32C and a payload; the receiver copies the payload into a
// preallocated buffer and checks the checksum. Nothing else: no credits, no state, no pieces.
#ifndef STIEFEL_TESTS_BENCH_BARE_STREAM_H_
#define STIEFEL_TESTS_BENCH_BARE_STREAM_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace stiefel {

class BareServer {
 public:
  // Listens on a free loopback port. Every stream is received into a buffer of its own of
  // `buffer_bytes`, round and round.
  static absl::StatusOr<std::unique_ptr<BareServer>> Start(int64_t buffer_bytes);
  virtual ~BareServer() = default;
  virtual int port() const = 0;
};

// Keeps `channels` connections; Send cuts `bytes` of `data` into messages, spreads them over the
// connections, and returns when the receiver has acknowledged all of them.
class BareClient {
 public:
  static absl::StatusOr<std::unique_ptr<BareClient>> Connect(const std::string& target,
                                                             int channels);
  virtual ~BareClient() = default;
  virtual absl::Status Send(const char* data, int64_t bytes, int64_t message_bytes) = 0;
};

}  // namespace stiefel

#endif  // STIEFEL_TESTS_BENCH_BARE_STREAM_H_
