// Options whose values are lists.
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "plan/option_access.h"

namespace stiefel {
namespace {

constexpr int64_t kMaxTile = int64_t{1} << 20;
constexpr size_t kMaxListed = 4096;  // splits, or entries of a tile schedule

std::vector<std::string> Parts(std::string_view value, char separator) {
  return absl::StrSplit(absl::string_view(value.data(), value.size()), separator);
}

// "a,b,c;a,b,c"
bool ParseCoefficients(std::string_view value, std::vector<Coefficients>* triples) {
  for (const std::string& part : Parts(value, ';')) {
    const std::vector<std::string> numbers = Parts(part, ',');
    Coefficients triple;
    if (numbers.size() != 3 || !ParseOptionNumber(numbers[0], &triple.a) ||
        !ParseOptionNumber(numbers[1], &triple.b) || !ParseOptionNumber(numbers[2], &triple.c)) {
      return false;
    }
    triples->push_back(triple);
  }
  return static_cast<int64_t>(triples->size()) <= kMaxPolarSteps;
}

// "512", "256,1000:512" or "1000:512,5000:none"; an entry without a step counts from step 1.
bool ParseTiles(std::string_view value, std::vector<TileFrom>* tiles) {
  for (const std::string& part : Parts(value, ',')) {
    const size_t colon = part.find(':');
    TileFrom entry;
    if (colon != std::string::npos && !ParseOptionInteger(part.substr(0, colon), &entry.step)) {
      return false;
    }
    const std::string size = colon == std::string::npos ? part : part.substr(colon + 1);
    const bool sized = size != "none";
    if (sized && (!ParseOptionInteger(size, &entry.tile) || entry.tile < 1)) return false;
    if (entry.tile > kMaxTile || entry.step < 1) return false;
    if (!tiles->empty() && entry.step <= tiles->back().step) return false;
    tiles->push_back(entry);
  }
  return tiles->size() <= kMaxListed;
}

std::string TileText(const TileFrom& entry) {
  return entry.tile == 0 ? std::string("none") : absl::StrCat(entry.tile);
}

}  // namespace

OptionAccess CoefficientsOption() {
  return {[](Rule& rule, std::string_view value) {
            std::string names;
            for (const CoefficientTableInfo& info : CoefficientTables()) {
              absl::StrAppend(&names, std::string(info.name), " | ");
              if (info.name == value) {
                rule.coefficients = info.table;
                rule.coefficient_list.clear();
                return absl::OkStatus();
              }
            }
            std::vector<Coefficients> triples;
            if (!ParseCoefficients(value, &triples)) {
              return BadOptionValue(
                  value, absl::StrCat("one of ", names, "a list \"a,b,c;a,b,c\" of at most ",
                                      kMaxPolarSteps, " triples of finite numbers"));
            }
            rule.coefficients = CoefficientTable::kList;
            rule.coefficient_list = std::move(triples);
            return absl::OkStatus();
          },
          [](const Rule& rule) {
            if (rule.coefficients != CoefficientTable::kList) {
              return std::string(CoefficientTableOf(rule.coefficients).name);
            }
            return absl::StrJoin(
                rule.coefficient_list, ";", [](std::string* out, const Coefficients& t) {
                  absl::StrAppend(out, NumberText(t.a), ",", NumberText(t.b), ",", NumberText(t.c));
                });
          }};
}

OptionAccess RestartsOption() {
  return {[](Rule& rule, std::string_view value) {
            if (value == "auto") {
              rule.restarts.reset();
              return absl::OkStatus();
            }
            std::vector<int64_t> restarts;
            for (const std::string& part :
                 value == "none" ? std::vector<std::string>() : Parts(value, ',')) {
              int64_t number = 0;
              if (!ParseOptionInteger(part, &number) || number < 1 || number >= kMaxPolarSteps ||
                  (!restarts.empty() && number <= restarts.back())) {
                return BadOptionValue(
                    value, "auto, none or an increasing list of iterations, such as 2,4");
              }
              restarts.push_back(number);
            }
            rule.restarts = std::move(restarts);
            return absl::OkStatus();
          },
          [](const Rule& rule) {
            if (!rule.restarts.has_value()) return std::string("auto");
            return rule.restarts->empty() ? std::string("none")
                                          : absl::StrJoin(*rule.restarts, ",");
          }};
}

OptionAccess SplitsOption() {
  return {[](Rule& rule, std::string_view value) {
            std::vector<int64_t> splits;
            for (const std::string& part :
                 value == "none" ? std::vector<std::string>() : Parts(value, ',')) {
              int64_t rows = 0;
              if (!ParseOptionInteger(part, &rows) || rows < 1 || splits.size() == kMaxListed) {
                return BadOptionValue(value, absl::StrCat("none, or at most ", kMaxListed,
                                                          " row counts, such as 768,768,768"));
              }
              splits.push_back(rows);
            }
            rule.splits = std::move(splits);
            return absl::OkStatus();
          },
          [](const Rule& rule) {
            return rule.splits.empty() ? std::string("none") : absl::StrJoin(rule.splits, ",");
          }};
}

OptionAccess TileOption() {
  return {[](Rule& rule, std::string_view value) {
            std::vector<TileFrom> tiles;
            if (value != "none" && !ParseTiles(value, &tiles)) {
              return BadOptionValue(
                  value, absl::StrCat("none, a size from 1 to ", kMaxTile,
                                      ", or sizes by increasing step, such as 256,1000:512"));
            }
            rule.tiles = std::move(tiles);
            return absl::OkStatus();
          },
          [](const Rule& rule) {
            if (rule.tiles.empty()) return std::string("none");
            return absl::StrJoin(rule.tiles, ",", [](std::string* out, const TileFrom& entry) {
              if (entry.step > 1) absl::StrAppend(out, entry.step, ":");
              absl::StrAppend(out, TileText(entry));
            });
          }};
}

}  // namespace stiefel
