#include "client/topology.h"

#include <algorithm>
#include <map>
#include <set>

#include "absl/strings/str_cat.h"
#include "client/axis_cut.h"
#include "common/checked_math.h"
#include "common/errors.h"
#include "common/status.h"
#include "plan/shape.h"

namespace stiefel {
namespace {

constexpr int64_t kMaxRanks = 1 << 20;

// ---------------------------------------------------------------- one parameter on one rank

// What the rank holds and does with it.
struct Holding {
  bool holds = true;
  Intervals matrices, rows, cols;  // matrices of the stack; rows and columns of each
  int64_t copy = 0, copies = 1;    // among ranks with equal gradients
  int64_t group = 0;               // among ranks that are not summed with each other
  bool partial = false;
  bool pulls = true;
  int64_t puller = 0;
};

struct Geometry {
  int64_t matrices = 1;        // of the stack
  int64_t last_stack = 0;      // length of the last stack axis; 0: no stack
  int64_t rows = 0, cols = 0;  // of each matrix
  int64_t col_unit = 1;        // columns that belong to one input
  bool vector = false;         // its rows (outputs) are the columns of the view
};

absl::StatusOr<Geometry> GeometryOf(const ParameterSpec& parameter) {
  STIEFEL_ASSIGN_OR_RETURN(
      const ParameterShape shape,
      ShapeOfParameter(parameter.name, parameter.shape, parameter.stack_dims, parameter.rule));
  Geometry geometry;
  const size_t stack = static_cast<size_t>(parameter.stack_dims.value_or(0));
  geometry.matrices = static_cast<int64_t>(shape.matrices.size());
  if (stack > 0) geometry.last_stack = parameter.shape[stack - 1];
  geometry.rows = shape.matrices[0].rows;
  geometry.cols = shape.matrices[0].cols;
  geometry.vector = shape.dimensions == 1;
  for (size_t axis = stack + 2; axis < parameter.shape.size(); ++axis) {
    geometry.col_unit *= parameter.shape[axis];
  }
  return geometry;
}

absl::StatusOr<Axis> AxisOf(Spread::Kind kind, const Cut& cut, const Geometry& geometry,
                            Holding* holding) {
  if (!cut.splits.empty() && kind != Spread::Kind::kShardRows) {
    return absl::InvalidArgumentError("splits are of rows: use ShardRows");
  }
  switch (kind) {
    case Spread::Kind::kShardCols:
      if (geometry.vector) {
        return absl::InvalidArgumentError(
            "a 1-D parameter has no columns to cut: use Replicate, or ShardRows for its elements");
      }
      return Axis{&holding->cols, geometry.cols, geometry.col_unit, 0,
                  geometry.col_unit > 1 ? "input channels" : "columns"};
    case Spread::Kind::kShardExperts:
      if (geometry.last_stack == 0) {
        return absl::InvalidArgumentError("there are no experts to cut: stack_dims is not given");
      }
      return Axis{&holding->matrices, geometry.matrices, 1, geometry.last_stack, "experts"};
    default:
      break;
  }
  if (geometry.vector) return Axis{&holding->cols, geometry.cols, 1, 0, "elements"};
  return Axis{&holding->rows, geometry.rows, 1, 0, "rows"};
}

// The coordinates that hold the parameter.
absl::StatusOr<std::vector<int64_t>> HoldersOf(const Spread& spread, int64_t size) {
  std::vector<int64_t> holders;
  if (!spread.coordinates) {
    for (int64_t c = 0; c < size; ++c) holders.push_back(c);
    return holders;
  }
  for (const int64_t c : *spread.coordinates) {
    if (c < 0 || c >= size) return IndexOutOfRange("coordinate", c, size);
    if (std::count(holders.begin(), holders.end(), c) > 0) {
      return absl::InvalidArgumentError(absl::StrCat("coordinate ", c, " is given twice"));
    }
    holders.push_back(c);
  }
  if (holders.empty()) return absl::InvalidArgumentError("no coordinate holds the parameter");
  return holders;
}

// `stride`: by how much the rank changes from one coordinate to the next.
absl::Status SpreadOver(const Spread& spread, int64_t size, int64_t coordinate, int64_t stride,
                        const Geometry& geometry, Holding* holding) {
  STIEFEL_ASSIGN_OR_RETURN(const std::vector<int64_t> holders, HoldersOf(spread, size));
  const auto count = static_cast<int64_t>(holders.size());
  const auto found = std::find(holders.begin(), holders.end(), coordinate);
  // A rank that holds nothing checks its cuts as the first holder.
  const int64_t k = found == holders.end() ? 0 : found - holders.begin();
  holding->holds = holding->holds && found != holders.end();
  if (spread.kind != Spread::Kind::kReplicate) {
    STIEFEL_ASSIGN_OR_RETURN(const Axis axis, AxisOf(spread.kind, spread.cut, geometry, holding));
    holding->group = holding->group * count + k;
    return CutAxis(axis, spread.cut, k, count);
  }
  if (spread.pull == Pull::kFirst) {
    holding->pulls = holding->pulls && k == 0;
    holding->puller += (holders[0] - coordinate) * stride;
  }
  if (spread.gradients == Gradients::kPartial) {
    holding->partial = holding->partial || count > 1;
    return absl::OkStatus();
  }
  // Only summands of one gradient share a group, so that only their weights must be equal.
  holding->group = holding->group * count + k;
  if (spread.gradients == Gradients::kEqual) {
    holding->copy = holding->copy * count + k;
    holding->copies *= count;
  }
  return absl::OkStatus();
}

// The blocks of what is held, within a window of rows and columns of the local tensor.
std::vector<std::pair<Rect, LocalBlock>> CutBlocks(const Holding& holding, const Geometry& geometry,
                                                   const Interval& row_window,
                                                   const Interval& col_window) {
  std::vector<std::pair<Rect, LocalBlock>> blocks;
  const int64_t rows = Length(holding.rows), cols = Length(holding.cols);
  int64_t first = 0;  // local row of the matrix
  for (const Interval& run : holding.matrices) {
    for (int64_t matrix = run.begin; matrix < run.end; ++matrix, first += rows) {
      const Interval inside = {row_window.begin - first, row_window.end - first};
      ForEachWithin(holding.rows, inside, [&](const Interval& row, int64_t row_at) {
        ForEachWithin(holding.cols, col_window, [&](const Interval& col, int64_t col_at) {
          const int64_t above = matrix * geometry.rows;
          LocalBlock at;
          at.rows = row.size();
          at.cols = col.size();
          at.offset = (first + row_at) * cols + col_at;
          at.row_stride = cols;
          blocks.emplace_back(Rect{above + row.begin, above + row.end, col.begin, col.end}, at);
        });
      });
    }
  }
  return blocks;
}

void AddBlocks(const ParameterSpec& parameter, int32_t index, int32_t parts,
               const Geometry& geometry, const Holding& holding, BlocksOfOneRank* result) {
  const Interval rows = {0, Length(holding.matrices) * Length(holding.rows)};
  const Interval cols = {0, Length(holding.cols)};
  // Equal gradients are dealt: rows, or columns where there are too few.
  const bool by_rows = rows.end >= holding.copies;
  const Interval part = Balanced((by_rows ? rows : cols).end, holding.copy, holding.copies);
  for (auto& [rect, at] :
       CutBlocks(holding, geometry, by_rows ? part : rows, by_rows ? cols : part)) {
    PushBlock block{parameter.name, rect, {}, parts};
    if (holding.partial) block.reduce_group = static_cast<int32_t>(holding.group);
    at.parameter = index;
    result->push.push_back(std::move(block));
    result->push_at.push_back(at);
  }
  if (!holding.pulls) return;
  for (auto& [rect, at] : CutBlocks(holding, geometry, rows, cols)) {
    at.parameter = index;
    result->pull.push_back({parameter.name, rect});
    result->pull_at.push_back(at);
  }
}

// ---------------------------------------------------------------- the mesh

// INVALID_ARGUMENT: no mesh. The number of ranks.
absl::StatusOr<int32_t> CheckMesh(const Mesh& mesh) {
  int64_t ranks = 1;
  std::set<std::string> names;
  for (const MeshDim& dim : mesh) {
    if (dim.name.empty()) return absl::InvalidArgumentError("a mesh dimension has no name");
    if (!names.insert(dim.name).second) return DuplicateName("mesh dimension", dim.name);
    if (dim.size < 1) {
      return absl::InvalidArgumentError(
          absl::StrCat("mesh dimension \"", dim.name, "\" has size ", dim.size));
    }
    ranks = SaturatingMul(ranks, dim.size);
  }
  if (ranks > kMaxRanks) {
    return absl::InvalidArgumentError(
        absl::StrCat("the mesh has ", ranks, " ranks; at most ", kMaxRanks));
  }
  return static_cast<int32_t>(ranks);
}

absl::Status CheckNames(const Mesh& mesh, const ParameterSpread& spread) {
  std::set<std::string> named;
  for (const DimSpread& over : spread.dims) {
    if (!named.insert(over.dim).second) return DuplicateName("mesh dimension", over.dim);
  }
  for (const MeshDim& dim : mesh) {
    if (named.erase(dim.name) > 0) continue;
    return absl::InvalidArgumentError(
        absl::StrCat("not said how it is spread over \"", dim.name, "\" (size ", dim.size, ")"));
  }
  if (!named.empty()) return UnknownName("mesh dimension", *named.begin());
  if (spread.parts < 1) {
    return absl::InvalidArgumentError(absl::StrCat("parts = ", spread.parts, " is below 1"));
  }
  return absl::OkStatus();
}

absl::Status AddParameter(const Mesh& mesh, const ParameterSpec& parameter, int32_t index,
                          const ParameterSpread& spread, BlocksOfOneRank* result) {
  STIEFEL_ASSIGN_OR_RETURN(const Geometry geometry, GeometryOf(parameter));
  const auto explain = [&parameter](const absl::Status& why, const std::string& where) {
    return absl::Status(
        why.code(), absl::StrCat("parameter \"", parameter.name, "\"", where, ": ", why.message()));
  };
  if (const absl::Status named = CheckNames(mesh, spread); !named.ok()) return explain(named, "");
  Holding holding;
  holding.matrices = {{0, geometry.matrices}};
  holding.rows = {{0, geometry.rows}};
  holding.cols = {{0, geometry.cols}};
  holding.puller = result->rank;
  for (const DimSpread& over : spread.dims) {
    int64_t stride = 1, size = 0;
    for (auto dim = mesh.rbegin(); size == 0; ++dim) {
      if (dim->name == over.dim)
        size = dim->size;
      else
        stride *= dim->size;
    }
    const int64_t coordinate = result->rank / stride % size;
    const absl::Status applied =
        SpreadOver(over.spread, size, coordinate, stride, geometry, &holding);
    if (!applied.ok())
      return explain(applied, absl::StrCat(" over \"", over.dim, "\" (size ", size, ")"));
  }
  Held& held = result->held[index];
  held.puller = result->rank;
  if (!holding.holds) return absl::OkStatus();
  held.rows = Length(holding.matrices) * Length(holding.rows);
  held.cols = Length(holding.cols);
  if (held.rows == 0 || held.cols == 0) {
    held.rows = held.cols = 0;
    return absl::OkStatus();
  }
  held.puller = static_cast<int32_t>(holding.puller);
  AddBlocks(parameter, index, spread.parts, geometry, holding, result);
  return absl::OkStatus();
}

// ---------------------------------------------------------------- coverage

struct Covered {
  Rect whole;
  std::vector<Rect> rects;
};

absl::Status CoverByRank(const std::vector<PushBlock>& push,
                         std::map<std::string, Covered>* covered) {
  std::map<std::pair<std::string, int32_t>, std::vector<Rect>> groups;
  for (const PushBlock& block : push) {
    const auto found = covered->find(block.parameter);
    if (found == covered->end()) return UnknownName("parameter", block.parameter);
    const Rect& whole = found->second.whole;
    const absl::Status valid = ValidateRect(block.rect, whole.rows(), whole.cols());
    if (!valid.ok()) {
      return absl::Status(valid.code(),
                          absl::StrCat("block of \"", block.parameter, "\": ", valid.message()));
    }
    found->second.rects.push_back(block.rect);
    groups[{block.parameter, block.reduce_group.value_or(-1)}].push_back(block.rect);
  }
  for (const auto& [key, rects] : groups) {
    const std::vector<Overlap> overlaps = Overlaps(rects, 1);
    if (overlaps.empty()) continue;
    return absl::InvalidArgumentError(
        absl::StrCat("blocks ", rects[overlaps[0].first].DebugString(), " and ",
                     rects[overlaps[0].second].DebugString(), " of \"", key.first, "\" share ",
                     overlaps[0].common.DebugString(), " under one reduce group"));
  }
  return absl::OkStatus();
}

}  // namespace

Spread Replicate(Gradients gradients, Pull pull) {
  Spread spread;
  spread.gradients = gradients;
  spread.pull = pull;
  return spread;
}
Spread ShardRows(Cut cut) { return {Spread::Kind::kShardRows, std::move(cut)}; }
Spread ShardCols(Cut cut) { return {Spread::Kind::kShardCols, std::move(cut)}; }
Spread ShardExperts(Cut cut) { return {Spread::Kind::kShardExperts, std::move(cut)}; }
Spread Stage(int64_t coordinate) { return Stages({coordinate}, Replicate(Gradients::kEqual)); }
Spread Stages(std::vector<int64_t> coordinates, Spread spread) {
  spread.coordinates = std::move(coordinates);
  return spread;
}
ParameterSpread Hsdp(const std::string& replicate, const std::string& shard, Pull pull) {
  return {{shard, ShardRows()}, {replicate, Replicate(Gradients::kEqual, pull)}};
}

TensorView LocalBlock::View(const void* tensor, ElementType type) const {
  const char* first = static_cast<const char*>(tensor) + offset * ElementTypeSize(type);
  return {first, type, {rows, cols}, {row_stride, 1}};
}
MutableTensorView LocalBlock::MutableView(void* tensor, ElementType type) const {
  char* first = static_cast<char*>(tensor) + offset * ElementTypeSize(type);
  return {first, type, {rows, cols}, {row_stride, 1}};
}

void BlocksOfOneRank::SetIn(TrainerOptions* options) const {
  options->rank = rank;
  options->world_size = world_size;
  options->push = push;
  options->pull = pull;
  options->whole_if_empty = false;
}

absl::StatusOr<BlocksOfOneRank> BlocksOfRank(const Mesh& mesh,
                                             const std::vector<ParameterSpec>& parameters,
                                             const std::vector<ParameterSpread>& spreads,
                                             int32_t rank) {
  BlocksOfOneRank result;
  STIEFEL_ASSIGN_OR_RETURN(result.world_size, CheckMesh(mesh));
  if (rank < 0 || rank >= result.world_size) {
    return IndexOutOfRange("rank", rank, result.world_size);
  }
  if (spreads.size() != parameters.size()) {
    return absl::InvalidArgumentError(
        absl::StrCat(spreads.size(), " spreads for ", parameters.size(), " parameters"));
  }
  result.rank = rank;
  result.held.resize(parameters.size());
  for (size_t p = 0; p < parameters.size(); ++p) {
    STIEFEL_RETURN_IF_ERROR(
        AddParameter(mesh, parameters[p], static_cast<int32_t>(p), spreads[p], &result));
  }
  return result;
}

absl::StatusOr<std::vector<BlocksOfOneRank>> BlocksOfMesh(
    const Mesh& mesh, const std::vector<ParameterSpec>& parameters,
    const std::vector<ParameterSpread>& spreads) {
  STIEFEL_ASSIGN_OR_RETURN(const int32_t ranks, CheckMesh(mesh));
  std::vector<BlocksOfOneRank> all;
  std::vector<std::vector<PushBlock>> push;
  for (int32_t rank = 0; rank < ranks; ++rank) {
    auto blocks = BlocksOfRank(mesh, parameters, spreads, rank);
    if (!blocks.ok()) {
      return absl::Status(blocks.status().code(),
                          absl::StrCat("rank ", rank, ": ", blocks.status().message()));
    }
    push.push_back(blocks->push);
    all.push_back(*std::move(blocks));
  }
  STIEFEL_RETURN_IF_ERROR(CheckCoverage(parameters, push));
  return all;
}

absl::Status CheckCoverage(const std::vector<ParameterSpec>& parameters,
                           const std::vector<std::vector<PushBlock>>& push) {
  std::map<std::string, Covered> covered;
  for (const ParameterSpec& parameter : parameters) {
    covered[parameter.name].whole = WholeRect(parameter.rows(), parameter.cols());
  }
  for (size_t rank = 0; rank < push.size(); ++rank) {
    const absl::Status added = CoverByRank(push[rank], &covered);
    if (!added.ok()) {
      return absl::Status(added.code(), absl::StrCat("rank ", rank, ": ", added.message()));
    }
  }
  for (const ParameterSpec& parameter : parameters) {
    const Covered& cover = covered[parameter.name];
    const std::vector<Rect> gaps = Gaps(cover.whole, cover.rects, 1);
    if (gaps.empty()) continue;
    return absl::InvalidArgumentError(
        absl::StrCat("none of ", push.size(), " ranks pushes ", gaps[0].DebugString(), " of \"",
                     parameter.name, "\" (", parameter.rows(), " x ", parameter.cols(), ")"));
  }
  return absl::OkStatus();
}

}  // namespace stiefel
