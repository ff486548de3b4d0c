#include "server/admission.h"

#include <gtest/gtest.h>

#include "plan/memory.h"
#include "server/run_machine_testing.h"

namespace stiefel {
namespace {

// The workspace of factor A grows with B, also where A itself stays as it is.
TEST(AdmitRun, CountsTheOtherFactor) {
  AdmissionLimits limits;
  limits.memory_limit_bytes = int64_t{1} << 40;
  limits.matrices_in_flight = 2;
  MemoryOptions options;
  options.weights_mode = true;
  const auto admitted = [&](int64_t rows_of_b) {
    v1::OpenRunRequest request = testing::OpenPair();
    request.mutable_parameters(1)->set_shape(0, rows_of_b);
    request.set_owners(2, 1);
    const auto spec = RunSpec::Create(request);
    EXPECT_TRUE(spec.ok()) << spec.status();
    return AdmitRun(**spec, {}, limits)->bytes;
  };
  const auto of_b = [&](int64_t rows) {
    PlanMatrix b = {"m1", rows, 4, *PresetRule("polora")};
    b.partner_elements = 4 * 20;
    const MatrixBytes bytes = *BytesOfMatrix(b, rows * 4, options);
    return bytes.Resident() + bytes.workspace;
  };
  const auto workspace_of_a = [](int64_t rows_of_b) {
    return WorkspaceBytes(*PresetRule("polora"), 4, 20, rows_of_b * 4);
  };
  ASSERT_GT(workspace_of_a(3000), workspace_of_a(2000));
  EXPECT_EQ(admitted(3000) - admitted(2000),
            of_b(3000) - of_b(2000) + workspace_of_a(3000) - workspace_of_a(2000));
}

}  // namespace
}  // namespace stiefel
