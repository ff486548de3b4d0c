// Repeated measurements: median with minimum and maximum, as a table and as JSON (NAME, NAME_min,
// NAME_max).
#ifndef STIEFEL_TESTS_BENCH_REPORT_H_
#define STIEFEL_TESTS_BENCH_REPORT_H_

#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "nlohmann/json.hpp"

namespace stiefel {

class Report {
 public:
  // One more measurement of `name`; the order of first appearance is kept.
  void Add(const std::string& name, double value);
  // A fact that stands beside the measurements (instruction set, sizes).
  void Note(const std::string& name, nlohmann::json value) { notes_[name] = std::move(value); }
  double Median(const std::string& name) const;

  std::string Table() const;
  nlohmann::json Json() const;
  // Prints the table; writes the JSON to `file` unless it is empty.
  absl::Status Print(const std::string& file) const;

 private:
  std::vector<std::pair<std::string, std::vector<double>>> figures_;
  nlohmann::json notes_ = nlohmann::json::object();
};

}  // namespace stiefel

#endif  // STIEFEL_TESTS_BENCH_REPORT_H_
