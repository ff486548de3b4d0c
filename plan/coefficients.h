// Coefficient tables of the Newton-Schulz iteration (update rules, section 2). One triple (a, b, c)
// per iteration maps every singular value x to a x + b x^3 + c x^5.
#ifndef STIEFEL_PLAN_COEFFICIENTS_H_
#define STIEFEL_PLAN_COEFFICIENTS_H_

#include <cstdint>
#include <string_view>
#include <vector>

namespace stiefel {

struct Coefficients {
  double a = 0, b = 0, c = 0;
};

enum class CoefficientTable { kKellerJordan, kYou, kTurbo, kPolarExpress, kConvergent, kList };

struct CoefficientTableInfo {
  CoefficientTable table;
  std::string_view name;  // as an option value
  std::string_view source;
  std::vector<Coefficients> triples;
  bool last_repeats;  // further iterations repeat the last triple
  int64_t default_steps;
  double default_safety;  // q: (a, b, c) becomes (a/q, b/q^3, c/q^5)
};

// Every named table (kList, which the user writes out, is not among them).
const std::vector<CoefficientTableInfo>& CoefficientTables();

// REQUIRES: table != kList.
const CoefficientTableInfo& CoefficientTableOf(CoefficientTable table);

// `triples` extended or cut to `steps` entries and divided by the safety factor.
// REQUIRES: triples not empty.
std::vector<Coefficients> Schedule(const std::vector<Coefficients>& triples, int64_t steps,
                                   double safety);

}  // namespace stiefel

#endif  // STIEFEL_PLAN_COEFFICIENTS_H_
