// The planner states how much workspace a matrix needs without knowing the kernels; this holds it
// to what they take.
#include <gtest/gtest.h>

#include "kernels/cpu/cpu_backend.h"
#include "kernels/rules/matrix_rule.h"
#include "plan/memory.h"
#include "plan/rule.h"

namespace stiefel {
namespace {

TEST(WorkspaceBytes, CoverWhatTheKernelsTake) {
  const std::unique_ptr<Backend> backend = *CreateCpuBackend(/*threads=*/1);
  for (const PresetInfo& preset : Presets()) {
    Rule rule = *PresetRule(preset.name);
    for (PolarForm form : {PolarForm::kAuto, PolarForm::kStandard, PolarForm::kGram}) {
      if (rule.family == RuleFamily::kSpectral) rule.form = form;
      for (auto [rows, cols] : {std::pair<int64_t, int64_t>{1, 1},
                                {1, 1000},
                                {1000, 1},
                                {17, 13},
                                {64, 64},
                                {300, 200},
                                {64, 1024},
                                {3000, 40}}) {
        const auto kernel = MatrixRule::Create(rule, rows, cols, backend.get());
        ASSERT_TRUE(kernel.ok()) << kernel.status();
        EXPECT_GE(WorkspaceBytes(rule, rows, cols), (*kernel)->WorkspaceBytes())
            << preset.name << " " << rows << " x " << cols;
      }
    }
  }
}

}  // namespace
}  // namespace stiefel
