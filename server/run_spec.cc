#include "server/run_spec.h"

#include <cmath>
#include <set>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "common/checked_math.h"
#include "common/errors.h"
#include "common/status.h"
#include "plan/shards.h"
#include "proto/protocol.h"
#include "proto/rule_convert.h"

namespace stiefel {
namespace {

constexpr int kMaxWorldSize = 1 << 16;
constexpr int kMaxParameters = 1 << 20;
constexpr size_t kMaxShards = 1 << 20;
constexpr int64_t kMaxBlocks = 1 << 20;
constexpr int kMaxParts = 1 << 12;

absl::StatusOr<DType> DTypeOf(v1::DataType wire, const std::string& what) {
  switch (wire) {
    case v1::FP32:
      return DType::kFp32;
    case v1::BF16:
      return DType::kBf16;
    case v1::FP16:
      return DType::kFp16;
    default:
      return absl::InvalidArgumentError(
          absl::StrCat(what, ": unknown data type ", static_cast<int>(wire)));
  }
}

absl::StatusOr<int64_t> Microseconds(double seconds, absl::string_view what) {
  if (!(seconds > 0) || seconds > 1e7) {
    return absl::InvalidArgumentError(
        absl::StrCat(what, " = ", seconds, " s is not within (0, 1e7]"));
  }
  return static_cast<int64_t>(std::llround(seconds * 1e6));
}

absl::StatusOr<MatrixSpec> ResolveParameter(const v1::OpenRunRequest& opened, int32_t index) {
  const v1::Parameter& wire = opened.parameters(index);
  MatrixSpec matrix;  // whole
  matrix.name = wire.name();
  matrix.parameter = index;
  const std::string what = absl::StrCat("parameter \"", wire.name(), "\"");
  if (wire.name().empty() || wire.name().size() > 1024) {
    return absl::InvalidArgumentError(absl::StrCat("parameter ", index, " has a name of ",
                                                   wire.name().size(), " bytes, not 1..1024"));
  }
  if (wire.shape_size() != 1 && wire.shape_size() != 2) {
    return absl::InvalidArgumentError(
        absl::StrCat(what, " has ", wire.shape_size(), " dimensions, not 1 or 2"));
  }
  matrix.rows = wire.shape_size() == 2 ? wire.shape(0) : 1;
  matrix.cols = wire.shape(wire.shape_size() - 1);
  int64_t bytes = 0;
  if (matrix.rows <= 0 || matrix.cols <= 0 || !CheckedMul(matrix.rows, matrix.cols, &bytes) ||
      !CheckedMul(bytes, 64, &bytes)) {
    return BadShape(what, matrix.rows, matrix.cols);
  }
  auto rule = RuleFromProto(wire.rule());
  if (!rule.ok())
    return absl::Status(rule.status().code(), absl::StrCat(what, ": ", rule.status().message()));
  matrix.rule = *std::move(rule);
  if (absl::Status valid = ValidateRule(matrix.rule, matrix.rows, matrix.cols, wire.shape_size());
      !valid.ok()) {
    return absl::Status(valid.code(), absl::StrCat(what, ": ", valid.message()));
  }
  if (NeedsWeights(matrix.rule) && opened.update_mode() != v1::WEIGHTS) {
    return absl::InvalidArgumentError(
        absl::StrCat(what, ": ", matrix.rule.preset,
                     " reads the weights, which servers hold in update mode WEIGHTS only; the run "
                     "is opened in mode ",
                     v1::UpdateMode_Name(opened.update_mode())));
  }
  matrix.group = wire.group();
  matrix.mean = wire.reduce() != v1::SUM;
  STIEFEL_ASSIGN_OR_RETURN(matrix.push_dtype,
                           DTypeOf(wire.has_push_dtype() ? wire.push_dtype() : v1::FP32, what));
  matrix.pull_dtype = matrix.push_dtype;
  if (wire.has_pull_dtype()) {
    STIEFEL_ASSIGN_OR_RETURN(matrix.pull_dtype, DTypeOf(wire.pull_dtype(), what));
  }
  matrix.phase = opened.phases(index);
  if (matrix.phase < 0 || matrix.phase >= matrix.rule.period) {
    return absl::InvalidArgumentError(absl::StrCat(what, ": phase ", matrix.phase,
                                                   " is not within [0, ", matrix.rule.period, ")"));
  }
  return matrix;
}

// By parameter; empty: not cut.
absl::StatusOr<std::vector<std::vector<int64_t>>> ResolveCuts(const v1::OpenRunRequest& opened) {
  std::vector<std::vector<int64_t>> cuts(opened.parameters_size());
  int32_t last = -1;
  for (const v1::Cuts& wire : opened.cuts()) {
    if (wire.parameter() <= last || wire.parameter() >= opened.parameters_size()) {
      return absl::InvalidArgumentError(absl::StrCat(
          "cuts of parameter ", wire.parameter(), " after those of ", last, ": they ascend and ",
          "there are ", opened.parameters_size(), " parameters"));
    }
    last = wire.parameter();
    cuts[last].assign(wire.at().begin(), wire.at().end());
  }
  return cuts;
}

absl::Status CheckHeader(const v1::OpenRunRequest& opened) {
  if (opened.protocol_version() != kProtocolVersion) {
    return absl::FailedPreconditionError(
        absl::StrCat("the leader speaks protocol ", opened.protocol_version(), " (software ",
                     opened.software_version(), "), this server ", kProtocolVersion, " (software ",
                     kSoftwareVersion, ")"));
  }
  if (opened.name().empty() || opened.name().size() > 256)
    return absl::InvalidArgumentError(
        absl::StrCat("run name of ", opened.name().size(), " bytes, not 1..256"));
  if (opened.run_uid() == 0) return absl::InvalidArgumentError("run_uid is 0");
  if (opened.world_size() < 1 || opened.world_size() > kMaxWorldSize)
    return absl::InvalidArgumentError(absl::StrCat("world_size ", opened.world_size(),
                                                   " is not within [1, ", kMaxWorldSize, "]"));
  if (opened.start_step() < 1)
    return absl::InvalidArgumentError(
        absl::StrCat("start_step ", opened.start_step(), " is below 1"));
  if (opened.update_mode() != v1::DELTA && opened.update_mode() != v1::WEIGHTS)
    return absl::InvalidArgumentError(absl::StrCat(
        "update_mode ", static_cast<int>(opened.update_mode()), " is neither DELTA nor WEIGHTS"));
  if (opened.leader().generation() < 1)
    return absl::InvalidArgumentError(
        absl::StrCat("leader generation ", opened.leader().generation(), " is below 1"));
  const int count = opened.parameters_size();
  if (count < 1 || count > kMaxParameters)
    return absl::InvalidArgumentError(
        absl::StrCat(count, " parameters are not within [1, ", kMaxParameters, "]"));
  if (opened.phases_size() != count) {
    return absl::InvalidArgumentError(
        absl::StrCat(count, " parameters, but ", opened.phases_size(), " phases"));
  }
  if (opened.server_index() < 0 || opened.server_index() >= opened.servers_size())
    return IndexOutOfRange("server_index", opened.server_index(), opened.servers_size());
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::shared_ptr<const RunSpec>> RunSpec::Create(const v1::OpenRunRequest& opened) {
  STIEFEL_RETURN_IF_ERROR(CheckHeader(opened));
  STIEFEL_RETURN_IF_ERROR(CheckMovesIn(opened));
  auto spec = std::shared_ptr<RunSpec>(new RunSpec);
  spec->opened_ = opened;
  STIEFEL_ASSIGN_OR_RETURN(const auto cuts, ResolveCuts(opened));
  for (int32_t i = 0; i < opened.parameters_size(); ++i) {
    STIEFEL_ASSIGN_OR_RETURN(const MatrixSpec whole, ResolveParameter(opened, i));
    if (!spec->by_name_.emplace(whole.name, i).second)
      return DuplicateName("parameter", whole.name);
    spec->groups_.insert(whole.group);
    STIEFEL_RETURN_IF_ERROR(spec->AddShards(whole, cuts[i]));
  }
  if (opened.owners_size() != static_cast<int64_t>(spec->matrices_.size())) {
    return absl::InvalidArgumentError(
        absl::StrCat(opened.parameters_size(), " parameters are cut into ", spec->matrices_.size(),
                     " shards, but there are ", opened.owners_size(), " owners"));
  }
  for (int32_t i = 0; i < opened.owners_size(); ++i) {
    MatrixSpec& shard = spec->matrices_[i];
    shard.owner = opened.owners(i);
    if (shard.owner < 0 || shard.owner >= opened.servers_size()) {
      return IndexOutOfRange(absl::StrCat("parameter \"", shard.Label(), "\" owner"), shard.owner,
                             opened.servers_size());
    }
    if (shard.owner == opened.server_index()) spec->owned_.push_back(i);
  }
  for (int32_t i = 0; i < opened.parameters_size(); ++i) {
    STIEFEL_RETURN_IF_ERROR(spec->ResolvePair(i));
  }
  STIEFEL_ASSIGN_OR_RETURN(
      spec->step_timeout_,
      Microseconds(opened.has_step_timeout_seconds() ? opened.step_timeout_seconds() : 60,
                   "step_timeout_seconds"));
  STIEFEL_ASSIGN_OR_RETURN(
      spec->lease_,
      Microseconds(opened.has_lease_seconds() ? opened.lease_seconds() : 15, "lease_seconds"));
  STIEFEL_ASSIGN_OR_RETURN(
      spec->takeover_timeout_,
      Microseconds(opened.has_takeover_timeout_seconds() ? opened.takeover_timeout_seconds() : 300,
                   "takeover_timeout_seconds"));
  return std::shared_ptr<const RunSpec>(std::move(spec));
}

absl::Status RunSpec::AddShards(const MatrixSpec& whole, const std::vector<int64_t>& cuts) {
  if (!cuts.empty()) {
    absl::Status valid = ValidateCuts(whole.rows, whole.cols, cuts);
    valid.Update(ValidateSharding(whole.rule, whole.rows, whole.cols));
    if (!valid.ok()) {
      return absl::Status(valid.code(),
                          absl::StrCat("parameter \"", whole.name, "\": ", valid.message()));
    }
  }
  first_shard_.push_back(static_cast<int32_t>(matrices_.size()));
  places_.push_back(ShardRects(whole.rows, whole.cols, cuts));
  for (const Rect& place : places_.back()) {
    MatrixSpec shard = whole;
    shard.shard = static_cast<int32_t>(matrices_.size()) - first_shard_.back();
    shard.shards = static_cast<int32_t>(places_.back().size());
    shard.cuts = cuts;
    shard.place = place;
    shard.whole_rows = whole.rows;
    shard.whole_cols = whole.cols;
    shard.rows = place.rows();
    shard.cols = place.cols();
    matrices_.push_back(std::move(shard));
  }
  if (matrices_.size() <= kMaxShards) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("parameter \"", whole.name, "\": more than ", kMaxShards, " shards"));
}

// Factors are never cut: each has one shard.
absl::Status RunSpec::ResolvePair(int32_t parameter) {
  MatrixSpec& matrix = matrices_[first_shard_[parameter]];
  if (matrix.rule.family != RuleFamily::kPolora) return absl::OkStatus();
  const auto found = by_name_.find(matrix.rule.pair);
  if (found == by_name_.end()) {
    return absl::InvalidArgumentError(absl::StrCat("parameter \"", matrix.name,
                                                   "\": its other factor \"", matrix.rule.pair,
                                                   "\" is not a parameter of the run"));
  }
  const int32_t partner = first_shard_[found->second];
  const MatrixSpec& other = matrices_[partner];
  STIEFEL_RETURN_IF_ERROR(ValidatePair(matrix.name, matrix.rule, matrix.rows, matrix.cols,
                                       other.name, other.rule, other.rows, other.cols));
  if (other.owner != matrix.owner) {
    const auto server = [this](int32_t owner) {
      return absl::StrCat("server ", owner, " (", opened_.servers(owner), ")");
    };
    return absl::InvalidArgumentError(absl::StrCat(
        "the factors \"", matrix.name, "\" and \"", other.name, "\" are placed on ",
        server(matrix.owner), " and ", server(other.owner), "; a pair belongs on one server"));
  }
  matrix.partner = partner;
  matrix.partner_shape.emplace(other.rows, other.cols);
  return absl::OkStatus();
}

// Whole, as it was named: `matrix` is the parameter.
absl::StatusOr<BlockSpec> RunSpec::ResolveBlock(const std::string& name,
                                                const v1::Rectangle& wire) const {
  const auto found = by_name_.find(name);
  if (found == by_name_.end()) return UnknownName("parameter", name);
  BlockSpec block;
  block.matrix = found->second;
  block.rect = Rect{wire.row_begin(), wire.row_end(), wire.col_begin(), wire.col_end()};
  const MatrixSpec& any = matrices_[first_shard_[block.matrix]];
  if (absl::Status valid = ValidateRect(block.rect, any.whole_rows, any.whole_cols); !valid.ok()) {
    return absl::Status(valid.code(), absl::StrCat("block of \"", name, "\": ", valid.message()));
  }
  return block;
}

// One rank may push an element twice only under two reduce groups: otherwise a summand would hide
// in a mean. Of blocks before they are cut.
absl::Status RunSpec::CheckOverlaps(const std::vector<BlockSpec>& blocks) const {
  std::map<std::pair<int32_t, int32_t>, std::vector<Rect>> rects;
  for (const BlockSpec& block : blocks)
    rects[{block.matrix, block.reduce_group}].push_back(block.rect);
  for (const auto& [key, list] : rects) {
    const std::vector<Overlap> overlaps = Overlaps(list, 1);
    if (overlaps.empty()) continue;
    return absl::InvalidArgumentError(absl::StrCat(
        "push blocks ", list[overlaps[0].first].DebugString(), " and ",
        list[overlaps[0].second].DebugString(), " of \"", matrices_[first_shard_[key.first]].name,
        "\" share ", overlaps[0].common.DebugString(), " under one reduce group"));
  }
  return absl::OkStatus();
}

absl::StatusOr<std::vector<BlockSpec>> RunSpec::Cut(const std::vector<BlockSpec>& blocks) const {
  std::vector<BlockSpec> cut;
  for (const BlockSpec& block : blocks) {
    for (const ShardPart& part : CutAtShards(block.rect, places_[block.matrix])) {
      cut.push_back(block);
      cut.back().matrix = first_shard_[block.matrix] + part.shard;
      cut.back().rect = part.rect;
    }
    if (static_cast<int64_t>(cut.size()) <= kMaxBlocks) continue;
    return absl::InvalidArgumentError(
        absl::StrCat(blocks.size(), " blocks, cut at shards, are more than ", kMaxBlocks));
  }
  return cut;
}

absl::StatusOr<std::vector<BlockSpec>> RunSpec::ResolvePush(
    const v1::JoinRunRequest& request) const {
  if (request.push_size() > kMaxBlocks)
    return absl::InvalidArgumentError(
        absl::StrCat(request.push_size(), " push blocks are more than ", kMaxBlocks));
  std::vector<BlockSpec> blocks;
  for (const v1::PushBlock& wire : request.push()) {
    STIEFEL_ASSIGN_OR_RETURN(BlockSpec block, ResolveBlock(wire.parameter(), wire.rect()));
    if (wire.has_reduce_group()) {
      if (wire.reduce_group() < 0)
        return absl::InvalidArgumentError(absl::StrCat(
            "reduce group ", wire.reduce_group(), " of \"", wire.parameter(), "\" is negative"));
      block.reduce_group = wire.reduce_group();
    }
    if (wire.has_parts()) block.parts = wire.parts();
    if (block.parts < 1 || block.parts > kMaxParts)
      return absl::InvalidArgumentError(absl::StrCat("block of \"", wire.parameter(), "\" in ",
                                                     block.parts, " parts, not 1..", kMaxParts));
    blocks.push_back(block);
  }
  STIEFEL_RETURN_IF_ERROR(CheckOverlaps(blocks));
  return Cut(blocks);
}

absl::StatusOr<std::vector<BlockSpec>> RunSpec::ResolvePull(
    const v1::JoinRunRequest& request) const {
  if (request.pull_size() > kMaxBlocks)
    return absl::InvalidArgumentError(
        absl::StrCat(request.pull_size(), " pull blocks are more than ", kMaxBlocks));
  std::vector<BlockSpec> blocks;
  for (const v1::PullBlock& wire : request.pull()) {
    STIEFEL_ASSIGN_OR_RETURN(const BlockSpec block, ResolveBlock(wire.parameter(), wire.rect()));
    blocks.push_back(block);
  }
  return Cut(blocks);
}

absl::Status RunSpec::CheckParameters(const v1::JoinRunRequest& request) const {
  for (const v1::Parameter& theirs : request.parameters()) {
    const auto found = by_name_.find(theirs.name());
    if (found == by_name_.end()) return UnknownName("parameter", theirs.name());
    const v1::Parameter& ours = opened_.parameters(found->second);
    if (theirs.SerializeAsString() == ours.SerializeAsString()) continue;
    return absl::InvalidArgumentError(
        absl::StrCat("rank ", request.rank(), " registers \"", theirs.name(), "\" as {",
                     theirs.ShortDebugString(), "}, but the run was opened with {",
                     ours.ShortDebugString(), "}"));
  }
  return absl::OkStatus();
}

}  // namespace stiefel
