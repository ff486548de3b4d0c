#include "kernels/rules/matrix_rule.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "common/status.h"
#include "kernels/rules/elementwise_rule.h"
#include "kernels/rules/polora_rule.h"
#include "kernels/rules/spectral_rule.h"
#include "kernels/rules/split_rule.h"

namespace stiefel {

namespace {

absl::StatusOr<std::unique_ptr<MatrixRule>> MakeSpectralRule(const Rule& rule, int64_t rows,
                                                             int64_t cols,
                                                             const DeviceInfo& device) {
  if (SplitRows(rule, rows).size() > 1) return SplitRule::Make(rule, rows, cols, device);
  return SpectralRule::Make(RuleOfSplit(rule, rows, cols), rows, cols, device);
}

}  // namespace

absl::StatusOr<std::unique_ptr<MatrixRule>> MatrixRule::Create(
    const Rule& rule, int64_t rows, int64_t cols, Backend* backend,
    std::optional<std::pair<int64_t, int64_t>> partner) {
  STIEFEL_RETURN_IF_ERROR(ValidateRule(rule, rows, cols));
  switch (rule.family) {
    case RuleFamily::kSpectral:
      return MakeSpectralRule(rule, rows, cols, backend->Info());
    case RuleFamily::kPolora:
      if (!partner.has_value()) {
        return absl::InvalidArgumentError(
            absl::StrCat("polora: a factor of ", rows, " x ", cols,
                         " without its partner; the pair must be registered together"));
      }
      return MakePoloraRule(rule, rows, cols, *partner, backend);
    case RuleFamily::kAdamw:
    case RuleFamily::kLion:
    case RuleFamily::kSgd:
      break;
  }
  return std::make_unique<ElementwiseRule>(rule, rows, cols);
}

}  // namespace stiefel
