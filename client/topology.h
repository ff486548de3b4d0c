// The blocks of one rank of a training mesh, so that users never compute rectangles.
//
// A mesh has named dimensions ("dp", "tp", "pp" ...). For each parameter the user says how it is
// spread over each of them, as DTensor placements do; out come the lists for TrainerOptions, and
// where every block lies in the tensor that the rank really holds:
//
//   const Mesh mesh = {{"dp", 4}, {"tp", 2}};                       // 8 ranks
//   std::vector<ParameterSpread> spreads(parameters.size());        // in the parameters' order
//   spreads[0] = {{"tp", ShardRows()}, {"dp", Replicate(Gradients::kEqual)}};
//   auto blocks = BlocksOfRank(mesh, parameters, spreads, rank);
//   blocks->SetIn(&options);
//   auto trainer = Trainer::Connect(options, parameters);
//   ...
//   for (size_t b = 0; b < blocks->push.size(); ++b) {              // local: this rank's tensors
//     const LocalBlock& at = blocks->push_at[b];
//     (*trainer)->Push(b, at.View(local_gradient[at.parameter], ElementType::kBf16));
//   }
//   ... ApplyAll with blocks->pull_at[b].View(local_weights[at.parameter], ...)
//
// Strategies (every dimension of the mesh is named once for every parameter; the order is that in
// which cuts nest):
//
//   DDP, gradients all-reduced     {{"dp", Replicate(Gradients::kEqual)}}
//   DDP, the servers take the mean {{"dp", Replicate(Gradients::kOwn)}}
//   ZeRO-2, FSDP                   {{"dp", ShardRows()}}              rows as torch's chunk() cuts
//   HSDP                           Hsdp("replicate", "shard")
//   tensor parallel, by rows       {{"tp", ShardRows()}}              column-parallel layer, bias
//   ..., by columns                {{"tp", ShardCols()}}              row-parallel layer
//   ..., fused QKV, gated          {{"tp", ShardRows(PerSplit({768, 768, 768}))}}
//   ..., replicated (norms under sequence parallelism), context parallel
//                                  {{"tp", Replicate(Gradients::kPartial)}}
//   experts [E, out, in]           {{"ep", ShardExperts()}}
//   pipeline                       {{"pp", Stage(2)}}
//   tied embeddings                {{"pp", Stages({0, 3}, Replicate(Gradients::kPartial))}}
//   FSDP of what TP cut            {{"tp", ShardRows()}, {"dp", ShardRows()}}
//   accumulation on the servers    spread.parts = 4
//
// A stack has one block for each matrix, so that an expert without tokens can be PushAbsent.
//
// Everything here is pure and thread-safe.
#ifndef STIEFEL_CLIENT_TOPOLOGY_H_
#define STIEFEL_CLIENT_TOPOLOGY_H_

#include <cstdint>
#include <initializer_list>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/tensor.h"
#include "client/trainer.h"

namespace stiefel {

struct MeshDim {
  std::string name;
  int64_t size = 1;
};
// Ranks are numbered row-major, the last dimension fastest, as torch's init_device_mesh does. The
// product of the sizes is the world size.
using Mesh = std::vector<MeshDim>;

// How n rows (columns, experts) are cut into p parts.
enum class CutMode {
  kChunk,     // torch.chunk: ceil(n / p) each, the last ones short or empty
  kBalanced,  // part k is [k n / p, (k + 1) n / p), as RowPushBlocks cuts
};
struct Cut {
  CutMode mode = CutMode::kChunk;
  std::vector<int64_t> sizes = {};   // instead of a mode: of each part, 0 allowed; they add up to n
  std::vector<int64_t> splits = {};  // rows only: every split is cut, a rank holds part of each
};
// The splits of a fused matrix, in order; they add up to its rows (or to the length of its bias).
inline Cut PerSplit(std::vector<int64_t> splits) {
  return {CutMode::kChunk, {}, std::move(splits)};
}
// Parts of given sizes, by coordinate.
inline Cut Sizes(std::vector<int64_t> sizes) { return {CutMode::kChunk, std::move(sizes), {}}; }

// What the ranks along a dimension that replicates a parameter have as its gradient.
enum class Gradients {
  kEqual,    // the same, after an all-reduce of the trainers: each pushes a part of its own
  kOwn,      // each that of its own batch: all push, the servers take the parameter's mean or sum
  kPartial,  // summands of one gradient: all push, the servers add them up (a reduce group)
};
// Who pulls what several ranks hold.
enum class Pull {
  kEach,
  kFirst,  // the first rank along the dimension; it broadcasts to the others (Held::puller)
};

// How a parameter is spread over one dimension of the mesh. Made by the functions below.
struct Spread {
  enum class Kind { kReplicate, kShardRows, kShardCols, kShardExperts };
  Kind kind = Kind::kReplicate;
  Cut cut = {};
  Gradients gradients = Gradients::kEqual;
  Pull pull = Pull::kEach;
  std::optional<std::vector<int64_t>> coordinates = {};  // that hold it, in order; unset: all
};

// Ranks of one kPartial group must pass equal weights to Begin; a rank of weight 0 counts for
// nothing, also where it alone pushes an element.
Spread Replicate(Gradients gradients, Pull pull = Pull::kEach);
// Rows of every matrix; of a 1-D parameter its elements.
Spread ShardRows(Cut cut = {});
// Columns; of a convolution its input channels.
Spread ShardCols(Cut cut = {});
// Matrices of a stack, along its last stack axis.
Spread ShardExperts(Cut cut = {});
// Only ranks with this coordinate hold the parameter.
Spread Stage(int64_t coordinate);
// Only ranks with these coordinates do, spread over them as `spread` says.
Spread Stages(std::vector<int64_t> coordinates, Spread spread);

struct DimSpread {
  std::string dim;
  Spread spread;
};
struct ParameterSpread {
  ParameterSpread() = default;
  ParameterSpread(std::initializer_list<DimSpread> list) : dims(list) {}  // NOLINT: implicit

  std::vector<DimSpread> dims;  // each of the mesh once; cuts nest in this order
  int32_t parts = 1;            // summands that each push block comes in
};

// Rows cut over `shard`, copies of them over `replicate` whose gradients are equal after their
// all-reduce. The push is dealt over the copies.
ParameterSpread Hsdp(const std::string& replicate, const std::string& shard,
                     Pull pull = Pull::kFirst);

// Where a block lies in the rank's own tensor of the parameter, which is row-major and contiguous:
// what the rank holds, in the order of the whole parameter ([E, out, in] stays one tensor of its
// experts' rows; padding may follow).
struct LocalBlock {
  int32_t parameter = 0;
  int64_t rows = 0, cols = 0;
  int64_t offset = 0;      // of the block's first element, in elements
  int64_t row_stride = 0;  // elements

  // `tensor`: its first element.
  TensorView View(const void* tensor, ElementType type) const;
  MutableTensorView MutableView(void* tensor, ElementType type) const;
};

// What a rank holds of one parameter, seen as in the stacked view; 0 x 0: nothing.
struct Held {
  int64_t rows = 0, cols = 0;
  int32_t puller = 0;  // the rank that pulls this part: this one, or the one that broadcasts it
};

struct BlocksOfOneRank {
  int32_t rank = 0;
  int32_t world_size = 1;
  std::vector<PushBlock> push;
  std::vector<PullBlock> pull;
  std::vector<LocalBlock> push_at;  // by block
  std::vector<LocalBlock> pull_at;
  std::vector<Held> held;  // by parameter

  // Sets rank, world size and both lists (which may be empty).
  void SetIn(TrainerOptions* options) const;
};

// `spreads`: of each parameter, in order. Pieces that come out empty are no blocks.
// INVALID_ARGUMENT, with names and numbers: a mesh dimension without a name, with the name of
// another or a size below 1; a rank outside the mesh; another number of spreads than of parameters;
// what ShapeOfParameter refuses; a dimension that a spread lacks or names twice; coordinates
// outside the dimension, given twice or none; sizes or splits that do not add up; columns of a 1-D
// parameter, experts of one without stack_dims; parts below 1. NOT_FOUND: a dimension that the mesh
// does not have.
absl::StatusOr<BlocksOfOneRank> BlocksOfRank(const Mesh& mesh,
                                             const std::vector<ParameterSpec>& parameters,
                                             const std::vector<ParameterSpread>& spreads,
                                             int32_t rank);

// Those of every rank, with CheckCoverage: for launchers and tests. An uneven nested cut can be
// wrong on some ranks only; this finds it on any.
absl::StatusOr<std::vector<BlocksOfOneRank>> BlocksOfMesh(
    const Mesh& mesh, const std::vector<ParameterSpec>& parameters,
    const std::vector<ParameterSpread>& spreads);

// What servers check when all ranks have joined, for block lists of any making, by rank.
// INVALID_ARGUMENT: an element that nobody pushes, blocks of one rank that overlap under one reduce
// group, blocks outside their parameter. NOT_FOUND: a parameter that there is not.
absl::Status CheckCoverage(const std::vector<ParameterSpec>& parameters,
                           const std::vector<std::vector<PushBlock>>& push);

}  // namespace stiefel

#endif  // STIEFEL_CLIENT_TOPOLOGY_H_
