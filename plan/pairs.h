#ifndef STIEFEL_PLAN_PAIRS_H_
#define STIEFEL_PLAN_PAIRS_H_

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "plan/matrix.h"

// Coupled matrices of a model: the two factors of a polora product, which name each other.

namespace stiefel {

// By matrix: the index of its other factor, or -1 where the rule is not polora. INVALID_ARGUMENT,
// with the names: a partner that is not in the list, or stands there twice, and what ValidatePair
// refuses.
absl::StatusOr<std::vector<int32_t>> FindPairs(const std::vector<PlanMatrix>& matrices);

// FindPairs, and sets partner_elements of every factor.
absl::Status ResolvePairs(std::vector<PlanMatrix>* matrices);

}  // namespace stiefel

#endif  // STIEFEL_PLAN_PAIRS_H_
