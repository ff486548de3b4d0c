#include "tests/vectors/golden.h"

#include <fstream>
#include <map>
#include <utility>

#include "gtest/gtest.h"
#include "nlohmann/json.hpp"

namespace stiefel {
namespace {

using nlohmann::json;

json Load(const std::string& name) {
  std::ifstream file("tests/vectors/" + name);
  EXPECT_TRUE(file.good()) << name;
  return json::parse(file);
}

Dense ToDense(const json& rows) {
  Dense a(static_cast<int64_t>(rows.size()), static_cast<int64_t>(rows[0].size()));
  for (int64_t i = 0; i < a.rows; ++i) {
    for (int64_t j = 0; j < a.cols; ++j) a(i, j) = rows[i][j];
  }
  return a;
}

// Cases that are a preset with options say so in their names.
struct Variant {
  std::string preset;
  int64_t phase = 0;
  std::vector<std::pair<std::string, std::string>> options;
};

Variant VariantOf(const std::string& name) {
  static const auto& variants = *new std::map<std::string, Variant>{
      {"periodic_rowwise_muon_phase1", {"periodic_rowwise_muon", 1, {}}},
      {"himuon_tile4", {"himuon", 0, {{"tile", "4"}}}},
      {"samuon_lite_g5", {"samuon_lite", 0, {{"gain", "5"}, {"warmup", "0"}}}}};
  const auto found = variants.find(name);
  return found == variants.end() ? Variant{name, 0, {}} : found->second;
}

}  // namespace

Dense GoldenGradient(int64_t s, int64_t rows, int64_t cols) {
  Dense g(rows, cols);
  for (int64_t i = 0; i < rows; ++i) {
    for (int64_t j = 0; j < cols; ++j)
      g(i, j) = static_cast<double>((7 * i + 3 * j * j + 5 + 11 * s + s * i * j) % 13 - 6) / 4;
  }
  return g;
}

std::vector<GoldenCase> GoldenCases() {
  std::vector<GoldenCase> cases;
  const json file = Load("rules.json");
  for (const json& entry : file["cases"]) {
    GoldenCase golden;
    golden.name = entry["preset"];
    const Variant variant = VariantOf(golden.name);
    absl::StatusOr<Rule> rule = PresetRule(variant.preset);
    EXPECT_TRUE(rule.ok()) << rule.status();
    if (!rule.ok()) continue;
    golden.rule = *std::move(rule);
    for (const auto& [key, value] : variant.options) {
      const absl::Status status = SetOption(golden.rule, key, value);
      EXPECT_TRUE(status.ok()) << status;
    }
    golden.phase = variant.phase;
    golden.rows = entry["rows"];
    golden.cols = entry["cols"];
    for (const json& delta : entry["deltas"]) golden.deltas.push_back(ToDense(delta));
    cases.push_back(std::move(golden));
  }
  return cases;
}

std::vector<GoldenEnvelope> GoldenEnvelopes() {
  static const auto& options = *new std::map<std::string, std::pair<std::string, double>>{
      {"KELLER_JORDAN 5", {"keller_jordan", 1}},
      {"YOU 5", {"you", 1}},
      {"TURBO (YOU, last 4)", {"turbo", 1}},
      {"POLAR_EXPRESS 5, safety 1.05", {"polar_express", 1.05}},
      {"POLAR_EXPRESS 5, raw", {"polar_express", 1}},
      {"CONVERGENT 12", {"convergent", 1}}};
  std::vector<GoldenEnvelope> envelopes;
  const json file = Load("scalar_envelopes.json");
  for (const auto& [name, entry] : file.items()) {
    GoldenEnvelope envelope;
    envelope.name = name;
    std::tie(envelope.coefficients, envelope.safety) = options.at(name);
    for (const json& k : entry["coefficients"]) envelope.schedule.push_back({k[0], k[1], k[2]});
    for (const json& point : entry["points"]) envelope.points.push_back({point[0], point[1]});
    envelopes.push_back(std::move(envelope));
  }
  return envelopes;
}

Dense GoldenPolar(const std::string& name) {
  return ToDense(Load("rules.json")["polar_of_grad0_3x5"][name]);
}

}  // namespace stiefel
