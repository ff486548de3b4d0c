#include "kernels/rules/split_rule.h"

#include <algorithm>
#include <functional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/status.h"

namespace stiefel {
namespace {

// Splits with a larger workspace are work for all threads.
constexpr int64_t kMaxLaneBytes = 2 << 20;

}  // namespace

SplitRule::SplitRule(const Rule& rule, int64_t rows, int64_t cols, std::vector<Split> splits,
                     const DeviceInfo& device)
    : RuleBase(rule, rows, cols, splits[0].rule->Method()),
      splits_(std::move(splits)),
      lanes_(LaneBytes() > kMaxLaneBytes ? 1
                                         : std::min<int64_t>({static_cast<int64_t>(splits_.size()),
                                                              kMaxLanes, device.threads})) {}

absl::StatusOr<std::unique_ptr<SplitRule>> SplitRule::Make(const Rule& rule, int64_t rows,
                                                           int64_t cols, const DeviceInfo& device) {
  const Rule split_rule = RuleOfSplit(rule, rows, cols);
  std::vector<Split> splits;
  Split next;
  for (const int64_t split_rows : SplitRows(rule, rows)) {
    STIEFEL_ASSIGN_OR_RETURN(next.rule, SpectralRule::Make(split_rule, split_rows, cols, device));
    const std::vector<StateBuffer> state = next.rule->State();
    Split after;
    after.first_row = next.first_row + split_rows;
    for (size_t i = 0; i < state.size(); ++i)
      after.state_offset[i] = next.state_offset[i] + state[i].rows * state[i].cols;
    splits.push_back(std::move(next));
    next = std::move(after);
  }
  return std::unique_ptr<SplitRule>(new SplitRule(rule, rows, cols, std::move(splits), device));
}

std::string SplitRule::Explain() const {
  std::string text;
  for (size_t begin = 0; begin < splits_.size();) {
    size_t end = begin + 1;
    while (end < splits_.size() && splits_[end].rule->rows() == splits_[begin].rule->rows()) ++end;
    absl::StrAppend(&text, end - begin, " split", end - begin == 1 ? "" : "s", " of ",
                    splits_[begin].rule->rows(), " rows: ", splits_[begin].rule->Explain());
    begin = end;
  }
  return text;
}

int64_t SplitRule::PartBytes() const {
  return Aligned(static_cast<int64_t>(splits_.size() * sizeof(StepStats)));
}

int64_t SplitRule::LaneBytes() const {
  int64_t bytes = 0;
  for (const Split& split : splits_) bytes = std::max(bytes, split.rule->StepWorkspaceBytes());
  return bytes;
}

int64_t SplitRule::StepWorkspaceBytes() const { return PartBytes() + lanes_ * LaneBytes(); }

RuleStep SplitRule::StepOf(const RuleStep& step, const Split& split) const {
  RuleStep own = step;
  ElementPass& pass = own.pass;
  pass.first_row += split.first_row;
  pass.rows = split.rule->rows();
  for (int i = 0; i < kMaxStates; ++i) {
    if (pass.state[i] != nullptr) pass.state[i] += split.state_offset[i];
    if (pass.new_state[i] != nullptr) pass.new_state[i] += split.state_offset[i];
  }
  for (int i = 0; i < kMaxRuleStates; ++i) {
    if (own.state[i] != nullptr) own.state[i] += split.state_offset[i];
    if (own.staged[i] != nullptr) own.staged[i] += split.state_offset[i];
  }
  pass.delivery = DeliveryAt(pass.delivery, split.first_row, 0, cols_);
  return own;
}

Measured SplitRule::Enqueue(Stream* stream, RuleStep* step) {
  auto* parts = reinterpret_cast<StepStats*>(step->workspace);
  stream->Zero(parts, PartBytes());
  const auto splits = static_cast<int64_t>(splits_.size());
  Measured measured;  // every split measures the same
  const auto enqueue_lane = [&](int64_t lane, Stream* sub) {
    for (int64_t i = lane; i < splits; i += lanes_) {
      RuleStep own = StepOf(*step, splits_[i]);
      own.pass.stats = &parts[i];
      own.workspace = step->workspace + PartBytes() + lane * LaneBytes();
      const Measured of_split = splits_[i].rule->Enqueue(sub, &own);
      if (i == 0) measured = of_split;
    }
  };
  if (lanes_ == 1) {
    enqueue_lane(0, stream);
  } else {
    stream->ForEach(lanes_, std::ref(enqueue_lane));
  }
  stream->Combine(parts, splits, step->pass.stats);
  return measured;
}

void SplitRule::EnqueueAbsorb(Stream* stream, RuleStep* step) {
  for (const Split& split : splits_) {
    RuleStep own = StepOf(*step, split);
    split.rule->EnqueueAbsorb(stream, &own);
  }
}

}  // namespace stiefel
