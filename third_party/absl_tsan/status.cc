// Under ThreadSanitizer only: the one function of libabsl_status that drops a reference, compiled
// here so that it is instrumented. Debian's library is not, and an object handed from thread to
// thread by its reference count alone would look like a race: the count's decrement is what orders
// the last reader before the deletion.
#include "absl/status/status.h"

#include <cstdint>

#include "absl/status/internal/status_internal.h"

namespace absl {
ABSL_NAMESPACE_BEGIN

void Status::UnrefNonInlined(uintptr_t rep) {
  status_internal::StatusRep* counted = RepToPointer(rep);
  if (counted->ref.fetch_sub(1, std::memory_order_acq_rel) == 1) delete counted;
}

ABSL_NAMESPACE_END
}  // namespace absl
