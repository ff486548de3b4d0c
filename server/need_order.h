// In which order the trainers need the matrices of a run: they say it by the order of their pull
// blocks. The engine and the pull queues work in that order among what is ready, so that the first
// layers of the next forward pass come back first. It changes when work is done, never its result.
#ifndef STIEFEL_SERVER_NEED_ORDER_H_
#define STIEFEL_SERVER_NEED_ORDER_H_

#include <cstdint>
#include <vector>

#include "server/run_machine.h"

namespace stiefel {

// By matrix: the smallest position of one of its blocks in any rank's list of pull blocks, so that
// what is first for some rank is first; after all others where nobody pulls from it.
std::vector<int64_t> NeedOrder(const std::vector<RankState>& ranks, size_t matrices);

}  // namespace stiefel

#endif  // STIEFEL_SERVER_NEED_ORDER_H_
