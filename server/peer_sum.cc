#include "server/peer_sum.h"

#include <algorithm>
#include <cstring>

namespace stiefel {
namespace {

constexpr int64_t kSegmentUnit = 16;
constexpr int64_t kBlockBytes = 8192;  // of the running sum: stays in the first cache

// memcpy instead of casts: what arrived lies where the network put it.
template <typename T>
void AddInto(T* sum, const char* in, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    T value;
    std::memcpy(&value, in + i * static_cast<int64_t>(sizeof(T)), sizeof(T));
    sum[i] += value;
  }
}

template <typename T>
void AddBlocks(const std::vector<const char*>& in, const std::vector<char*>& out, int64_t count) {
  constexpr int64_t kSize = sizeof(T);
  constexpr int64_t kBlock = kBlockBytes / kSize;
  alignas(64) T sum[kBlock];
  for (int64_t begin = 0; begin < count; begin += kBlock) {
    const int64_t here = std::min(kBlock, count - begin);
    std::memcpy(sum, in[0] + begin * kSize, here * kSize);
    for (size_t k = 1; k < in.size(); ++k) AddInto(sum, in[k] + begin * kSize, here);
    for (char* to : out) std::memcpy(to + begin * kSize, sum, here * kSize);
  }
}

}  // namespace

int64_t SegmentBegin(int64_t count, int32_t servers, int32_t segment) {
  if (segment == servers) return count;
  // count / servers and its rest apart: the product could overflow.
  const int64_t at = count / servers * segment + count % servers * segment / servers;
  return at / kSegmentUnit * kSegmentUnit;
}

void AddInOrder(CollectivePart::Kind kind, const std::vector<const char*>& in,
                const std::vector<char*>& out, int64_t count) {
  if (kind == CollectivePart::Kind::kSumFp64) {
    AddBlocks<double>(in, out, count);
  } else {
    AddBlocks<float>(in, out, count);
  }
}

}  // namespace stiefel
