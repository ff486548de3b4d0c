#include "cli/apply_report.h"

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_split.h"
#include "cli/apply_output.h"
#include "cli/table.h"
#include "plan/nearest.h"

namespace stiefel {
namespace {

using nlohmann::json;

// Over all parameters and steps.
struct Totals {
  int64_t matrices = 0, elements = 0;  // of one step
  std::optional<double> update_rms;    // over all elements of all steps in which it was measured
  std::optional<double> residual;      // the largest
  std::string residual_place;          // "NAME, step 3"
};

Totals TotalsOf(const ApplyReportInput& input) {
  Totals totals;
  double sum = 0, elements = 0;
  for (size_t p = 0; p < input.parameters->size(); ++p) {
    const ApplyParameter& parameter = (*input.parameters)[p];
    const int64_t size = parameter.matrices * parameter.rows * parameter.cols;
    totals.matrices += parameter.matrices;
    totals.elements += size;
    for (const ApplyStepFigures& f : input.figures[p]) {
      if (f.update_rms.has_value()) {
        sum += *f.update_rms * *f.update_rms * static_cast<double>(size);
        elements += static_cast<double>(size);
      }
      if (!f.residual.has_value() || *f.residual <= totals.residual.value_or(-1)) continue;
      totals.residual = f.residual;
      totals.residual_place =
          absl::StrCat(PrintableName(parameter.gradients.name), ", step ", f.step);
    }
  }
  if (elements > 0) totals.update_rms = std::sqrt(sum / elements);
  return totals;
}

std::string Number(std::optional<double> number) {
  return number.has_value() ? absl::StrFormat("%.4g", *number) : "-";
}

std::string MatricesText(const ApplyParameter& p) {
  return absl::StrCat(p.matrices == 1 ? "" : absl::StrCat(p.matrices, " of "), p.rows, " x ",
                      p.cols);
}

std::string ExplanationText(const ApplyParameter& p, const std::string& explanation) {
  std::string text = absl::StrCat(PrintableName(p.gradients.name), " (", MatricesText(p),
                                  "): ", DescribeRule(p.rule), "\n");
  if (p.rule.period > 1) {
    absl::StrAppend(&text, "  refreshes in steps t with (t-1) mod ", p.rule.period, " == ", p.phase,
                    "\n");
  }
  for (absl::string_view line : absl::StrSplit(explanation, '\n', absl::SkipEmpty())) {
    absl::StrAppend(&text, "  ", line, "\n");
  }
  return text;
}

json NumberJson(std::optional<double> number) {
  return number.has_value() ? json(*number) : json(nullptr);
}

json FiguresJson(const ApplyStepFigures& f) {
  json singular = nullptr;
  if (f.singular_values.has_value()) {
    singular = {{"min", f.singular_values->min},
                {"median", NumberJson(f.singular_values->median)},
                {"max", f.singular_values->max},
                {"exact", f.singular_values->exact}};
  }
  return {{"step", f.step},
          {"kind", f.kind},
          {"residual", NumberJson(f.residual)},
          {"singular_values", singular},
          {"update_rms", NumberJson(f.update_rms)},
          {"delta_max", f.delta_max}};
}

}  // namespace

std::string ApplyText(const ApplyReportInput& input) {
  std::string text;
  for (size_t p = 0; p < input.explanations.size(); ++p) {
    text += ExplanationText((*input.parameters)[p], input.explanations[p]);
  }
  if (!text.empty()) text += "\n";
  Table table({"parameter", "step", "kind", "residual", "sv min", "sv median", "sv max",
               "update RMS", "max |delta|"});
  bool estimated = false;
  for (size_t p = 0; p < input.parameters->size(); ++p) {
    const std::string name = PrintableName((*input.parameters)[p].gradients.name);
    for (const ApplyStepFigures& f : input.figures[p]) {
      std::string min = "-", median = "-", max = "-";
      if (f.singular_values.has_value()) {
        const char* mark = f.singular_values->exact ? "" : "~";
        estimated = estimated || !f.singular_values->exact;
        min = mark + Number(f.singular_values->min);
        median = Number(f.singular_values->median);
        max = mark + Number(f.singular_values->max);
      }
      table.AddRow({name, absl::StrCat(f.step), f.kind, Number(f.residual), min, median, max,
                    Number(f.update_rms), Number(f.delta_max)});
    }
  }
  text += table.Text();
  if (estimated) {
    text +=
        "~ estimated: the smallest from above, the largest from below (matrices this large are "
        "not decomposed)\n";
  }
  const Totals totals = TotalsOf(input);
  absl::StrAppend(&text, "all: ", input.parameters->size(), " parameters, ", totals.matrices,
                  " matrices, ", Count(totals.elements), " elements, ",
                  input.parameters->front().gradients.steps.size(), " steps; update RMS ",
                  Number(totals.update_rms));
  if (totals.residual.has_value()) {
    absl::StrAppend(&text, "; largest residual ", Number(totals.residual), " (",
                    totals.residual_place, ")");
  }
  absl::StrAppend(&text, "\n", input.backend, " (", input.device, "): written to ", input.out,
                  "\n");
  return text;
}

std::string ApplyJson(const ApplyReportInput& input) {
  json parameters = json::array();
  for (size_t p = 0; p < input.parameters->size(); ++p) {
    const ApplyParameter& parameter = (*input.parameters)[p];
    json steps = json::array();
    for (const ApplyStepFigures& f : input.figures[p]) steps.push_back(FiguresJson(f));
    json entry = {{"name", parameter.gradients.name}, {"shape", parameter.gradients.shape},
                  {"matrices", parameter.matrices},   {"rows", parameter.rows},
                  {"cols", parameter.cols},           {"rule", RuleText(parameter.rule)},
                  {"phase", parameter.phase},         {"steps", std::move(steps)}};
    if (!input.explanations.empty()) entry["explanation"] = input.explanations[p];
    parameters.push_back(std::move(entry));
  }
  const Totals totals = TotalsOf(input);
  const json report = {{"backend", input.backend},
                       {"device", input.device},
                       {"out", input.out},
                       {"parameters", std::move(parameters)},
                       {"totals",
                        {{"matrices", totals.matrices},
                         {"elements", totals.elements},
                         {"update_rms", NumberJson(totals.update_rms)},
                         {"residual", NumberJson(totals.residual)}}}};
  return report.dump(2) + "\n";
}

}  // namespace stiefel
