#include "proto/chunk_codec.h"

#include <algorithm>
#include <random>
#include <string>

#include "common/checksum.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "proto/protocol.h"

namespace stiefel {
namespace {

v1::ChunkHeader Header(int pieces) {
  v1::ChunkHeader header;
  header.set_type(v1::ChunkHeader::GRADIENT);
  header.mutable_sender()->set_run_uid(77);
  header.set_step(5);
  for (int i = 0; i < pieces; ++i) {
    header.add_pieces()->set_block(i);
    header.mutable_pieces(i)->set_count(10);
  }
  return header;
}

std::vector<grpc::Slice> Cut(const std::string& bytes, std::mt19937* random) {
  std::vector<grpc::Slice> slices;
  for (size_t at = 0; at < bytes.size();) {
    const size_t size = std::min<size_t>(bytes.size() - at, 1 + (*random)() % 50);
    slices.emplace_back(bytes.data() + at, size);
    at += size;
  }
  return slices;
}

TEST(ChunkCodec, BytesAreThoseOfTheGeneratedMessage) {
  v1::Chunk chunk;
  *chunk.mutable_header() = Header(3);
  chunk.set_payload(std::string(1000, 'x'));
  std::vector<grpc::Slice> parts = {grpc::Slice(chunk.payload().data(), 400),
                                    grpc::Slice(chunk.payload().data() + 400, 600)};
  std::vector<grpc::Slice> slices;
  ASSERT_TRUE(EncodeChunk(chunk.header(), parts).Dump(&slices).ok());
  std::string bytes;
  for (const grpc::Slice& slice : slices)
    bytes.append(reinterpret_cast<const char*>(slice.begin()), slice.size());
  EXPECT_EQ(bytes, chunk.SerializeAsString());
}

TEST(ChunkCodec, AnyCutOfTheMessageParsesAndReadsTheSame) {
  std::mt19937 random(1);
  for (int trial = 0; trial < 500; ++trial) {
    v1::Chunk chunk;
    *chunk.mutable_header() = Header(random() % 4);
    std::string payload(random() % 300, '\0');
    for (char& c : payload) c = static_cast<char>(random());
    if (!payload.empty()) chunk.set_payload(payload);
    const std::vector<grpc::Slice> slices = Cut(chunk.SerializeAsString(), &random);
    auto parsed = ReceivedChunk::Parse(grpc::ByteBuffer(slices.data(), slices.size()));
    ASSERT_TRUE(parsed.ok()) << parsed.status();
    EXPECT_EQ(parsed->header().SerializeAsString(), chunk.header().SerializeAsString());
    ASSERT_EQ(parsed->payload_bytes(), static_cast<int64_t>(payload.size()));
    const size_t first = payload.empty() ? 0 : random() % payload.size();
    std::string out(payload.size(), '\0');
    EXPECT_EQ(parsed->CopyNext(out.data(), first), Crc32c(payload.data(), first));
    EXPECT_EQ(parsed->SkipNext(1 < payload.size() - first ? 1 : 0),
              Crc32c(payload.data() + first, 1 < payload.size() - first ? 1 : 0));
    EXPECT_EQ(out.substr(0, first), payload.substr(0, first));
  }
}

// CASES D7: random and truncated bytes are an error, never a crash.
TEST(ChunkCodec, HostileBytesAreRefused) {
  std::mt19937 random(2);
  v1::Chunk good;
  *good.mutable_header() = Header(3);
  good.set_payload("0123456789");
  const std::string bytes = good.SerializeAsString();
  for (size_t size = 1; size < bytes.size(); ++size) {
    grpc::Slice slice(bytes.data(), size);
    const auto parsed = ReceivedChunk::Parse(grpc::ByteBuffer(&slice, 1));
    if (parsed.ok()) {
      EXPECT_EQ(parsed->payload_bytes(), 0) << size;  // cut exactly behind the header
    }
  }
  int refused = 0;
  for (int trial = 0; trial < 20000; ++trial) {
    std::string noise = bytes;
    for (int flips = 1 + random() % 4; flips > 0; --flips)
      noise[random() % noise.size()] = static_cast<char>(random());
    grpc::Slice slice(noise.data(), noise.size());
    auto parsed = ReceivedChunk::Parse(grpc::ByteBuffer(&slice, 1));
    refused += !parsed.ok();
    if (parsed.ok()) {
      std::string out(parsed->payload_bytes(), '\0');
      parsed->CopyNext(out.data(), parsed->payload_bytes());
    }
  }
  EXPECT_GT(refused, 1000);
}

TEST(ChunkCodec, KeepaliveIsDroppedWithTheLastSlice) {
  std::string payload(100000, 'p');
  int freed = 0;
  OutgoingChunk chunk;
  chunk.header = Header(1);
  chunk.payload = {{payload.data(), 50000}, {payload.data() + 50000, 50000}};
  chunk.keepalive = std::shared_ptr<const void>(payload.data(), [&freed](const void*) { ++freed; });
  {
    const grpc::ByteBuffer buffer = EncodeChunk(std::move(chunk));
    EXPECT_EQ(freed, 0);
    auto parsed = ReceivedChunk::Parse(buffer);
    ASSERT_TRUE(parsed.ok());
    EXPECT_EQ(parsed->SkipNext(100000), Crc32c(payload.data(), payload.size()));
  }
  EXPECT_EQ(freed, 1);
}

TEST(ChunkCodec, UnknownFieldsAreNamed) {
  std::string bytes;
  v1::Chunk chunk;
  *chunk.mutable_header() = Header(1);
  chunk.mutable_header()
      ->GetReflection()
      ->MutableUnknownFields(chunk.mutable_header())
      ->AddVarint(37, 1);
  bytes = chunk.SerializeAsString();
  grpc::Slice slice(bytes.data(), bytes.size());
  const auto parsed = ReceivedChunk::Parse(grpc::ByteBuffer(&slice, 1));
  EXPECT_THAT(parsed.status().ToString(), testing::HasSubstr("field 37"));
}

}  // namespace
}  // namespace stiefel
