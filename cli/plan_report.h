#ifndef STIEFEL_CLI_PLAN_REPORT_H_
#define STIEFEL_CLI_PLAN_REPORT_H_

#include <string>

#include "plan/explain.h"
#include "plan/placement.h"

namespace stiefel {

// Tables for people.
std::string PlanText(const std::string& model, const PlanRequest& request, const Machine& machine,
                     const Explanation& explanation);

// One JSON object: the same numbers unrounded (bytes, flops, seconds), and phase and owner of every
// matrix.
std::string PlanJson(const std::string& model, const PlanRequest& request, const Plan& plan,
                     const Machine& machine, const Explanation& explanation);

}  // namespace stiefel

#endif  // STIEFEL_CLI_PLAN_REPORT_H_
