// A matrix whose shards compute together in this process.
#ifndef STIEFEL_TESTS_CONFORMANCE_SHARDED_MATRIX_H_
#define STIEFEL_TESTS_CONFORMANCE_SHARDED_MATRIX_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "kernels/local_collective.h"
#include "kernels/rules/sharded_rule.h"
#include "tests/conformance/backend_fixture.h"

namespace stiefel {

// Who runs the stages: the next stage of a shard goes to any thread as soon as its collective is
// done, in random order.
struct Driving {
  int threads = 1;
  uint64_t seed = 1;
};

class ShardedMatrix {
 public:
  // REQUIRES: a rule and cuts that can be had.
  ShardedMatrix(Backend* backend, const Rule& rule, int64_t rows, int64_t cols,
                std::vector<int64_t> cuts, Driving driving = {});

  struct Shard {
    Outcome outcome;
    ShardedStep::Outcome ended = ShardedStep::Outcome::kComputed;
    std::vector<CollectivePart> collectives;  // what it took part in
  };

  // One step: every shard takes its parts of the pieces, of which it may have none. EXPECTs that
  // every stage keeps to what CollectivePart says of memory.
  std::vector<Shard> StepOfShards(const HostView& view, const StepArgs& args,
                                  const StepOptions& options = {});
  // The same, put together; figures as a server would report them for the matrix.
  Outcome Step(const HostView& view, const StepArgs& args, const StepOptions& options = {});

  const ShardedRule& rule(int32_t shard) const { return *rules_[shard]; }
  const std::vector<Rect>& rects() const { return rects_; }

 private:
  struct Running;

  HostView ViewOf(const HostView& view, int32_t shard) const;
  StepOptions OptionsOf(const StepOptions& options, int32_t shard) const;
  void Drive(const StepArgs& args, std::vector<std::unique_ptr<Running>>* running);

  const int64_t rows_, cols_;
  const std::vector<Rect> rects_;
  Driving driving_;
  LocalCollective collective_;
  std::vector<std::unique_ptr<ShardedRule>> rules_;
  std::vector<std::unique_ptr<MatrixMemory>> memory_;
};

}  // namespace stiefel

#endif  // STIEFEL_TESTS_CONFORMANCE_SHARDED_MATRIX_H_
