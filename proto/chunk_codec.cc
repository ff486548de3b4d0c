#include "proto/chunk_codec.h"

#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/checksum.h"
#include "google/protobuf/io/coded_stream.h"
#include "google/protobuf/io/zero_copy_stream.h"
#include "google/protobuf/wire_format_lite.h"
#include "proto/protocol.h"

namespace stiefel {
namespace {

using google::protobuf::internal::WireFormatLite;

constexpr uint32_t kHeaderTag =
    (v1::Chunk::kHeaderFieldNumber << 3) | WireFormatLite::WIRETYPE_LENGTH_DELIMITED;
constexpr uint32_t kPayloadTag =
    (v1::Chunk::kPayloadFieldNumber << 3) | WireFormatLite::WIRETYPE_LENGTH_DELIMITED;

// Reads over gRPC slices without joining them.
class SliceStream final : public google::protobuf::io::ZeroCopyInputStream {
 public:
  explicit SliceStream(const std::vector<grpc::Slice>& slices) : slices_(slices) {}

  bool Next(const void** data, int* size) override {
    while (slice_ < slices_.size() && offset_ == slices_[slice_].size()) {
      ++slice_;
      offset_ = 0;
    }
    if (slice_ == slices_.size()) return false;
    *data = slices_[slice_].begin() + offset_;
    *size = static_cast<int>(slices_[slice_].size() - offset_);
    count_ += *size;
    offset_ = slices_[slice_].size();
    return true;
  }
  void BackUp(int count) override {
    offset_ -= count;
    count_ -= count;
  }
  bool Skip(int count) override {
    const void* data;
    int size;
    while (count > 0 && Next(&data, &size)) {
      if (size > count) BackUp(size - count);
      count -= std::min(size, count);
    }
    return count == 0;
  }
  int64_t ByteCount() const override { return count_; }

  size_t slice() const { return slice_; }
  size_t offset() const { return offset_; }

 private:
  const std::vector<grpc::Slice>& slices_;
  size_t slice_ = 0;
  size_t offset_ = 0;
  int64_t count_ = 0;
};

absl::Status FirstUnknownField(const google::protobuf::Message& message) {
  const auto& unknown = message.GetReflection()->GetUnknownFields(message);
  if (unknown.field_count() == 0) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("field ", unknown.field(0).number(), " of ", message.GetDescriptor()->name(),
                   " is not known to this build (", kSoftwareVersion, ")"));
}

}  // namespace

grpc::ByteBuffer EncodeChunk(const v1::ChunkHeader& header,
                             const std::vector<grpc::Slice>& payload) {
  int64_t payload_bytes = 0;
  for (const grpc::Slice& slice : payload) payload_bytes += static_cast<int64_t>(slice.size());
  const size_t header_bytes = header.ByteSizeLong();
  // Two tags and two lengths take at most 1 + 5 bytes each.
  grpc_slice raw = grpc_slice_malloc(header_bytes + 12);
  uint8_t* const begin = GRPC_SLICE_START_PTR(raw);
  uint8_t* out = google::protobuf::io::CodedOutputStream::WriteTagToArray(kHeaderTag, begin);
  out = google::protobuf::io::CodedOutputStream::WriteVarint32ToArray(
      static_cast<uint32_t>(header_bytes), out);
  out = header.SerializeWithCachedSizesToArray(out);
  if (payload_bytes > 0) {
    out = google::protobuf::io::CodedOutputStream::WriteTagToArray(kPayloadTag, out);
    out = google::protobuf::io::CodedOutputStream::WriteVarint32ToArray(
        static_cast<uint32_t>(payload_bytes), out);
  }
  grpc::Slice front(raw, grpc::Slice::STEAL_REF);
  std::vector<grpc::Slice> slices;
  slices.reserve(payload.size() + 1);
  slices.push_back(front.sub(0, static_cast<size_t>(out - begin)));
  slices.insert(slices.end(), payload.begin(), payload.end());
  return grpc::ByteBuffer(slices.data(), slices.size());
}

grpc::ByteBuffer EncodeChunk(OutgoingChunk chunk) {
  std::vector<grpc::Slice> slices;
  slices.reserve(chunk.payload.size());
  for (const OutgoingChunk::Span& span : chunk.payload) {
    // gRPC takes a mutable pointer but never writes through it.
    auto* held = new std::shared_ptr<const void>(chunk.keepalive);
    slices.emplace_back(
        const_cast<void*>(span.data), span.size,
        [](void* h) { delete static_cast<std::shared_ptr<const void>*>(h); }, held);
  }
  return EncodeChunk(chunk.header, slices);
}

absl::StatusOr<ReceivedChunk> ReceivedChunk::Parse(const grpc::ByteBuffer& message) {
  if (static_cast<int64_t>(message.Length()) > kMaxMessageBytes) {
    return absl::InvalidArgumentError(
        absl::StrCat("a chunk of ", message.Length(), " bytes is larger than ", kMaxMessageBytes));
  }
  ReceivedChunk chunk;
  if (!message.Dump(&chunk.slices_).ok())
    return absl::InvalidArgumentError("a chunk cannot be read (compressed?)");
  SliceStream stream(chunk.slices_);
  const absl::Status malformed = absl::InvalidArgumentError(
      absl::StrCat("a message of ", message.Length(), " bytes is not a chunk"));
  {
    google::protobuf::io::CodedInputStream coded(&stream);
    uint32_t length = 0;
    const uint32_t first = coded.ReadTag();
    if (first != kHeaderTag || !coded.ReadVarint32(&length) || length > kMaxMessageBytes)
      return malformed;
    const auto limit = coded.PushLimit(static_cast<int>(length));
    if (!chunk.header_.ParseFromCodedStream(&coded) || coded.BytesUntilLimit() != 0)
      return malformed;
    coded.PopLimit(limit);
    const uint32_t second = coded.ReadTag();
    if (second != 0) {
      if (second != kPayloadTag) {
        return absl::InvalidArgumentError(
            absl::StrCat("field ", second >> 3,
                         " of Chunk is not known to this build, or stands before the header (",
                         kSoftwareVersion, ")"));
      }
      if (!coded.ReadVarint32(&length)) return malformed;
      chunk.payload_bytes_ = length;
    }
    if (coded.CurrentPosition() + chunk.payload_bytes_ != static_cast<int64_t>(message.Length()))
      return malformed;
  }  // gives back what it read ahead
  chunk.slice_ = stream.slice();
  chunk.offset_ = stream.offset();
  if (absl::Status known = FirstUnknownField(chunk.header_); !known.ok()) return known;
  for (const v1::Piece& piece : chunk.header_.pieces()) {
    if (absl::Status known = FirstUnknownField(piece); !known.ok()) return known;
  }
  return chunk;
}

template <typename Visit>
void ReceivedChunk::Walk(int64_t bytes, Visit visit) {
  while (bytes > 0) {
    const grpc::Slice& slice = slices_[slice_];
    const size_t here = std::min(slice.size() - offset_, static_cast<size_t>(bytes));
    visit(slice.begin() + offset_, here);
    bytes -= static_cast<int64_t>(here);
    offset_ += here;
    if (offset_ == slice.size()) {
      ++slice_;
      offset_ = 0;
    }
  }
}

uint32_t ReceivedChunk::CopyNext(void* target, int64_t bytes) {
  uint32_t crc = 0;
  char* out = static_cast<char*>(target);
  Walk(bytes, [&](const uint8_t* data, size_t size) {
    crc = CopyAndCrc32c(out, data, size, crc);
    out += size;
  });
  return crc;
}

uint32_t ReceivedChunk::SkipNext(int64_t bytes) {
  uint32_t crc = 0;
  Walk(bytes, [&](const uint8_t* data, size_t size) { crc = ExtendCrc32c(crc, data, size); });
  return crc;
}

}  // namespace stiefel
