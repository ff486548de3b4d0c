#ifndef STIEFEL_CLI_APPLY_REPORT_H_
#define STIEFEL_CLI_APPLY_REPORT_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "cli/apply_rules.h"
#include "cli/singular_summary.h"

namespace stiefel {

// Figures of one parameter in one step, over all its matrices. Unset: not measured, or not of that
// kind of step.
struct ApplyStepFigures {
  int64_t step = 0;
  std::string kind;                // refresh, row_wise, tiled, polora, element_wise
  std::optional<double> residual;  // the largest
  std::optional<SingularSummary> singular_values;
  std::optional<double> update_rms;  // before lr
  double delta_max = 0;              // max |delta|
};

struct ApplyReportInput {
  std::string backend, device, out;
  const std::vector<ApplyParameter>* parameters = nullptr;
  std::vector<std::vector<ApplyStepFigures>> figures;  // of each parameter, step by step
  std::vector<std::string> explanations;               // of each parameter; empty: not asked for
};

// Tables for people.
std::string ApplyText(const ApplyReportInput& input);

// One JSON object: the same numbers unrounded; null for what was not measured.
std::string ApplyJson(const ApplyReportInput& input);

}  // namespace stiefel

#endif  // STIEFEL_CLI_APPLY_REPORT_H_
