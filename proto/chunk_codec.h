// Chunks as gRPC byte buffers: a small header and slices that point at the payload itself, so that
// neither end copies what it need not. The bytes are exactly those of a serialized v1::Chunk, with
// field 2 (payload) last, so that any generated stub can speak to either end.
#ifndef STIEFEL_PROTO_CHUNK_CODEC_H_
#define STIEFEL_PROTO_CHUNK_CODEC_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "grpcpp/support/byte_buffer.h"
#include "grpcpp/support/slice.h"
#include "proto/chunk.h"
#include "stiefel/v1/optimizer.pb.h"

namespace stiefel {

// The message `header` + payload, where the payload is the given slices one after the other. Takes
// references to the slices' memory, copies none of it. REQUIRES: the whole message is at most
// kMaxMessageBytes.
grpc::ByteBuffer EncodeChunk(const v1::ChunkHeader& header,
                             const std::vector<grpc::Slice>& payload);

// The chunk as a byte buffer; its keepalive is held by the buffer's slices and dropped when gRPC
// has freed the last of them.
grpc::ByteBuffer EncodeChunk(OutgoingChunk chunk);

// A chunk that arrived, with the payload where gRPC put it.
class ReceivedChunk final : public IncomingChunk {
 public:
  // INVALID_ARGUMENT: not a Chunk; payload before the header; unknown fields (with the field
  // number); larger than kMaxMessageBytes.
  static absl::StatusOr<ReceivedChunk> Parse(const grpc::ByteBuffer& message);

  const v1::ChunkHeader& header() const override { return header_; }
  int64_t payload_bytes() const override { return payload_bytes_; }
  uint32_t CopyNext(void* target, int64_t bytes) override;
  uint32_t SkipNext(int64_t bytes) override;

 private:
  ReceivedChunk() = default;
  template <typename Visit>
  void Walk(int64_t bytes, Visit visit);

  v1::ChunkHeader header_;
  std::vector<grpc::Slice> slices_;
  size_t slice_ = 0;   // where the unread payload starts
  size_t offset_ = 0;  // within it
  int64_t payload_bytes_ = 0;
};

}  // namespace stiefel

#endif  // STIEFEL_PROTO_CHUNK_CODEC_H_
