// The run as it was opened: validated, with names resolved and matrices cut. Immutable, shared by
// everything that serves the run.
//
// To everything here a shard is a matrix: what is called a matrix, with its index, is a shard.
// Shards are numbered over the run, those of parameter 0 in order, then those of parameter 1 ...
#ifndef STIEFEL_SERVER_RUN_SPEC_H_
#define STIEFEL_SERVER_RUN_SPEC_H_

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "common/dtype.h"
#include "common/rect.h"
#include "plan/rule.h"
#include "stiefel/v1/optimizer.pb.h"

namespace stiefel {

// A shard; a matrix that is not cut is its only one.
struct MatrixSpec {
  std::string name;       // of the matrix
  int32_t parameter = 0;  // its index
  int32_t shard = 0;      // among those of the matrix
  int32_t shards = 1;
  std::vector<int64_t> cuts;  // of the matrix, as ShardRects takes them
  Rect place;                 // in the matrix
  int64_t whole_rows = 0;
  int64_t whole_cols = 0;
  int64_t rows = 0;  // of the shard, as all that follows
  int64_t cols = 0;
  Rule rule;
  int32_t group = 0;
  int64_t phase = 0;
  int32_t owner = 0;
  DType push_dtype = DType::kFp32;
  DType pull_dtype = DType::kFp32;
  bool mean = true;
  // The other factor of a polora pair, which has the same owner; -1: none.
  int32_t partner = -1;
  std::optional<std::pair<int64_t, int64_t>> partner_shape;

  int64_t elements() const { return rows * cols; }
  bool cut() const { return shards > 1; }
  // All shards compute a step together (docs/ARCHITECTURE.md, section 8).
  bool computed_together() const { return cut() && rule.family == RuleFamily::kSpectral; }
  // For messages: "h.0.w", or where it is cut "h.0.w [0:512, 0:1024]".
  std::string Label() const { return cut() ? name + " " + place.DebugString() : name; }
};

// A block, or the part of one that lies in a shard, with its parameter resolved.
struct BlockSpec {
  int32_t matrix = 0;
  Rect rect;                  // in the shard
  int32_t reduce_group = -1;  // -1: a group of its own
  int32_t parts = 1;

  int64_t elements() const { return rect.Area(); }
  friend bool operator==(const BlockSpec& a, const BlockSpec& b) {
    return a.matrix == b.matrix && a.rect == b.rect && a.reduce_group == b.reduce_group &&
           a.parts == b.parts;
  }
};

class RunSpec {
 public:
  // INVALID_ARGUMENT names the field and its value: unknown names or rules, sizes that are not
  // positive or overflow, cuts that ValidateCuts or ValidateSharding refuses, phases or owners
  // outside their range, duplicate names, non-positive timeouts, a rule that reads weights in DELTA
  // mode, factors that are not a pair or have two owners, another protocol version
  // (FAILED_PRECONDITION).
  static absl::StatusOr<std::shared_ptr<const RunSpec>> Create(const v1::OpenRunRequest& opened);

  // The run after a change of placement to `placement`, as this server will serve it; null if it
  // has no part in it. INVALID_ARGUMENT: an epoch that is not above the one in force, or what
  // Create refuses.
  absl::StatusOr<std::shared_ptr<const RunSpec>> Moved(const v1::Placement& placement) const;
  // Which server owns what.
  v1::Placement placement() const;

  const v1::OpenRunRequest& opened() const { return opened_; }
  // By shard.
  const std::vector<MatrixSpec>& matrices() const { return matrices_; }
  bool Owns(int32_t matrix) const { return matrices_[matrix].owner == opened_.server_index(); }
  const std::vector<int32_t>& owned() const { return owned_; }
  int32_t world_size() const { return opened_.world_size(); }
  bool weights_mode() const { return opened_.update_mode() == v1::WEIGHTS; }
  bool HasGroup(int32_t group) const { return groups_.count(group) > 0; }

  // Microseconds.
  int64_t step_timeout() const { return step_timeout_; }
  int64_t lease() const { return lease_; }
  int64_t takeover_timeout() const { return takeover_timeout_; }

  // The blocks of a JoinRun, cut at shards as JoinRunRequest.push says. INVALID_ARGUMENT: unknown
  // parameter, rectangle outside the matrix, overlapping push blocks of one rank with the same
  // reduce group, parts < 1, too many blocks.
  absl::StatusOr<std::vector<BlockSpec>> ResolvePush(const v1::JoinRunRequest& request) const;
  absl::StatusOr<std::vector<BlockSpec>> ResolvePull(const v1::JoinRunRequest& request) const;

  // Whether the parameters as a rank knows them are those of the run. INVALID_ARGUMENT names the
  // parameter and both values (CASES B7).
  absl::Status CheckParameters(const v1::JoinRunRequest& request) const;

 private:
  RunSpec() = default;
  static absl::Status CheckMovesIn(const v1::OpenRunRequest& opened);
  absl::Status AddShards(const MatrixSpec& whole, const std::vector<int64_t>& cuts);
  absl::Status ResolvePair(int32_t parameter);
  absl::StatusOr<BlockSpec> ResolveBlock(const std::string& name, const v1::Rectangle& wire) const;
  absl::Status CheckOverlaps(const std::vector<BlockSpec>& blocks) const;
  absl::StatusOr<std::vector<BlockSpec>> Cut(const std::vector<BlockSpec>& blocks) const;

  v1::OpenRunRequest opened_;
  std::vector<MatrixSpec> matrices_;
  std::vector<int32_t> owned_;
  std::map<std::string, int32_t> by_name_;  // parameter
  std::vector<int32_t> first_shard_;        // by parameter
  std::vector<std::vector<Rect>> places_;   // of its shards, by parameter
  std::unordered_set<int32_t> groups_;
  int64_t step_timeout_ = 0;
  int64_t lease_ = 0;
  int64_t takeover_timeout_ = 0;
};

}  // namespace stiefel

#endif  // STIEFEL_SERVER_RUN_SPEC_H_
