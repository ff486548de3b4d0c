#include "server/need_order.h"

#include <algorithm>
#include <limits>

namespace stiefel {

std::vector<int64_t> NeedOrder(const std::vector<RankState>& ranks, size_t matrices) {
  std::vector<int64_t> order(matrices, std::numeric_limits<int64_t>::max());
  for (const RankState& rank : ranks) {
    for (size_t b = 0; b < rank.pull.size(); ++b) {
      int64_t& first = order[rank.pull[b].matrix];
      first = std::min(first, static_cast<int64_t>(b));
    }
  }
  return order;
}

}  // namespace stiefel
