// What is the same for every family of rules: checking arguments and buffers, state, delivery, and
// the figures of a step.
#ifndef STIEFEL_KERNELS_RULES_RULE_BASE_H_
#define STIEFEL_KERNELS_RULES_RULE_BASE_H_

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "kernels/rules/matrix_rule.h"
#include "plan/matrix.h"

namespace stiefel {

constexpr int kMaxRuleStates = 4;

// Bytes at the beginning of every workspace, where the step's StepStats are; a multiple of 64.
constexpr int64_t kFigureBytes = 128;

// Pieces of one matrix (splits, tiles) that are under way at once, at most: each needs a workspace.
constexpr int kMaxLanes = 16;

// Size of a piece of workspace that keeps the next one aligned.
inline int64_t Aligned(int64_t bytes) { return (bytes + 63) / 64 * 64; }

// One step on a matrix or on a range of its rows, with everything checked. Every pointer but the
// gradient and `buffers` begins at the first row of the range.
struct RuleStep {
  // Gradient, clipping, coefficients, the element-wise state (the first states of the rule),
  // delivery but for its step and scale, and figures; `direction` and `deliver` are not set.
  ElementPass pass;
  const float* state[kMaxRuleStates] = {};
  float* staged[kMaxRuleStates] = {};  // null: not staged
  StepArgs args;
  const StepBuffers* buffers = nullptr;  // of the whole matrix; valid during the call
  char* workspace = nullptr;             // what the rule asked for, without the figures
};

// Sets how the update direction is delivered: -lr s ratio times it; s also scales its figures.
void SetScale(RuleStep* step, double s, double ratio = 1);

// Which figures a step measured.
struct Measured {
  bool polar = false;     // the polar map ran, and residual is filled
  bool spectral = false;  // spectral_norm is
};

// The checks and conversions themselves, for whatever offers the rule.
class RuleParts {
 public:
  // REQUIRES: a rule that is valid for the matrix, or for that of which it is a shard.
  RuleParts(const PlanMatrix& matrix, std::string method);

 protected:
  using EnqueueStep = std::function<void(RuleStep* step)>;

  absl::Status CheckArgs(const StepArgs& args) const;
  absl::Status CheckBuffers(const StepBuffers& buffers, const DeviceBuffer& workspace,
                            int64_t workspace_bytes) const;
  // REQUIRES: checked arguments; a plan for this shape, which must outlive the step.
  RuleStep Prepare(const GradientPlan& plan, const StepArgs& args, const StepBuffers& buffers,
                   DeviceBuffer* workspace) const;
  // Enqueues the copy of the figures and what fills `result` from them.
  void Report(Stream* stream, const RuleStep& step, const Measured& measured,
              StepResult* result) const;
  // MatrixRule::Absorb, of which `enqueue` enqueues all.
  absl::Status AbsorbBy(const EnqueueStep& enqueue, const GradientView& gradient,
                        const StepArgs& args, const std::vector<float*>& state) const;
  double CostOf(StepKind kind) const;
  // The place of a buffer in the state, or -1.
  int StateIndex(std::string_view name) const;

  const Rule rule_;
  const int64_t rows_, cols_;
  const std::string method_;
  const std::vector<StateBuffer> state_;

 private:
  ElementPass Pass(const GradientPlan& plan, const StepArgs& args) const;

  const double refresh_cost_, off_refresh_cost_;
};

class RuleBase : public MatrixRule, protected RuleParts {
 public:
  const std::vector<StateBuffer>& State() const override { return state_; }
  const std::string& Method() const override { return method_; }
  double CostUnits(StepKind kind) const override { return CostOf(kind); }
  int64_t WorkspaceBytes() const override;
  int64_t rows() const { return rows_; }

  absl::Status Compute(Stream* stream, const GradientView& gradient, const StepArgs& args,
                       const StepBuffers& buffers, DeviceBuffer* workspace,
                       StepResult* result) override;
  absl::Status Absorb(Stream* stream, const GradientView& gradient, const StepArgs& args,
                      const std::vector<float*>& state) override;

 protected:
  // REQUIRES: a rule that is valid for the shape.
  RuleBase(const Rule& rule, int64_t rows, int64_t cols, std::string method);

  // Bytes of RuleStep::workspace; a multiple of 64.
  virtual int64_t StepWorkspaceBytes() const = 0;
  // Enqueues everything between the zeroing of step.pass.stats and their copy to the host.
  virtual Measured Enqueue(Stream* stream, RuleStep* step) = 0;
  // Enqueues the absorption: step.state and step.staged are the same buffers, and there is no
  // workspace. By default the element pass alone.
  virtual void EnqueueAbsorb(Stream* stream, RuleStep* step);
};

}  // namespace stiefel

#endif  // STIEFEL_KERNELS_RULES_RULE_BASE_H_
