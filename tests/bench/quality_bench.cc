// ./run bench quality: which rule gets how far, each tuned alike, on problems that separate them;
// and which row-wise step does best between refreshes.
#include <cstdio>
#include <fstream>
#include <iostream>

#include "CLI/CLI.hpp"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "common/status.h"
#include "nlohmann/json.hpp"
#include "tests/bench/quality_study/study.h"

namespace stiefel::quality {
namespace {

using nlohmann::json;

absl::StatusOr<Contender> Make(const std::string& name, const std::string& preset, double lr,
                               const std::vector<std::pair<std::string, std::string>>& options) {
  STIEFEL_ASSIGN_OR_RETURN(Rule rule, PresetRule(preset));
  for (const auto& [key, value] : options) STIEFEL_RETURN_IF_ERROR(SetOption(rule, key, value));
  rule.lr = lr;
  rule.weight_decay = 0;
  return Contender{name, rule};
}

// Centres of the grids; with nine points they reach two decades either way.
absl::StatusOr<std::vector<Contender>> Rules() {
  std::vector<Contender> rules;
  const struct {
    const char* name;
    double lr;
    std::vector<std::pair<std::string, std::string>> options;
  } list[] = {
      {"sgd", 0.1, {{"beta", "0.9"}}},
      {"adamw", 3e-3, {}},
      {"lion", 1e-3, {}},
      {"muon", 0.02, {}},
      {"periodic_rowwise_muon", 0.02, {}},
      {"muonbp", 0.02, {{"tile", "32"}}},
      {"normuon", 0.02, {}},
      {"turbo_muon", 0.02, {}},
      {"samuon", 0.005, {}},
      {"samuon_lite", 0.005, {}},
      {"dion2", 0.02, {}},
      {"dion3", 0.02, {}},
      {"himuon", 0.02, {{"tile", "32"}}},
  };
  for (const auto& entry : list) {
    STIEFEL_ASSIGN_OR_RETURN(Contender contender,
                             Make(entry.name, entry.name, entry.lr, entry.options));
    rules.push_back(std::move(contender));
  }
  return rules;
}

absl::StatusOr<std::vector<Contender>> RowWiseVariants() {
  std::vector<Contender> variants;
  STIEFEL_ASSIGN_OR_RETURN(Contender muon, Make("muon (K = 1)", "muon", 0.02, {}));
  variants.push_back(std::move(muon));
  const struct {
    const char *scale, *rms;
  } scales[] = {{"match_polar_fro", nullptr}, {"unit", nullptr}, {"rms", "0.2"}};
  for (const auto& scale : scales) {
    for (const char* ratio : {"0", "0.1", "0.3", "1", "3"}) {
      std::vector<std::pair<std::string, std::string>> options = {{"row_scale", scale.scale},
                                                                  {"off_refresh_lr_ratio", ratio}};
      if (scale.rms != nullptr) options.emplace_back("row_rms", scale.rms);
      STIEFEL_ASSIGN_OR_RETURN(Contender variant, Make(absl::StrCat(scale.scale, " x ", ratio),
                                                       "periodic_rowwise_muon", 0.02, options));
      variants.push_back(std::move(variant));
    }
  }
  return variants;
}

json Json(const std::vector<Score>& scores) {
  json list = json::array();
  const auto number = [](double value) { return std::isfinite(value) ? json(value) : json(); };
  for (const Score& s : scores) {
    json grid = json::array();
    for (size_t i = 0; i < s.grid_lr.size(); ++i)
      grid.push_back({{"lr", s.grid_lr[i]}, {"value", number(s.grid_value[i])}});
    list.push_back({{"rule", s.contender},
                    {"best_lr", s.best_lr},
                    {"at_edge", s.at_edge},
                    {"median", number(s.median)},
                    {"min", number(s.min)},
                    {"max", number(s.max)},
                    {"grid", grid}});
  }
  return list;
}

void Print(const std::string& title, const std::vector<Score>& scores) {
  std::cout << "\n" << title << "\n";
  for (const Score& s : scores) {
    std::cout << absl::StrFormat("  %-28s %10.4g  [%.4g, %.4g]  lr %.3g%s\n", s.contender, s.median,
                                 s.min, s.max, s.best_lr, s.at_edge ? " (edge of the grid)" : "");
  }
  std::cout.flush();
}

struct Study {
  ProblemInfo info;
  MakeProblem make;
};

absl::StatusOr<json> RunStudy(const Study& study, const Budget& budget) {
  STIEFEL_ASSIGN_OR_RETURN(const std::vector<Contender> rules, Rules());
  STIEFEL_ASSIGN_OR_RETURN(const std::vector<Contender> variants, RowWiseVariants());
  STIEFEL_ASSIGN_OR_RETURN(const std::vector<Score> scores,
                           Compare(study.info, study.make, rules, budget));
  Print(absl::StrCat(study.info.name, ": ", study.info.metric), scores);
  STIEFEL_ASSIGN_OR_RETURN(const std::vector<Score> row_wise,
                           Compare(study.info, study.make, variants, budget));
  Print(absl::StrCat(study.info.name,
                     ", row-wise steps of periodic_rowwise_muon (row_scale x ratio)"),
        row_wise);
  return json{{"problem", study.info.name},  {"what", study.info.what},
              {"metric", study.info.metric}, {"steps", study.info.steps},
              {"rules", Json(scores)},       {"row_wise", Json(row_wise)}};
}

absl::Status Run(const std::string& text, const std::string& file, const Budget& budget) {
  const Study studies[] = {
      {FactorisationInfo(),
       [](uint64_t seed) -> absl::StatusOr<std::unique_ptr<Problem>> {
         return MakeFactorisation(seed);
       }},
      {LinearNetworkInfo(),
       [](uint64_t seed) -> absl::StatusOr<std::unique_ptr<Problem>> {
         return MakeLinearNetwork(seed);
       }},
      {ByteLmInfo(), [&](uint64_t seed) { return MakeByteLm(text, seed); }},
  };
  json result = {{"grid_points", budget.grid_points},
                 {"tuning_seeds", budget.tuning_seeds},
                 {"final_seeds", budget.final_seeds},
                 {"problems", json::array()}};
  for (const Study& study : studies) {
    STIEFEL_ASSIGN_OR_RETURN(json one, RunStudy(study, budget));
    result["problems"].push_back(std::move(one));
  }
  if (file.empty()) return absl::OkStatus();
  std::ofstream out(file);
  out << result.dump(1) << "\n";
  out.close();
  return out ? absl::OkStatus() : absl::UnavailableError(absl::StrCat("cannot write ", file));
}

}  // namespace
}  // namespace stiefel::quality

int main(int argc, char** argv) {
  CLI::App app("Compares the rules on controlled problems, each with the same tuning budget.");
  std::string text = "/tmp/stiefel-kjv.txt", file;
  stiefel::quality::Budget budget;
  app.add_option("--text", text, "The King James text; printed by bible-kjv where missing")
      ->capture_default_str();
  app.add_option("--json", file, "Write all figures here");
  app.add_option("--grid", budget.grid_points, "Learning rates per rule, half a decade apart")
      ->check(CLI::Range(1, 99))
      ->capture_default_str();
  app.add_option("--tuning-seeds", budget.tuning_seeds, "Runs of each learning rate")
      ->check(CLI::Range(1, 1000))
      ->capture_default_str();
  app.add_option("--seeds", budget.final_seeds, "Runs of the best learning rate")
      ->check(CLI::Range(1, 1000))
      ->capture_default_str();
  app.add_option("--threads", budget.threads, "Runs at once")
      ->check(CLI::Range(1, 256))
      ->capture_default_str();
  CLI11_PARSE(app, argc, argv);
  const absl::Status status = stiefel::quality::Run(text, file, budget);
  if (!status.ok()) std::cerr << "quality: " << status.message() << "\n";
  return status.ok() ? 0 : 1;
}
