#ifndef STIEFEL_CLI_PLAN_REPORT_H_
#define STIEFEL_CLI_PLAN_REPORT_H_

#include <string>
#include <vector>

#include "plan/explain.h"
#include "plan/placement.h"
#include "plan/simulate.h"

namespace stiefel {

// Tables for people.
std::string PlanText(const std::string& model, const PlanRequest& request, const Machine& machine,
                     const Explanation& explanation, const std::vector<SimulatedCount>& simulated);

// One JSON object: the same numbers unrounded (bytes, flops, seconds), and the phase of every
// matrix and the owner of every shard.
std::string PlanJson(const std::string& model, const PlanRequest& request, const Plan& plan,
                     const Machine& machine, const Explanation& explanation,
                     const std::vector<SimulatedCount>& simulated);

}  // namespace stiefel

#endif  // STIEFEL_CLI_PLAN_REPORT_H_
