#include "common/checksum.h"

#include <gtest/gtest.h>

#include <random>
#include <string>
#include <vector>

namespace stiefel {
namespace {

// RFC 3720 section B.4 and the usual check value.
TEST(Crc32c, KnownValues) {
  EXPECT_EQ(Crc32c("123456789", 9), 0xE3069283u);
  EXPECT_EQ(Crc32c(nullptr, 0), 0u);
  EXPECT_EQ(Crc32c(std::string(32, '\0').data(), 32), 0x8A9136AAu);
  EXPECT_EQ(Crc32c(std::string(32, '\xFF').data(), 32), 0x62A8AB43u);
}

std::vector<unsigned char> RandomBytes(size_t size) {
  std::mt19937 random(7);
  std::vector<unsigned char> bytes(size);
  for (auto& byte : bytes) byte = static_cast<unsigned char>(random());
  return bytes;
}

TEST(Crc32c, SlicesGiveTheCrcOfTheWhole) {
  const auto bytes = RandomBytes(1000);
  const uint32_t whole = Crc32c(bytes.data(), bytes.size());
  for (size_t cut = 0; cut <= bytes.size(); ++cut) {
    const uint32_t head = ExtendCrc32c(0, bytes.data(), cut);
    ASSERT_EQ(ExtendCrc32c(head, bytes.data() + cut, bytes.size() - cut), whole) << cut;
  }
}

TEST(CopyAndCrc32c, CopiesAndHashesAcrossItsBlocks) {
  for (size_t size : {0u, 1u, 16383u, 16384u, 16385u, 100003u}) {
    const auto src = RandomBytes(size + 2);
    std::vector<unsigned char> dst(size + 2, 0xAA);
    const uint32_t before = Crc32c("head", 4);
    EXPECT_EQ(CopyAndCrc32c(dst.data() + 1, src.data() + 1, size, before),
              ExtendCrc32c(before, src.data() + 1, size));
    EXPECT_EQ(dst.front(), 0xAA);
    EXPECT_EQ(dst.back(), 0xAA);
    EXPECT_TRUE(std::equal(dst.begin() + 1, dst.end() - 1, src.begin() + 1)) << size;
  }
}

TEST(Hash64, IsXxh3AndIndependentOfThePieces) {
  Hash64 empty;
  EXPECT_EQ(empty.Digest(), 0x2D06800538D394C2u);  // XXH3_64bits of nothing, seed 0.

  const auto bytes = RandomBytes(5000);
  Hash64 whole;
  whole.Update(bytes.data(), bytes.size());
  Hash64 pieces;
  for (size_t at = 0; at < bytes.size(); at += 77) {
    pieces.Update(bytes.data() + at, std::min<size_t>(77, bytes.size() - at));
    pieces.Digest();
  }
  EXPECT_EQ(pieces.Digest(), whole.Digest());
  pieces.Update("x", 1);
  EXPECT_NE(pieces.Digest(), whole.Digest());
}

}  // namespace
}  // namespace stiefel
