// The rules as servers run them, on arrays of this process.
#ifndef STIEFEL_TESTS_BENCH_QUALITY_STUDY_LOCAL_OPTIMIZER_H_
#define STIEFEL_TESTS_BENCH_QUALITY_STUDY_LOCAL_OPTIMIZER_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/backend.h"
#include "kernels/rules/matrix_rule.h"
#include "plan/rule.h"
#include "tests/bench/quality_study/problem.h"

namespace stiefel::quality {

// Thread-compatible. The backend and the arrays outlive it.
class LocalOptimizer {
 public:
  // `rule` for the spectral arrays, `other` for the rest; periodic rules refresh all arrays in the
  // same step. Errors: those of MatrixRule::Create.
  static absl::StatusOr<LocalOptimizer> Create(const std::vector<Array>& arrays, const Rule& rule,
                                               const Rule& other, Backend* backend);

  // One committed step of every array, with both learning rates multiplied by `lr_factor`. False:
  // an update was not finite, and nothing was changed from that array on.
  absl::StatusOr<bool> Step(int64_t step, double lr_factor);

 private:
  struct Member {
    Array array;
    Rule rule;
    std::unique_ptr<MatrixRule> matrix;
    std::vector<DeviceBuffer> state, staged;
    std::vector<float> delta;
  };

  explicit LocalOptimizer(std::unique_ptr<Stream> stream) : stream_(std::move(stream)) {}
  absl::Status Add(const Array& array, const Rule& rule, Backend* backend);
  absl::StatusOr<bool> StepOf(Member* member, int64_t step, double lr_factor);

  std::unique_ptr<Stream> stream_;
  std::vector<Member> members_;
  DeviceBuffer workspace_;
};

}  // namespace stiefel::quality

#endif  // STIEFEL_TESTS_BENCH_QUALITY_STUDY_LOCAL_OPTIMIZER_H_
