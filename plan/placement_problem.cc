#include "plan/placement_problem.h"

#include <cmath>
#include <limits>
#include <map>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/checked_math.h"
#include "common/status.h"
#include "plan/cost.h"
#include "plan/pairs.h"
#include "plan/phases.h"

namespace stiefel {
namespace {

constexpr size_t kMaxServers = size_t{1} << 20;

absl::Status CheckServers(const PlanRequest& request) {
  if (request.servers.empty() || request.servers.size() > kMaxServers) {
    return absl::InvalidArgumentError(
        absl::StrCat("a plan needs 1 to ", kMaxServers, " servers, got ", request.servers.size()));
  }
  for (size_t s = 0; s < request.servers.size(); ++s) {
    const ServerSpec& server = request.servers[s];
    if (!std::isfinite(server.speed) || server.speed <= 0) {
      return absl::InvalidArgumentError(
          absl::StrCat("server ", s, ": speed ", server.speed, " is not positive"));
    }
    if (server.memory_bytes <= 0) {
      return absl::InvalidArgumentError(
          absl::StrCat("server ", s, ": memory of ", server.memory_bytes, " bytes"));
    }
  }
  if (request.push_copies < 1) {
    return absl::InvalidArgumentError(absl::StrCat("push_copies is ", request.push_copies,
                                                   ": each element is pushed by someone"));
  }
  return absl::OkStatus();
}

absl::StatusOr<MatrixBytes> Bytes(const PlanRequest& request, const PlanMatrix& matrix) {
  int64_t pushed = 0;
  if (!CheckedMul(matrix.rows, matrix.cols, &pushed) ||
      !CheckedMul(pushed, request.push_copies, &pushed)) {
    pushed = std::numeric_limits<int64_t>::max();  // BytesOfMatrix refuses it, with the shape.
  }
  return BytesOfMatrix(matrix, pushed, request.memory);
}

// Both factors of a pair may be in flight at once, so that their workspaces add up too.
absl::Status AddMember(const PlanRequest& request, int32_t matrix, int64_t partner_elements,
                       PlacementProblem* problem) {
  PlanMatrix sized = request.matrices[matrix];
  sized.partner_elements = partner_elements;
  STIEFEL_ASSIGN_OR_RETURN(const MatrixBytes bytes, Bytes(request, sized));
  MatrixBytes& sum = problem->bytes.back();
  sum.state = SaturatingAdd(sum.state, bytes.state);
  sum.staged = SaturatingAdd(sum.staged, bytes.staged);
  sum.weights = SaturatingAdd(sum.weights, bytes.weights);
  sum.push = SaturatingAdd(sum.push, bytes.push);
  sum.pull = SaturatingAdd(sum.pull, bytes.pull);
  sum.workspace = SaturatingAdd(sum.workspace, bytes.workspace);
  problem->refresh.back() += StepCost(sized, StepKind::kRefresh).Units();
  problem->off.back() += StepCost(sized, StepKind::kOffRefresh).Units();
  problem->items.back().push_back(matrix);
  return absl::OkStatus();
}

}  // namespace

std::string PlacementProblem::Describe(int32_t item) const {
  std::string text;
  for (int32_t matrix : items[item]) {
    const PlanMatrix& m = matrices[matrix];
    absl::StrAppend(&text, text.empty() ? "" : " and ", m.name, " (", m.rows, " x ", m.cols, ")");
  }
  return text;
}

absl::StatusOr<PlacementProblem> MakePlacementProblem(const PlanRequest& request) {
  STIEFEL_RETURN_IF_ERROR(CheckServers(request));
  PlacementProblem problem(request);
  STIEFEL_ASSIGN_OR_RETURN(problem.phases, AssignPhases(request.matrices));
  STIEFEL_ASSIGN_OR_RETURN(const std::vector<int32_t> partners, FindPairs(request.matrices));
  std::map<std::pair<int64_t, int64_t>, std::vector<int32_t>> sets;  // By (-period, phase).
  for (int32_t i = 0; i < static_cast<int32_t>(request.matrices.size()); ++i) {
    const int32_t partner = partners[i];
    if (partner >= 0 && partner < i) continue;  // Came with its other factor.
    problem.items.emplace_back();
    problem.bytes.emplace_back();
    problem.refresh.push_back(0);
    problem.off.push_back(0);
    const auto elements = [&](int32_t matrix) {
      return SaturatingMul(request.matrices[matrix].rows, request.matrices[matrix].cols);
    };
    STIEFEL_RETURN_IF_ERROR(AddMember(request, i, partner < 0 ? 0 : elements(partner), &problem));
    if (partner >= 0) STIEFEL_RETURN_IF_ERROR(AddMember(request, partner, elements(i), &problem));
    sets[{-request.matrices[i].rule.period, problem.phases[i]}].push_back(
        static_cast<int32_t>(problem.items.size()) - 1);
  }
  problem.set_of.resize(problem.items.size());
  for (auto& [key, members] : sets) {
    for (int32_t member : members) {
      problem.set_of[member] = static_cast<int32_t>(problem.sets.size());
    }
    problem.sets.push_back(std::move(members));
  }
  problem.cycle = CycleSteps(request.matrices);
  return problem;
}

}  // namespace stiefel
