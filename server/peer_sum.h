// The arithmetic of a sum over shards: who adds what, and the adding.
#ifndef STIEFEL_SERVER_PEER_SUM_H_
#define STIEFEL_SERVER_PEER_SUM_H_

#include <cstdint>
#include <vector>

#include "kernels/collective.h"

namespace stiefel {

// Bytes of one element.
inline int64_t ElementBytes(CollectivePart::Kind kind) {
  switch (kind) {
    case CollectivePart::Kind::kGather:
      return 1;
    case CollectivePart::Kind::kSumFp32:
      return 4;
    case CollectivePart::Kind::kSumFp64:
      return 8;
  }
  return 1;
}

// Segment j of a sum of `count` elements over `servers` servers is elements [SegmentBegin(j),
// SegmentBegin(j + 1)): equal parts, their bounds rounded down to multiples of 16 elements, so that
// small sums have empty segments and every bound lies on a cache line. SegmentBegin(servers) ==
// count.
int64_t SegmentBegin(int64_t count, int32_t servers, int32_t segment);

// out_k[i] = ((in_0[i] + in_1[i]) + in_2[i]) ... for i < count and every k, in the element type of
// `kind` (a sum). Reads all inputs of an element before it writes any output of it, so an output
// may be one of the inputs; otherwise they do not overlap. Pointers need no alignment. REQUIRES: at
// least one input.
void AddInOrder(CollectivePart::Kind kind, const std::vector<const char*>& in,
                const std::vector<char*>& out, int64_t count);

}  // namespace stiefel

#endif  // STIEFEL_SERVER_PEER_SUM_H_
