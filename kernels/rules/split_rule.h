#ifndef STIEFEL_KERNELS_RULES_SPLIT_RULE_H_
#define STIEFEL_KERNELS_RULES_SPLIT_RULE_H_

#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "kernels/rules/spectral_rule.h"

namespace stiefel {

// A fused matrix: the spectral rule of each split on its own rows (RuleOfSplit). The bits are those
// of the splits registered as matrices of their own.
class SplitRule final : public RuleBase {
 public:
  // Errors: those of MakePolarPlan. REQUIRES: a valid spectral rule.
  static absl::StatusOr<std::unique_ptr<SplitRule>> Make(const Rule& rule, int64_t rows,
                                                         int64_t cols, const DeviceInfo& device);

  std::string Explain() const override;

 private:
  struct Split {
    std::unique_ptr<SpectralRule> rule;
    int64_t first_row = 0;
    int64_t state_offset[kMaxRuleStates] = {};  // elements before it in each buffer
  };

  SplitRule(const Rule& rule, int64_t rows, int64_t cols, std::vector<Split> splits,
            const DeviceInfo& device);

  int64_t StepWorkspaceBytes() const override;
  Measured Enqueue(Stream* stream, RuleStep* step) override;
  void EnqueueAbsorb(Stream* stream, RuleStep* step) override;

  int64_t PartBytes() const;
  int64_t LaneBytes() const;
  // The step on one split; figures and workspace are its own.
  RuleStep StepOf(const RuleStep& step, const Split& split) const;

  const std::vector<Split> splits_;
  // Splits that are under way at once, each on one thread with a workspace of its own; 1: one after
  // the other, each by all threads.
  const int64_t lanes_;
};

}  // namespace stiefel

#endif  // STIEFEL_KERNELS_RULES_SPLIT_RULE_H_
