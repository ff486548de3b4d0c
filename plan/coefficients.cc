#include "plan/coefficients.h"

#include <algorithm>

namespace stiefel {

const std::vector<CoefficientTableInfo>& CoefficientTables() {
  static const auto& tables = *new std::vector<CoefficientTableInfo>{
      {CoefficientTable::kKellerJordan,
       "keller_jordan",
       "github.com/KellerJordan/Muon",
       {{3.4445, -4.7750, 2.0315}},
       true,
       5,
       1},
      {CoefficientTable::kYou,
       "you",
       "github.com/KellerJordan/modded-nanogpt; optax `dion`",
       {{4.0848, -6.8946, 2.9270},
        {3.9505, -6.3029, 2.6377},
        {3.7418, -5.5913, 2.3037},
        {2.8769, -3.1427, 1.2046},
        {2.8366, -3.0525, 1.2012}},
       false,
       5,
       1},
      {CoefficientTable::kTurbo,
       "turbo",
       "arXiv 2512.04632 (the last four of `you`)",
       {{3.9505, -6.3029, 2.6377},
        {3.7418, -5.5913, 2.3037},
        {2.8769, -3.1427, 1.2046},
        {2.8366, -3.0525, 1.2012}},
       false,
       4,
       1},
      {CoefficientTable::kPolarExpress,
       "polar_express",
       "arXiv 2505.16932",
       {{8.28721201814563, -23.595886519098837, 17.300387312530933},
        {4.107059111542203, -2.9478499167379106, 0.5448431082926601},
        {3.9486908534822946, -2.908902115962949, 0.5518191394370137},
        {3.3184196573706015, -2.488488024314874, 0.51004894012372},
        {2.300652019954817, -1.6689039845747493, 0.4188073119525673},
        {1.8913, -1.2680, 0.37680},
        {1.875, -1.25, 0.375}},
       true,
       5,
       1.05},
      {CoefficientTable::kConvergent,
       "convergent",
       "the quintic Newton-Schulz iteration; converges to the exact factor",
       {{1.875, -1.25, 0.375}},
       true,
       12,
       1},
  };
  return tables;
}

const CoefficientTableInfo& CoefficientTableOf(CoefficientTable table) {
  for (const CoefficientTableInfo& info : CoefficientTables()) {
    if (info.table == table) return info;
  }
  return CoefficientTables().front();
}

std::vector<Coefficients> Schedule(const std::vector<Coefficients>& triples, int64_t steps,
                                   double safety) {
  const double q = safety, q3 = q * q * q, q5 = q3 * q * q;
  std::vector<Coefficients> schedule;
  for (int64_t i = 0; i < steps; ++i) {
    const Coefficients& t = triples[std::min<size_t>(i, triples.size() - 1)];
    schedule.push_back({t.a / q, t.b / q3, t.c / q5});
  }
  return schedule;
}

}  // namespace stiefel
