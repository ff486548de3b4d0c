// Every preset with every pair of option changes that is allowed, against the reference. Generated
// from the option table: an option that nobody wrote values for fails here.
#include <iostream>
#include <map>
#include <random>
#include <set>

#include "gtest/gtest.h"
#include "tests/conformance/backend_fixture.h"
#include "tests/conformance/differential.h"
#include "tests/conformance/option_cases.h"
#include "tests/model/scale.h"

namespace stiefel {
namespace {

struct Case {
  Rule rule;
  int64_t rows = 0, cols = 0;
  std::vector<OptionChange> changes;
};

// Sides from 1 to 300, mostly small: tall, wide and square.
class Shapes {
 public:
  explicit Shapes(uint64_t seed) : random_(seed) {}

  std::pair<int64_t, int64_t> Next() {
    // A third are square, which neither side of is special.
    const int64_t rows = Side(), cols = Pick(3) == 0 ? rows : Side();
    // One dimension, and few large ones.
    if (rows * cols > 100 * 100 && Pick(8) > 0) return {rows, 1 + Pick(20)};
    return {rows, cols};
  }
  int64_t Pick(int64_t n) { return static_cast<int64_t>(random_() % static_cast<uint64_t>(n)); }

 private:
  int64_t Side() {
    const int64_t kind = Pick(10);
    return kind == 0 ? 1 : kind == 1 ? 1 + Pick(300) : 2 + Pick(40);
  }

  std::mt19937_64 random_;
};

// Every accepted preset x pair of changes, each with a shape of its own. An option without a change
// beside it is the pair of a change with itself.
std::vector<Case> MakeAllCases() {
  Shapes shapes(7);
  std::vector<Case> cases;
  std::vector<std::string> keys;
  for (std::string_view key : OptionKeys()) keys.emplace_back(key);
  for (const PresetInfo& info : Presets()) {
    for (size_t a = 0; a < keys.size(); ++a) {
      for (size_t b = a; b < keys.size(); ++b) {
        auto [rows, cols] = shapes.Next();
        if (info.name == "polora") {  // of which either side may be the rank
          rows = 1 + rows % 40;
          cols = 1 + cols % 40;
        }
        for (const OptionChange& first : ChangesOf(keys[a], rows)) {
          for (const OptionChange& second : ChangesOf(keys[b], rows)) {
            if (a == b && first != second) continue;
            const std::vector<OptionChange> changes = {first, second};
            for (const Rule& rule : Combined(std::string(info.name), changes, rows, cols))
              cases.push_back({rule, rows, cols, changes});
          }
        }
      }
    }
  }
  return cases;
}

const std::vector<Case>& AllCases() {
  static const auto& cases = *new std::vector<Case>(MakeAllCases());
  return cases;
}

// At least one of every change, and otherwise at random.
std::vector<Case> Sampled(std::vector<Case> cases, size_t count, uint64_t seed) {
  std::shuffle(cases.begin(), cases.end(), std::mt19937_64(seed));
  std::set<std::string> seen;
  std::vector<Case> chosen, others;
  for (Case& c : cases) {
    bool fresh = false;
    for (const auto& [key, value] : c.changes)
      fresh |= seen.insert(key == "splits" ? key : key + "=" + value).second;
    (fresh ? chosen : others).push_back(std::move(c));
  }
  for (size_t i = 0; i < others.size() && chosen.size() < count; ++i)
    chosen.push_back(std::move(others[i]));
  return chosen;
}

TEST(OptionCasesTest, EveryOptionHasChangesAndEveryChangeIsAllowedSomewhere) {
  std::set<OptionChange> allowed;
  for (const Case& c : AllCases()) allowed.insert(c.changes.begin(), c.changes.end());
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
  std::vector<Case> cases = AllCases();
  const size_t all = cases.size();
  if (!model::FullScale()) cases = Sampled(std::move(cases), model::Scaled(400, 0), 11);
  Agreement agreement;
  std::map<std::string, int> by_preset;
  for (size_t i = 0; i < cases.size(); ++i) {
    const Case& c = cases[i];
    // Three steps are enough for both kinds, in an order that depends on the phase.
    const int64_t phase = c.rule.phase_mode == PhaseMode::kNumber
                              ? c.rule.phase
                              : static_cast<int64_t>(i) % std::min<int64_t>(c.rule.period, 3);
    CompareWithReference(this->backend_.get(), c.rule, c.rows, c.cols, phase, 3, 1000 * i,
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
