#include "tests/bench/report.h"

#include <algorithm>
#include <cstdio>
#include <fstream>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

namespace stiefel {
namespace {

double MedianOf(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  const size_t middle = values.size() / 2;
  return values.size() % 2 == 1 ? values[middle] : (values[middle - 1] + values[middle]) / 2;
}

}  // namespace

void Report::Add(const std::string& name, double value) {
  for (auto& [known, values] : figures_) {
    if (known == name) return values.push_back(value);
  }
  figures_.push_back({name, {value}});
}

double Report::Median(const std::string& name) const {
  for (const auto& [known, values] : figures_) {
    if (known == name) return MedianOf(values);
  }
  return 0;
}

std::string Report::Table() const {
  std::string table =
      absl::StrFormat("%-32s %12s %12s %12s %4s\n", "", "median", "min", "max", "n");
  for (const auto& [name, values] : figures_) {
    absl::StrAppend(&table,
                    absl::StrFormat("%-32s %12.4g %12.4g %12.4g %4d\n", name, MedianOf(values),
                                    *std::min_element(values.begin(), values.end()),
                                    *std::max_element(values.begin(), values.end()),
                                    static_cast<int>(values.size())));
  }
  return table;
}

nlohmann::json Report::Json() const {
  nlohmann::json json = notes_;
  for (const auto& [name, values] : figures_) {
    json[name] = MedianOf(values);
    json[name + "_min"] = *std::min_element(values.begin(), values.end());
    json[name + "_max"] = *std::max_element(values.begin(), values.end());
  }
  return json;
}

absl::Status Report::Print(const std::string& file) const {
  std::fputs(Table().c_str(), stdout);
  for (const auto& [name, value] : notes_.items())
    std::printf("%-32s %s\n", name.c_str(), value.dump().c_str());
  if (file.empty()) return absl::OkStatus();
  std::ofstream out(file);
  out << Json().dump(2) << "\n";
  out.flush();
  return out.good() ? absl::OkStatus()
                    : absl::UnavailableError(absl::StrCat("cannot write ", file));
}

}  // namespace stiefel
