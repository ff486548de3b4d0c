#include "common/checksum.h"

#include <isa-l/crc.h>
#include <xxhash.h>

#include <algorithm>
#include <cstring>
#include <new>

namespace stiefel {
namespace {

// ISA-L takes the length as int.
constexpr size_t kMaxCrcPiece = size_t{1} << 30;

// Small enough that the copy is still in the first-level cache when it is hashed.
constexpr size_t kCopyBlock = size_t{16} << 10;

}  // namespace

uint32_t Crc32c(const void* data, size_t size) { return ExtendCrc32c(0, data, size); }

uint32_t ExtendCrc32c(uint32_t crc, const void* data, size_t size) {
  // ISA-L neither inverts before nor after, and never writes through its non-const pointer.
  auto* bytes = const_cast<unsigned char*>(static_cast<const unsigned char*>(data));
  uint32_t state = ~crc;
  while (size > 0) {
    const size_t piece = std::min(size, kMaxCrcPiece);
    state = crc32_iscsi(bytes, static_cast<int>(piece), state);
    bytes += piece;
    size -= piece;
  }
  return ~state;
}

uint32_t CopyAndCrc32c(void* dst, const void* src, size_t size, uint32_t crc) {
  auto* to = static_cast<unsigned char*>(dst);
  const auto* from = static_cast<const unsigned char*>(src);
  while (size > 0) {
    const size_t block = std::min(size, kCopyBlock);
    std::memcpy(to, from, block);
    crc = ExtendCrc32c(crc, to, block);
    to += block;
    from += block;
    size -= block;
  }
  return crc;
}

Hash64::Hash64() : state_(XXH3_createState()) {
  if (state_ == nullptr) throw std::bad_alloc();
  XXH3_64bits_reset(state_.get());
}

Hash64::~Hash64() = default;
Hash64::Hash64(Hash64&&) noexcept = default;
Hash64& Hash64::operator=(Hash64&&) noexcept = default;

void Hash64::Free::operator()(XXH3_state_s* state) const { XXH3_freeState(state); }

void Hash64::Update(const void* data, size_t size) {
  if (size > 0) XXH3_64bits_update(state_.get(), data, size);
}

uint64_t Hash64::Digest() const { return XXH3_64bits_digest(state_.get()); }

}  // namespace stiefel
