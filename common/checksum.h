#ifndef STIEFEL_COMMON_CHECKSUM_H_
#define STIEFEL_COMMON_CHECKSUM_H_

#include <cstddef>
#include <cstdint>
#include <memory>

struct XXH3_state_s;

namespace stiefel {

// CRC-32C (Castagnoli) as in iSCSI: of "123456789" it is 0xE3069283, of nothing 0.
uint32_t Crc32c(const void* data, size_t size);

// Crc32c of what `crc` was taken of, followed by data: a chunk can be hashed slice by slice,
// starting from 0.
uint32_t ExtendCrc32c(uint32_t crc, const void* data, size_t size);

// memcpy(dst, src, size) and ExtendCrc32c(crc, dst, size) in one pass over memory. No overlap.
uint32_t CopyAndCrc32c(void* dst, const void* src, size_t size, uint32_t crc);

// Streaming 64-bit XXH3, for hashes of states. Not cryptographic. Thread-compatible; movable.
class Hash64 {
 public:
  Hash64();
  ~Hash64();
  Hash64(Hash64&&) noexcept;
  Hash64& operator=(Hash64&&) noexcept;

  void Update(const void* data, size_t size);

  // Hash of everything so far; more may follow.
  uint64_t Digest() const;

 private:
  struct Free {
    void operator()(XXH3_state_s* state) const;
  };
  std::unique_ptr<XXH3_state_s, Free> state_;
};

}  // namespace stiefel

#endif  // STIEFEL_COMMON_CHECKSUM_H_
