#include "client/layout.h"

#include <set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/errors.h"
#include "common/status.h"
#include "proto/protocol.h"
#include "proto/rule_convert.h"

namespace stiefel {
namespace {

v1::DataType ToProto(DType dtype) {
  switch (dtype) {
    case DType::kBf16:
      return v1::BF16;
    case DType::kFp16:
      return v1::FP16;
    case DType::kFp32:
      break;
  }
  return v1::FP32;
}

v1::Rectangle ToProto(const Rect& rect) {
  v1::Rectangle wire;
  wire.set_row_begin(rect.row_begin);
  wire.set_row_end(rect.row_end);
  wire.set_col_begin(rect.col_begin);
  wire.set_col_end(rect.col_end);
  return wire;
}

DType PullType(const ParameterSpec& parameter) {
  return parameter.pull_dtype.value_or(parameter.push_dtype);
}

v1::Parameter ToProto(const ParameterSpec& parameter) {
  v1::Parameter wire;
  wire.set_name(parameter.name);
  for (const int64_t size : parameter.shape) wire.add_shape(size);
  *wire.mutable_rule() = RuleToProto(parameter.rule);
  wire.set_group(parameter.group);
  wire.set_push_dtype(ToProto(parameter.push_dtype));
  wire.set_pull_dtype(ToProto(PullType(parameter)));
  wire.set_reduce(parameter.reduce == Reduce::kSum ? v1::SUM : v1::MEAN);
  return wire;
}

absl::Status Outside(const std::string& what, int64_t value, int64_t low, int64_t high) {
  return absl::InvalidArgumentError(
      absl::StrCat(what, " = ", value, " is not within [", low, ", ", high, "]"));
}

absl::Status CheckDuration(const std::string& what, absl::Duration duration) {
  if (duration > absl::ZeroDuration() && duration <= absl::Seconds(10000000)) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(
      absl::StrCat(what, " = ", absl::FormatDuration(duration), " is not within (0, 1e7] seconds"));
}

absl::Status CheckOptions(const TrainerOptions& options) {
  if (options.servers.empty()) return absl::InvalidArgumentError("no servers are named");
  std::set<std::string> seen;
  for (const std::string& server : options.servers) {
    if (server.empty()) return absl::InvalidArgumentError("a server has an empty address");
    if (!seen.insert(server).second) return DuplicateName("server", server);
  }
  if (options.run.empty()) return absl::InvalidArgumentError("the run has no name");
  if (options.world_size < 1) return Outside("world_size", options.world_size, 1, 1 << 16);
  if (options.rank < 0 || options.rank >= options.world_size) {
    return IndexOutOfRange("rank", options.rank, options.world_size);
  }
  if (options.data_streams < 1 || options.data_streams > 64) {
    return Outside("data_streams", options.data_streams, 1, 64);
  }
  if (options.chunk_bytes < 4096 || options.chunk_bytes > kMaxChunkPayloadBytes) {
    return Outside("chunk_bytes", options.chunk_bytes, 4096, kMaxChunkPayloadBytes);
  }
  if (options.applied_step.has_value() && *options.applied_step < 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("applied_step = ", *options.applied_step, " is negative"));
  }
  if (!options.applied_step.has_value() && options.mode == UpdateMode::kDelta) {
    return absl::InvalidArgumentError(
        "applied_step is unset (no weights), but in DELTA mode servers hold no weights to give");
  }
  STIEFEL_RETURN_IF_ERROR(CheckDuration("connect_timeout", options.connect_timeout));
  STIEFEL_RETURN_IF_ERROR(CheckDuration("join_timeout", options.join_timeout));
  STIEFEL_RETURN_IF_ERROR(CheckDuration("step_timeout", options.step_timeout));
  STIEFEL_RETURN_IF_ERROR(CheckDuration("lease", options.lease));
  return CheckDuration("takeover_timeout", options.takeover_timeout);
}

absl::Status CheckParameter(const ParameterSpec& parameter) {
  const std::string what = absl::StrCat("parameter \"", parameter.name, "\"");
  if (parameter.name.empty()) return absl::InvalidArgumentError("a parameter has no name");
  const size_t dims = parameter.shape.size();
  if (dims != 1 && dims != 2) {
    return absl::InvalidArgumentError(absl::StrCat(what, " has ", dims, " dimensions, not 1 or 2"));
  }
  const absl::Status valid =
      ValidateRule(parameter.rule, parameter.rows(), parameter.cols(), static_cast<int>(dims));
  if (valid.ok()) return valid;
  return absl::Status(valid.code(), absl::StrCat(what, ": ", valid.message()));
}

template <typename Block>
std::vector<Block> WholeBlocks(const std::vector<ParameterSpec>& parameters) {
  std::vector<Block> blocks;
  for (const ParameterSpec& parameter : parameters) {
    Block block;
    block.parameter = parameter.name;
    block.rect = WholeRect(parameter.rows(), parameter.cols());
    blocks.push_back(std::move(block));
  }
  return blocks;
}

template <typename Block>
std::vector<Block> RowBlocks(const std::vector<ParameterSpec>& parameters, int32_t rank,
                             int32_t world_size) {
  std::vector<Block> blocks;
  for (Block& block : WholeBlocks<Block>(parameters)) {
    Rect& rect = block.rect;
    const bool flat = rect.rows() == 1;
    const int64_t size = flat ? rect.cols() : rect.rows();
    // Without overflow: size = q world_size + r.
    const auto cut = [size, world_size](int64_t k) {
      return k * (size / world_size) + k * (size % world_size) / world_size;
    };
    (flat ? rect.col_begin : rect.row_begin) = cut(rank);
    (flat ? rect.col_end : rect.row_end) = cut(rank + 1);
    if (!rect.empty()) blocks.push_back(std::move(block));
  }
  return blocks;
}

}  // namespace

std::vector<PushBlock> WholePushBlocks(const std::vector<ParameterSpec>& parameters) {
  return WholeBlocks<PushBlock>(parameters);
}
std::vector<PullBlock> WholePullBlocks(const std::vector<ParameterSpec>& parameters) {
  return WholeBlocks<PullBlock>(parameters);
}
std::vector<PushBlock> RowPushBlocks(const std::vector<ParameterSpec>& parameters, int32_t rank,
                                     int32_t world_size) {
  return RowBlocks<PushBlock>(parameters, rank, world_size);
}
std::vector<PullBlock> RowPullBlocks(const std::vector<ParameterSpec>& parameters, int32_t rank,
                                     int32_t world_size) {
  return RowBlocks<PullBlock>(parameters, rank, world_size);
}

absl::StatusOr<Layout> Layout::Create(const TrainerOptions& options,
                                      const std::vector<ParameterSpec>& parameters) {
  STIEFEL_RETURN_IF_ERROR(CheckOptions(options));
  if (parameters.empty()) return absl::InvalidArgumentError("no parameters are registered");
  Layout layout;
  layout.options_ = options;
  layout.parameters_ = parameters;
  for (const ParameterSpec& parameter : parameters) {
    STIEFEL_RETURN_IF_ERROR(CheckParameter(parameter));
    const int32_t index = static_cast<int32_t>(layout.by_name_.size());
    if (!layout.by_name_.emplace(parameter.name, index).second) {
      return DuplicateName("parameter", parameter.name);
    }
  }
  if (options.push.empty()) layout.options_.push = WholePushBlocks(parameters);
  if (options.pull.empty()) layout.options_.pull = WholePullBlocks(parameters);
  const auto resolve = [&layout](const std::string& name, const Rect& rect,
                                 LayoutBlock* block) -> absl::Status {
    STIEFEL_ASSIGN_OR_RETURN(block->parameter, layout.ParameterOf(name));
    block->rect = rect;
    const ParameterSpec& parameter = layout.parameters_[block->parameter];
    const absl::Status valid = ValidateRect(rect, parameter.rows(), parameter.cols());
    if (valid.ok()) return valid;
    return absl::Status(valid.code(), absl::StrCat("block of \"", name, "\": ", valid.message()));
  };
  for (const PushBlock& wanted : layout.options_.push) {
    LayoutBlock block;
    STIEFEL_RETURN_IF_ERROR(resolve(wanted.parameter, wanted.rect, &block));
    if (wanted.parts < 1) return Outside("parts of a push block", wanted.parts, 1, 4096);
    block.parts = wanted.parts;
    block.dtype = parameters[block.parameter].push_dtype;
    layout.push_.push_back(block);
  }
  for (const PullBlock& wanted : layout.options_.pull) {
    LayoutBlock block;
    STIEFEL_RETURN_IF_ERROR(resolve(wanted.parameter, wanted.rect, &block));
    block.dtype = PullType(parameters[block.parameter]);
    layout.pull_.push_back(block);
  }
  return layout;
}

absl::StatusOr<int32_t> Layout::ParameterOf(std::string_view name) const {
  const auto found = by_name_.find(name);
  if (found == by_name_.end()) {
    return UnknownName("parameter", absl::string_view(name.data(), name.size()));
  }
  return found->second;
}

namespace {

absl::StatusOr<int32_t> OneBlock(const std::vector<LayoutBlock>& blocks, int32_t parameter,
                                 const std::string& what) {
  std::vector<int32_t> found;
  for (int32_t b = 0; b < static_cast<int32_t>(blocks.size()); ++b) {
    if (blocks[b].parameter == parameter) found.push_back(b);
  }
  if (found.size() == 1) return found[0];
  return absl::InvalidArgumentError(
      absl::StrCat(what, " has ", found.size(), " blocks of this rank; name one by its index"));
}

}  // namespace

absl::StatusOr<int32_t> Layout::PushBlockOf(std::string_view parameter) const {
  STIEFEL_ASSIGN_OR_RETURN(const int32_t index, ParameterOf(parameter));
  return OneBlock(push_, index, absl::StrCat("push of \"", parameters_[index].name, "\""));
}

absl::StatusOr<int32_t> Layout::PullBlockOf(std::string_view parameter) const {
  STIEFEL_ASSIGN_OR_RETURN(const int32_t index, ParameterOf(parameter));
  return OneBlock(pull_, index, absl::StrCat("pull of \"", parameters_[index].name, "\""));
}

std::string Layout::Describe(const LayoutBlock& block) const {
  return absl::StrCat("\"", parameters_[block.parameter].name, "\" ", block.rect.DebugString());
}

v1::JoinRunRequest Layout::JoinRequest() const {
  v1::JoinRunRequest request;
  request.set_name(options_.run);
  request.set_rank(options_.rank);
  request.set_world_size(options_.world_size);
  if (options_.applied_step) request.set_applied_step(*options_.applied_step);
  for (const PushBlock& block : options_.push) {
    v1::PushBlock* wire = request.add_push();
    wire->set_parameter(block.parameter);
    *wire->mutable_rect() = ToProto(block.rect);
    if (block.reduce_group) wire->set_reduce_group(*block.reduce_group);
    if (block.parts != 1) wire->set_parts(block.parts);
  }
  for (const PullBlock& block : options_.pull) {
    v1::PullBlock* wire = request.add_pull();
    wire->set_parameter(block.parameter);
    *wire->mutable_rect() = ToProto(block.rect);
  }
  for (const ParameterSpec& parameter : parameters_) {
    *request.add_parameters() = ToProto(parameter);
  }
  request.set_software_version(kSoftwareVersion);
  request.set_protocol_version(kProtocolVersion);
  return request;
}

v1::OpenRunRequest Layout::OpenRequest() const {
  v1::OpenRunRequest request;
  request.set_name(options_.run);
  request.set_world_size(options_.world_size);
  request.set_start_step(options_.applied_step.value_or(0) + 1);
  request.set_update_mode(options_.mode == UpdateMode::kWeights ? v1::WEIGHTS : v1::DELTA);
  for (const ParameterSpec& parameter : parameters_) {
    *request.add_parameters() = ToProto(parameter);
  }
  for (const std::string& server : options_.servers) request.add_servers(server);
  request.set_placement_epoch(1);
  request.set_software_version(kSoftwareVersion);
  request.set_protocol_version(kProtocolVersion);
  request.set_step_timeout_seconds(absl::ToDoubleSeconds(options_.step_timeout));
  request.set_lease_seconds(absl::ToDoubleSeconds(options_.lease));
  request.set_takeover_timeout_seconds(absl::ToDoubleSeconds(options_.takeover_timeout));
  return request;
}

}  // namespace stiefel
