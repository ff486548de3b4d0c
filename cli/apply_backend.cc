#include "cli/apply_backend.h"

#include <algorithm>
#include <atomic>
#include <thread>

namespace stiefel {

std::vector<ApplyMatrix> MatricesOf(const std::vector<ApplyParameter>& parameters) {
  std::vector<int64_t> first;
  int64_t count = 0;
  for (const ApplyParameter& parameter : parameters) {
    first.push_back(count);
    count += parameter.matrices;
  }
  std::vector<ApplyMatrix> matrices;
  for (const ApplyParameter& parameter : parameters) {
    for (int64_t i = 0; i < parameter.matrices; ++i) {
      const int64_t partner = parameter.partner < 0 ? -1 : first[parameter.partner] + i;
      matrices.push_back({&parameter, i, partner});
    }
  }
  return matrices;
}

StepArgs ArgsOfStep(const ApplyParameter& parameter, int64_t step) {
  StepArgs args;
  args.step = step;
  args.commits = step - 1;
  args.kind = KindAtStep(parameter.rule, parameter.phase, step);
  args.lr = parameter.rule.lr;
  args.weight_decay = parameter.rule.weight_decay;
  return args;
}

void OnThreads(int threads, int64_t count, const std::function<void(int64_t)>& body) {
  std::atomic<int64_t> next{0};
  const auto work = [&] {
    for (int64_t i = next++; i < count; i = next++) body(i);
  };
  std::vector<std::thread> others;
  for (int64_t t = 1; t < std::min<int64_t>(threads, count); ++t) others.emplace_back(work);
  work();
  for (std::thread& thread : others) thread.join();
}

}  // namespace stiefel
