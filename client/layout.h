// The run as this rank describes it: options and parameters validated, names resolved.
#ifndef STIEFEL_CLIENT_LAYOUT_H_
#define STIEFEL_CLIENT_LAYOUT_H_

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "client/trainer.h"
#include "stiefel/v1/optimizer.pb.h"

namespace stiefel {

// A matrix of the run: a parameter, or one of a stack. Its place in the list is its matrix index.
struct LayoutMatrix {
  std::string name;  // "h.0.w", "experts.w1[3]"
  int32_t parameter = 0;
  int64_t first_row = 0;  // in the parameter's stacked view
  int64_t rows = 0;
  int64_t cols = 0;
  bool vector = false;  // 1-D
  Rule rule;
};

// A block as the user named it: a rectangle of the parameter's stacked view.
struct LayoutBlock {
  int32_t parameter = 0;
  Rect rect;
  int32_t parts = 1;
  DType dtype = DType::kFp32;  // on the wire
  int32_t first_wire = 0;      // its blocks on the wire, one for each shard that it touches
  int32_t wires = 1;
  bool scattered = false;  // some part is not a contiguous range of it: columns are cut

  int64_t elements() const { return rect.Area(); }
  int64_t bytes() const { return elements() * DTypeSize(dtype); }
};

// A part of a matrix that has an owner of its own. Its place in the list is its shard index; a
// matrix that is not cut is one shard.
struct LayoutShard {
  int32_t matrix = 0;
  Rect place;  // in the matrix
};

// The part of a block in one shard.
struct WireBlock {
  int32_t shard = 0;
  int32_t block = 0;  // whose part it is
  Rect rect;          // in the shard
  Rect in_block;
  int64_t first =
      0;  // where it begins if the block's parts, each row-major, lie one after the other
  int32_t parts = 1;
  DType dtype = DType::kFp32;

  int64_t elements() const { return rect.Area(); }
  int64_t bytes() const { return elements() * DTypeSize(dtype); }
};

class Layout {
 public:
  // INVALID_ARGUMENT names the field and its value: options, what ShapeOfParameter and ValidatePair
  // refuse, a rule that reads weights in DELTA mode, blocks outside their parameter. Empty block
  // lists become whole parameters if the options say so.
  static absl::StatusOr<Layout> Create(const TrainerOptions& options,
                                       const std::vector<ParameterSpec>& parameters);

  const TrainerOptions& options() const { return options_; }
  const std::vector<ParameterSpec>& parameters() const { return parameters_; }
  const std::vector<LayoutMatrix>& matrices() const { return matrices_; }
  const std::vector<LayoutShard>& shards() const { return shards_; }
  const std::vector<LayoutBlock>& push() const { return push_; }
  const std::vector<LayoutBlock>& pull() const { return pull_; }
  // As chunks name them by position: JoinRun's lists, cut at shards.
  const std::vector<WireBlock>& wire_push() const { return wire_push_; }
  const std::vector<WireBlock>& wire_pull() const { return wire_pull_; }
  // Cuts matrices as the run was opened with; before, and where `cuts` is empty, they are whole.
  // INVALID_ARGUMENT: what ValidateCuts refuses, a matrix that does not exist, another order.
  absl::Status SetCuts(const google::protobuf::RepeatedPtrField<v1::Cuts>& cuts);
  // The parts of a rectangle of a parameter's stacked view; `block` of each is 0.
  std::vector<WireBlock> Cut(int32_t parameter, const Rect& rect) const;

  // NOT_FOUND: no such parameter.
  absl::StatusOr<int32_t> ParameterOf(std::string_view name) const;
  // The one block of the parameter; INVALID_ARGUMENT: it has none or several.
  absl::StatusOr<int32_t> PushBlockOf(std::string_view parameter) const;
  absl::StatusOr<int32_t> PullBlockOf(std::string_view parameter) const;
  // "\"h.0.w\" [0:4, 0:8]", for messages.
  std::string Describe(const LayoutBlock& block) const;
  // "\"experts.w1[3]\" [0:4, 0:8]"
  std::string Describe(const WireBlock& block) const;

  // The part of the JoinRun request that does not change with the attempt to join.
  v1::JoinRunRequest JoinRequest() const;
  // The OpenRun request but for uid, leader, placement and server index.
  v1::OpenRunRequest OpenRequest() const;

 private:
  Layout() = default;
  absl::Status AddParameter(const ParameterSpec& parameter);
  absl::Status CheckMatrices() const;
  absl::Status ResolveBlock(const std::string& name, const Rect& rect, LayoutBlock* block) const;
  // A rectangle of one matrix, and which row of the stacked view's rectangle is its first.
  struct MatrixBlock {
    int32_t matrix = 0;
    Rect rect;
    int64_t first_row = 0;
  };
  std::vector<MatrixBlock> InMatrices(int32_t parameter, const Rect& rect) const;
  void CutMatrices(const std::vector<std::vector<int64_t>>& cuts);
  void CutBlocks(std::vector<LayoutBlock>* blocks, std::vector<WireBlock>* wires) const;
  v1::Parameter MatrixToProto(const LayoutMatrix& matrix) const;

  TrainerOptions options_;
  std::vector<ParameterSpec> parameters_;
  std::map<std::string, int32_t, std::less<>> by_name_;
  std::vector<LayoutMatrix> matrices_;
  std::vector<int32_t> first_matrix_;  // by parameter
  std::vector<LayoutShard> shards_;
  std::vector<int32_t> first_shard_;       // by matrix
  std::vector<std::vector<Rect>> places_;  // of its shards, by matrix
  std::vector<LayoutBlock> push_;
  std::vector<LayoutBlock> pull_;
  std::vector<WireBlock> wire_push_;
  std::vector<WireBlock> wire_pull_;
};

}  // namespace stiefel

#endif  // STIEFEL_CLIENT_LAYOUT_H_
