// What a drawn run has to come to, from first principles: which elements each rank holds (entry by
// entry, as a trainer would slice its tensors; nothing of client/topology.cc), what gradient it has
// for them, and what all of them reduce to.
//
// Gradients are drawn so that the comparison is honest. All values of an element have one sign and
// lie in [1, 2): nothing cancels, so neither a rounded sum nor an adamw or lion step near zero can
// grow an error. Where several values meet in an element they are multiples of 1/32: sums of them
// are exact in fp32 in any order, and so are means with weights that are powers of two over a sum
// that is one. Every parameter whose reduction is exact must come out bit for bit; only means that
// round (by thirds, say) may differ, by 1e-6 of the largest weight: gradients are then off by about
// 1e-7 of themselves, which the Newton-Schulz map may multiply by a few hundred, and the learning
// rate (0.01) divides by a hundred. A wrong cut, group or weight is an error of percents of a step.
#ifndef STIEFEL_TESTS_TOPOLOGY_TRUTH_H_
#define STIEFEL_TESTS_TOPOLOGY_TRUTH_H_

#include <cstdint>
#include <optional>
#include <vector>

#include "tests/topology/drawn_run.h"

namespace stiefel::testing {

// A rank's part in one parameter.
struct Role {
  std::vector<int64_t> elements;  // of the stacked view, row-major, in the order of its own tensor
  int64_t own = 0;                // whose gradient it has, among those that are averaged
  int64_t summand = 0;            // and which summand of it
};

struct Reduced {
  std::vector<float> gradient;  // of the whole matrix
  bool exact = true;            // no summation order and no rounding can change it
};

class Truth {
 public:
  explicit Truth(const DrawnRun& run);

  const Role& RoleOf(int32_t rank, size_t parameter) const { return roles_[rank][parameter]; }
  int64_t Matrices(size_t parameter) const;  // of the stack
  float InitialWeight(size_t parameter, int64_t element) const;
  // Of one part of one summand.
  float Gradient(size_t parameter, const Role& role, int32_t part, int64_t step,
                 int64_t element) const;
  // No gradient for this matrix of the stack.
  bool Absent(size_t parameter, const Role& role, int32_t part, int64_t step, int64_t matrix) const;
  // Nothing where all are absent.
  std::optional<Reduced> Reduce(size_t parameter, int64_t step, int64_t matrix) const;

 private:
  Role MakeRole(int32_t rank, size_t parameter) const;

  const DrawnRun& run_;
  std::vector<std::vector<Role>> roles_;  // by rank, parameter
  struct Contributions {
    int64_t owns = 1, summands = 1;
    std::vector<double> weights;  // by own
  };
  std::vector<Contributions> contributions_;  // by parameter
};

}  // namespace stiefel::testing

#endif  // STIEFEL_TESTS_TOPOLOGY_TRUTH_H_
