// Chunks as both ends handle them, whatever carries them (gRPC, memory of one process in tests;
// shared memory later).
#ifndef STIEFEL_PROTO_CHUNK_H_
#define STIEFEL_PROTO_CHUNK_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "stiefel/v1/optimizer.pb.h"

namespace stiefel {

// A chunk to send: header, and payload spans that point at the bytes themselves. Whoever carries it
// holds `keepalive` until the last byte was read, and drops it exactly once, on any thread: its
// deleter is how the sender learns that the memory is free again.
struct OutgoingChunk {
  struct Span {
    const void* data;
    size_t size;
  };
  v1::ChunkHeader header;
  std::vector<Span> payload;  // of the pieces, in order
  std::shared_ptr<const void> keepalive;
};

// A chunk that arrived. Payload bytes are read once, in order.
class IncomingChunk {
 public:
  virtual ~IncomingChunk() = default;
  virtual const v1::ChunkHeader& header() const = 0;
  virtual int64_t payload_bytes() const = 0;
  // Copies the next `bytes` of the payload to `target` and returns their CRC-32C, in one pass.
  // REQUIRES: no more than are left.
  virtual uint32_t CopyNext(void* target, int64_t bytes) = 0;
  // Passes over the next `bytes` and returns their CRC-32C. REQUIRES: no more than are left.
  virtual uint32_t SkipNext(int64_t bytes) = 0;
};

}  // namespace stiefel

#endif  // STIEFEL_PROTO_CHUNK_H_
