// The run and its servers as the planner takes them: for opening a run and for moving one.
#ifndef STIEFEL_CLIENT_PLAN_INPUTS_H_
#define STIEFEL_CLIENT_PLAN_INPUTS_H_

#include <cstdint>
#include <vector>

#include "client/layout.h"
#include "plan/matrix.h"
#include "plan/memory.h"
#include "plan/placement.h"
#include "stiefel/v1/optimizer.pb.h"

namespace stiefel {

// The run's matrices, in order; pairs are not resolved.
std::vector<PlanMatrix> PlanMatricesOf(const Layout& layout);

// One bound for all servers: lazy staging where any of them stages lazily, and the largest credit
// window.
MemoryOptions PlanMemoryOf(const Layout& layout, const std::vector<v1::ServerInfo>& infos);

// What a server leaves unsaid does not bind.
ServerSpec PlanServerOf(const v1::ServerInfo& info);

// How many ranks push an element, on average: every rank is taken to push as much as this one.
int64_t PushCopies(const Layout& layout);

}  // namespace stiefel

#endif  // STIEFEL_CLIENT_PLAN_INPUTS_H_
