// Every preset with every pair of option changes that is allowed, against the reference. Generated
// from the option table: an option that nobody wrote values for fails here.
#include <iostream>
#include <map>
#include <set>

#include "gtest/gtest.h"
#include "tests/conformance/backend_fixture.h"
#include "tests/conformance/differential.h"
#include "tests/conformance/option_cases.h"
#include "tests/model/scale.h"

namespace stiefel {
namespace {

TEST(OptionCasesTest, EveryOptionHasChangesAndEveryChangeIsAllowedSomewhere) {
  std::set<OptionChange> allowed;
  for (const OptionCase& c : AllOptionCases()) allowed.insert(c.changes.begin(), c.changes.end());
  for (std::string_view key : OptionKeys()) {
    const std::vector<OptionChange> changes = ChangesOf(std::string(key), 12);
    EXPECT_FALSE(changes.empty()) << "write values of option " << key << " into option_cases.cc";
    if (key == "splits") continue;  // differs by shape
    for (const OptionChange& change : changes)
      EXPECT_EQ(allowed.count(change), 1u) << change.first << "=" << change.second;
  }
}

template <typename T>
using OptionsTest = ConformanceTest<T>;
TYPED_TEST_SUITE(OptionsTest, BackendsUnderTest);

TYPED_TEST(OptionsTest, EveryCombinationAgreesWithTheReference) {
  std::vector<OptionCase> cases = AllOptionCases();
  const size_t all = cases.size();
  if (!model::FullScale()) cases = Sampled(std::move(cases), model::Scaled(400, 0), 11);
  Agreement agreement;
  std::map<std::string, int> by_preset;
  for (size_t i = 0; i < cases.size(); ++i) {
    const OptionCase& c = cases[i];
    CompareWithReference(this->backend_.get(), c.rule, c.rows, c.cols, PhaseOf(c, i), 3, 1000 * i,
                         &agreement);
    ++by_preset[c.rule.preset];
    if (this->HasFatalFailure()) return;
  }
  std::cout << cases.size() << " of " << all << " combinations of two options, " << Presets().size()
            << " presets\n";
  for (const auto& [preset, count] : by_preset) std::cout << "  " << preset << " " << count << "\n";
  std::cout << "largest error " << agreement.worst << " of the tolerance, at " << agreement.where
            << "\n";
}

}  // namespace
}  // namespace stiefel
