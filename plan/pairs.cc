#include "plan/pairs.h"

#include <map>
#include <string>

#include "absl/strings/str_cat.h"
#include "common/checked_math.h"
#include "common/errors.h"
#include "common/status.h"
#include "plan/nearest.h"

namespace stiefel {

absl::StatusOr<std::vector<int32_t>> FindPairs(const std::vector<PlanMatrix>& matrices) {
  std::vector<int32_t> partners(matrices.size(), -1);
  std::map<std::string, int32_t> factors;
  for (size_t i = 0; i < matrices.size(); ++i) {
    if (matrices[i].rule.family != RuleFamily::kPolora) continue;
    if (!factors.emplace(matrices[i].name, static_cast<int32_t>(i)).second) {
      return DuplicateName("polora parameter", matrices[i].name);
    }
  }
  for (const auto& [name, index] : factors) {
    const PlanMatrix& one = matrices[index];
    const auto other = factors.find(one.rule.pair);
    if (other == factors.end()) {
      return absl::InvalidArgumentError(absl::StrCat(
          PrintableName(name), ": its other factor, pair=\"", PrintableName(one.rule.pair),
          "\", is not among the parameters with preset polora"));
    }
    const PlanMatrix& two = matrices[other->second];
    STIEFEL_RETURN_IF_ERROR(
        ValidatePair(name, one.rule, one.rows, one.cols, two.name, two.rule, two.rows, two.cols));
    partners[index] = other->second;
  }
  return partners;
}

absl::Status ResolvePairs(std::vector<PlanMatrix>* matrices) {
  STIEFEL_ASSIGN_OR_RETURN(const std::vector<int32_t> partners, FindPairs(*matrices));
  for (size_t i = 0; i < partners.size(); ++i) {
    if (partners[i] < 0) continue;
    const PlanMatrix& other = (*matrices)[partners[i]];
    (*matrices)[i].partner_elements = SaturatingMul(other.rows, other.cols);
  }
  return absl::OkStatus();
}

}  // namespace stiefel
