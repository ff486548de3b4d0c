#include "client/layout.h"

#include <algorithm>
#include <set>
#include <unordered_map>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/checked_math.h"
#include "common/errors.h"
#include "common/status.h"
#include "plan/shape.h"
#include "plan/shards.h"
#include "proto/protocol.h"
#include "proto/rule_convert.h"

namespace stiefel {
namespace {

constexpr int64_t kMaxShards = 4096;  // of a matrix

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
  if (options.move_bytes < 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("move_bytes = ", options.move_bytes, " is negative"));
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

int64_t Product(const std::vector<int64_t>& shape, size_t begin, size_t end) {
  int64_t product = 1;
  for (size_t d = begin; d < std::min(end, shape.size()); ++d) {
    product = SaturatingMul(product, std::max<int64_t>(shape[d], 0));
  }
  return product;
}

// How many leading dimensions count rows of the stacked view: the stack, and the rows of a matrix
// that has any.
size_t RowDimensions(const ParameterSpec& parameter) {
  const size_t stack = static_cast<size_t>(std::max(parameter.stack_dims.value_or(0), 0));
  return parameter.shape.size() >= stack + 2 ? stack + 1 : stack;
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

int64_t ParameterSpec::rows() const { return Product(shape, 0, RowDimensions(*this)); }
int64_t ParameterSpec::cols() const {
  return shape.empty() ? 0 : Product(shape, RowDimensions(*this), shape.size());
}

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

absl::Status Layout::AddParameter(const ParameterSpec& parameter) {
  if (parameter.name.empty()) return absl::InvalidArgumentError("a parameter has no name");
  STIEFEL_ASSIGN_OR_RETURN(
      const ParameterShape shape,
      ShapeOfParameter(parameter.name, parameter.shape, parameter.stack_dims, parameter.rule));
  if (parameter.shards < 0 || parameter.shards > kMaxShards) {
    return Outside(absl::StrCat("shards of \"", parameter.name, "\""), parameter.shards, 0,
                   kMaxShards);
  }
  const int32_t index = static_cast<int32_t>(by_name_.size());
  if (!by_name_.emplace(parameter.name, index).second) {
    return DuplicateName("parameter", parameter.name);
  }
  if (NeedsWeights(parameter.rule) && options_.mode != UpdateMode::kWeights) {
    return absl::InvalidArgumentError(absl::StrCat(
        "parameter \"", parameter.name, "\": ", parameter.rule.preset,
        " reads the weights, which servers hold in update mode WEIGHTS only; this run is to be in "
        "mode DELTA"));
  }
  first_matrix_.push_back(static_cast<int32_t>(matrices_.size()));
  for (const StackedMatrix& stacked : shape.matrices) {
    LayoutMatrix matrix{stacked.name,  index,        stacked.first_row,
                        stacked.rows,  stacked.cols, shape.dimensions == 1,
                        parameter.rule};
    // Factors in stacks are paired one by one.
    if (parameter.rule.family == RuleFamily::kPolora) {
      matrix.rule.pair += stacked.name.substr(parameter.name.size());
    }
    if (parameter.shards > 1) {
      const absl::Status may = ValidateSharding(matrix.rule, matrix.rows, matrix.cols);
      if (!may.ok()) {
        return absl::Status(may.code(),
                            absl::StrCat("parameter \"", parameter.name, "\": ", may.message()));
      }
    }
    matrices_.push_back(std::move(matrix));
  }
  return absl::OkStatus();
}

// What concerns several matrices: their names, and polora's pairs.
absl::Status Layout::CheckMatrices() const {
  std::unordered_map<std::string, const LayoutMatrix*> by_name;
  for (const LayoutMatrix& matrix : matrices_) {
    if (!by_name.emplace(matrix.name, &matrix).second) return DuplicateName("matrix", matrix.name);
  }
  for (const LayoutMatrix& matrix : matrices_) {
    if (matrix.rule.family != RuleFamily::kPolora) continue;
    const auto other = by_name.find(matrix.rule.pair);
    if (other == by_name.end()) {
      return absl::InvalidArgumentError(absl::StrCat("parameter \"", matrix.name,
                                                     "\": its other factor \"", matrix.rule.pair,
                                                     "\" is not registered"));
    }
    STIEFEL_RETURN_IF_ERROR(ValidatePair(matrix.name, matrix.rule, matrix.rows, matrix.cols,
                                         other->first, other->second->rule, other->second->rows,
                                         other->second->cols));
  }
  return absl::OkStatus();
}

absl::Status Layout::ResolveBlock(const std::string& name, const Rect& rect,
                                  LayoutBlock* block) const {
  STIEFEL_ASSIGN_OR_RETURN(block->parameter, ParameterOf(name));
  block->rect = rect;
  const ParameterSpec& parameter = parameters_[block->parameter];
  const absl::Status valid = ValidateRect(rect, parameter.rows(), parameter.cols());
  if (valid.ok()) return valid;
  return absl::Status(valid.code(), absl::StrCat("block of \"", name, "\": ", valid.message()));
}

std::vector<Layout::MatrixBlock> Layout::InMatrices(int32_t parameter, const Rect& rect) const {
  std::vector<MatrixBlock> blocks;
  const int32_t first = first_matrix_[parameter];
  const int64_t rows = matrices_[first].rows;  // of each matrix of the stack
  for (int64_t row = rect.row_begin; row < rect.row_end;) {
    MatrixBlock block;
    block.matrix = first + static_cast<int32_t>(row / rows);
    const int64_t matrix_row = matrices_[block.matrix].first_row;
    const int64_t end = std::min(rect.row_end, matrix_row + rows);
    block.rect = {row - matrix_row, end - matrix_row, rect.col_begin, rect.col_end};
    block.first_row = row - rect.row_begin;
    blocks.push_back(block);
    row = end;
  }
  return blocks;
}

std::vector<WireBlock> Layout::Cut(int32_t parameter, const Rect& rect) const {
  std::vector<WireBlock> wires;
  int64_t elements = 0;
  for (const MatrixBlock& block : InMatrices(parameter, rect)) {
    const std::vector<Rect>& places = places_[block.matrix];
    for (const ShardPart& part : CutAtShards(block.rect, places)) {
      WireBlock wire;
      wire.shard = first_shard_[block.matrix] + part.shard;
      wire.rect = part.rect;
      const Rect in_matrix = InMatrix(places[part.shard], part.rect);
      const int64_t up = block.first_row - block.rect.row_begin;
      wire.in_block = {in_matrix.row_begin + up, in_matrix.row_end + up,
                       in_matrix.col_begin - rect.col_begin, in_matrix.col_end - rect.col_begin};
      wire.first = elements;
      elements += wire.elements();
      wires.push_back(wire);
    }
  }
  return wires;
}

void Layout::CutMatrices(const std::vector<std::vector<int64_t>>& cuts) {
  shards_.clear();
  first_shard_.clear();
  places_.clear();
  for (int32_t m = 0; m < static_cast<int32_t>(matrices_.size()); ++m) {
    first_shard_.push_back(static_cast<int32_t>(shards_.size()));
    places_.push_back(ShardRects(matrices_[m].rows, matrices_[m].cols, cuts[m]));
    for (const Rect& place : places_.back()) shards_.push_back({m, place});
  }
  CutBlocks(&push_, &wire_push_);
  CutBlocks(&pull_, &wire_pull_);
}

void Layout::CutBlocks(std::vector<LayoutBlock>* blocks, std::vector<WireBlock>* wires) const {
  wires->clear();
  for (int32_t index = 0; index < static_cast<int32_t>(blocks->size()); ++index) {
    LayoutBlock& block = (*blocks)[index];
    block.first_wire = static_cast<int32_t>(wires->size());
    block.scattered = false;
    for (WireBlock& wire : Cut(block.parameter, block.rect)) {
      wire.block = index;
      wire.parts = block.parts;
      wire.dtype = block.dtype;
      block.scattered |= wire.rect.cols() != block.rect.cols() && block.rect.rows() > 1;
      wires->push_back(wire);
    }
    block.wires = static_cast<int32_t>(wires->size()) - block.first_wire;
  }
}

absl::Status Layout::SetCuts(const google::protobuf::RepeatedPtrField<v1::Cuts>& cuts) {
  std::vector<std::vector<int64_t>> at(matrices_.size());
  int32_t last = -1;
  for (const v1::Cuts& wire : cuts) {
    if (wire.parameter() <= last || wire.parameter() >= static_cast<int32_t>(at.size())) {
      return absl::InvalidArgumentError(absl::StrCat("cuts of matrix ", wire.parameter(),
                                                     " after those of ", last, " of ", at.size()));
    }
    last = wire.parameter();
    at[last].assign(wire.at().begin(), wire.at().end());
    const LayoutMatrix& matrix = matrices_[last];
    if (const absl::Status valid = ValidateCuts(matrix.rows, matrix.cols, at[last]); !valid.ok()) {
      return absl::Status(valid.code(), absl::StrCat("\"", matrix.name, "\": ", valid.message()));
    }
  }
  CutMatrices(at);
  return absl::OkStatus();
}

absl::StatusOr<Layout> Layout::Create(const TrainerOptions& options,
                                      const std::vector<ParameterSpec>& parameters) {
  STIEFEL_RETURN_IF_ERROR(CheckOptions(options));
  if (parameters.empty()) return absl::InvalidArgumentError("no parameters are registered");
  Layout layout;
  layout.options_ = options;
  layout.parameters_ = parameters;
  for (const ParameterSpec& parameter : parameters) {
    STIEFEL_RETURN_IF_ERROR(layout.AddParameter(parameter));
  }
  STIEFEL_RETURN_IF_ERROR(layout.CheckMatrices());
  if (options.whole_if_empty && options.push.empty())
    layout.options_.push = WholePushBlocks(parameters);
  if (options.whole_if_empty && options.pull.empty())
    layout.options_.pull = WholePullBlocks(parameters);
  for (const PushBlock& wanted : layout.options_.push) {
    LayoutBlock block;
    STIEFEL_RETURN_IF_ERROR(layout.ResolveBlock(wanted.parameter, wanted.rect, &block));
    if (wanted.parts < 1) return Outside("parts of a push block", wanted.parts, 1, 4096);
    block.parts = wanted.parts;
    block.dtype = parameters[block.parameter].push_dtype;
    layout.push_.push_back(block);
  }
  for (const PullBlock& wanted : layout.options_.pull) {
    LayoutBlock block;
    STIEFEL_RETURN_IF_ERROR(layout.ResolveBlock(wanted.parameter, wanted.rect, &block));
    block.dtype = PullType(parameters[block.parameter]);
    layout.pull_.push_back(block);
  }
  layout.CutMatrices(std::vector<std::vector<int64_t>>(layout.matrices_.size()));
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

std::string Layout::Describe(const WireBlock& block) const {
  const LayoutShard& shard = shards_[block.shard];
  return absl::StrCat("\"", matrices_[shard.matrix].name, "\" ",
                      InMatrix(shard.place, block.rect).DebugString());
}

v1::Parameter Layout::MatrixToProto(const LayoutMatrix& matrix) const {
  const ParameterSpec& parameter = parameters_[matrix.parameter];
  v1::Parameter wire;
  wire.set_name(matrix.name);
  if (!matrix.vector) wire.add_shape(matrix.rows);
  wire.add_shape(matrix.cols);
  *wire.mutable_rule() = RuleToProto(matrix.rule);
  wire.set_group(parameter.group);
  wire.set_push_dtype(ToProto(parameter.push_dtype));
  wire.set_pull_dtype(ToProto(PullType(parameter)));
  wire.set_reduce(parameter.reduce == Reduce::kSum ? v1::SUM : v1::MEAN);
  return wire;
}

v1::JoinRunRequest Layout::JoinRequest() const {
  v1::JoinRunRequest request;
  request.set_name(options_.run);
  request.set_rank(options_.rank);
  request.set_world_size(options_.world_size);
  if (options_.applied_step) request.set_applied_step(*options_.applied_step);
  for (size_t b = 0; b < push_.size(); ++b) {
    const PushBlock& wanted = options_.push[b];
    for (const MatrixBlock& block : InMatrices(push_[b].parameter, push_[b].rect)) {
      v1::PushBlock* wire = request.add_push();
      wire->set_parameter(matrices_[block.matrix].name);
      *wire->mutable_rect() = ToProto(block.rect);
      if (wanted.reduce_group) wire->set_reduce_group(*wanted.reduce_group);
      if (wanted.parts != 1) wire->set_parts(wanted.parts);
    }
  }
  for (const LayoutBlock& wanted : pull_) {
    for (const MatrixBlock& block : InMatrices(wanted.parameter, wanted.rect)) {
      v1::PullBlock* wire = request.add_pull();
      wire->set_parameter(matrices_[block.matrix].name);
      *wire->mutable_rect() = ToProto(block.rect);
    }
  }
  for (const LayoutMatrix& matrix : matrices_) *request.add_parameters() = MatrixToProto(matrix);
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
  for (const LayoutMatrix& matrix : matrices_) *request.add_parameters() = MatrixToProto(matrix);
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
