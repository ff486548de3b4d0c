#include "tests/bench/quality_study/study.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include "common/mutex.h"
#include "common/status.h"
#include "kernels/cpu/cpu_backend.h"
#include "kernels/cpu/thread_pool.h"
#include "tests/bench/quality_study/local_optimizer.h"

namespace stiefel::quality {
namespace {

constexpr double kDiverged = std::numeric_limits<double>::infinity();
constexpr uint64_t kFirstFinalSeed = 1000;  // beyond all tuning seeds

struct Run {
  const Rule* rule;
  double lr;
  uint64_t seed;
  double value = kDiverged;
};

// Training to the end with a learning rate that falls linearly to zero.
absl::StatusOr<double> Train(const ProblemInfo& info, const MakeProblem& make, const Run& run) {
  STIEFEL_ASSIGN_OR_RETURN(const std::unique_ptr<Backend> backend, CreateCpuBackend(1));
  STIEFEL_ASSIGN_OR_RETURN(const std::unique_ptr<Problem> problem, make(run.seed));
  STIEFEL_ASSIGN_OR_RETURN(Rule other, PresetRule("adamw"));
  other.lr = info.other_lr;
  Rule rule = *run.rule;
  rule.lr = run.lr;
  STIEFEL_ASSIGN_OR_RETURN(LocalOptimizer optimizer,
                           LocalOptimizer::Create(problem->arrays(), rule, other, backend.get()));
  for (int64_t step = 1; step <= info.steps; ++step) {
    problem->Gradients(step);
    const double left = 1 - static_cast<double>(step - 1) / static_cast<double>(info.steps);
    STIEFEL_ASSIGN_OR_RETURN(const bool finite, optimizer.Step(step, left));
    if (!finite) return kDiverged;
  }
  const double value = problem->Evaluate();
  return std::isfinite(value) ? value : kDiverged;
}

absl::Status TrainAll(const ProblemInfo& info, const MakeProblem& make, ThreadPool* pool,
                      std::vector<Run>* runs) {
  Mutex mutex;
  absl::Status first_error;
  pool->ParallelFor(static_cast<int64_t>(runs->size()), [&](int64_t i) {
    const absl::StatusOr<double> value = Train(info, make, (*runs)[i]);
    if (value.ok()) {
      (*runs)[i].value = *value;
      return;
    }
    MutexLock lock(&mutex);
    if (first_error.ok()) first_error = value.status();
  });
  return first_error;
}

Score Tuned(const Contender& contender, const std::vector<Run>& runs, size_t first,
            const Budget& budget) {
  Score score;
  score.contender = contender.name;
  int best = 0;
  for (int point = 0; point < budget.grid_points; ++point) {
    double sum = 0;
    for (int seed = 0; seed < budget.tuning_seeds; ++seed) {
      sum += runs[first + point * budget.tuning_seeds + seed].value;
    }
    score.grid_lr.push_back(runs[first + point * budget.tuning_seeds].lr);
    score.grid_value.push_back(sum / budget.tuning_seeds);
    if (score.grid_value[point] < score.grid_value[best]) best = point;
  }
  score.best_lr = score.grid_lr[best];
  score.at_edge = best == 0 || best == budget.grid_points - 1;
  return score;
}

}  // namespace

absl::StatusOr<std::vector<Score>> Compare(const ProblemInfo& info, const MakeProblem& make,
                                           const std::vector<Contender>& contenders,
                                           const Budget& budget) {
  ThreadPool pool(budget.threads);
  std::vector<Run> tuning;
  for (const Contender& contender : contenders) {
    for (int point = 0; point < budget.grid_points; ++point) {
      const double lr = contender.rule.lr * std::pow(10.0, (point - budget.grid_points / 2) / 2.0);
      for (int seed = 0; seed < budget.tuning_seeds; ++seed) {
        tuning.push_back({&contender.rule, lr, static_cast<uint64_t>(seed + 1)});
      }
    }
  }
  STIEFEL_RETURN_IF_ERROR(TrainAll(info, make, &pool, &tuning));

  std::vector<Score> scores;
  std::vector<Run> final_runs;
  for (size_t i = 0; i < contenders.size(); ++i) {
    const size_t runs_each = static_cast<size_t>(budget.grid_points) * budget.tuning_seeds;
    scores.push_back(Tuned(contenders[i], tuning, i * runs_each, budget));
    for (int seed = 0; seed < budget.final_seeds; ++seed) {
      final_runs.push_back({&contenders[i].rule, scores.back().best_lr, kFirstFinalSeed + seed});
    }
  }
  STIEFEL_RETURN_IF_ERROR(TrainAll(info, make, &pool, &final_runs));
  for (size_t i = 0; i < scores.size(); ++i) {
    std::vector<double> values;
    for (int seed = 0; seed < budget.final_seeds; ++seed)
      values.push_back(final_runs[i * budget.final_seeds + seed].value);
    std::sort(values.begin(), values.end());
    scores[i].min = values.front();
    scores[i].median = values[values.size() / 2];
    scores[i].max = values.back();
  }
  return scores;
}

}  // namespace stiefel::quality
