#include "server/admission.h"

#include <map>

#include "absl/strings/str_cat.h"
#include "common/checked_math.h"
#include "common/status.h"

namespace stiefel {
namespace {

absl::StatusOr<MemoryTally> Tally(const RunSpec& spec, const std::map<int32_t, int64_t>& pushed,
                                  const AdmissionLimits& limits, Staging staging) {
  MemoryOptions options;
  options.staging = staging;
  options.weights_mode = spec.weights_mode();
  options.matrices_in_flight = limits.matrices_in_flight;
  options.ranks = spec.world_size();
  options.window_bytes = limits.credit_window_bytes;
  MemoryTally tally(options);
  for (const int32_t index : spec.owned()) {
    const MatrixSpec& matrix = spec.matrices()[index];
    PlanMatrix plan = ShardOfMatrix({matrix.name, matrix.whole_rows, matrix.whole_cols, matrix.rule,
                                     matrix.push_dtype, matrix.pull_dtype},
                                    matrix.place, matrix.shards);
    if (matrix.partner_shape)
      plan.partner_elements =
          SaturatingMul(matrix.partner_shape->first, matrix.partner_shape->second);
    const auto elements = pushed.find(index);
    STIEFEL_ASSIGN_OR_RETURN(
        const MatrixBytes bytes,
        BytesOfMatrix(plan, elements == pushed.end() ? matrix.elements() : elements->second,
                      options));
    tally.Add(bytes);
  }
  return tally;
}

absl::Status Refusal(const RunSpec& spec, const MemoryTally& tally, Staging staging,
                     int64_t limit) {
  const MatrixBytes parts = tally.Parts();
  return absl::ResourceExhaustedError(absl::StrCat(
      "run \"", spec.opened().name(), "\" needs ", tally.Total(), " bytes on server ",
      spec.opened().server_index(), ", the limit is ", limit, " (staging ",
      std::string(StagingName(staging)), ": state ", parts.state, ", staged ", parts.staged,
      ", weights ", parts.weights, ", pushed ", parts.push, ", sent ", parts.pull, ", workspace ",
      parts.workspace, ", held by shards ", parts.held, ", streams ", tally.StreamBytes(), ")"));
}

}  // namespace

absl::StatusOr<Admitted> AdmitRun(const RunSpec& spec, const std::vector<RankState>& ranks,
                                  const AdmissionLimits& limits) {
  std::map<int32_t, int64_t> pushed;
  for (const RankState& rank : ranks) {
    for (const BlockSpec& block : rank.push) {
      int64_t& sum = pushed[block.matrix];
      sum = SaturatingAdd(sum, SaturatingMul(block.elements(), block.parts));
    }
  }
  for (const Staging staging : {Staging::kDouble, Staging::kLazy}) {
    if (limits.staging && *limits.staging != staging) continue;
    STIEFEL_ASSIGN_OR_RETURN(const MemoryTally tally, Tally(spec, pushed, limits, staging));
    if (tally.Total() <= limits.memory_limit_bytes) return Admitted{staging, tally.Total()};
    if (limits.staging || staging == Staging::kLazy)
      return Refusal(spec, tally, staging, limits.memory_limit_bytes);
  }
  return absl::InternalError("no staging");
}

}  // namespace stiefel
