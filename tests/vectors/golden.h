// The golden values of the update rules (docs/mathematics.md, section 7) as tests want them.
#ifndef STIEFEL_TESTS_VECTORS_GOLDEN_H_
#define STIEFEL_TESTS_VECTORS_GOLDEN_H_

#include <cstdint>
#include <string>
#include <vector>

#include "kernels/reference/dense.h"
#include "plan/rule.h"

namespace stiefel {

// G of step s + 1: (((7i + 3j^2 + 5 + 11s + s i j) mod 13) - 6) / 4
Dense GoldenGradient(int64_t s, int64_t rows, int64_t cols);

// The deltas of four steps of one rule on one matrix.
struct GoldenCase {
  std::string name;  // in the file
  Rule rule;
  int64_t phase = 0;
  int64_t rows = 0, cols = 0;
  std::vector<Dense> deltas;
};
// All of rules.json; fails the running test where the file or a preset is missing.
std::vector<GoldenCase> GoldenCases();

// A set of coefficients with values of its scalar map.
struct GoldenEnvelope {
  std::string name;          // in the file
  std::string coefficients;  // option value
  double safety = 1;         // option value
  std::vector<Coefficients> schedule;
  struct Point {
    double x = 0, y = 0;
  };
  std::vector<Point> points;
};
// All of scalar_envelopes.json, likewise.
std::vector<GoldenEnvelope> GoldenEnvelopes();

// polar_of_grad0_3x5 of rules.json under this name.
Dense GoldenPolar(const std::string& name);

}  // namespace stiefel

#endif  // STIEFEL_TESTS_VECTORS_GOLDEN_H_
