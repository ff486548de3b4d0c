#include "client/plan_inputs.h"

#include <algorithm>

namespace stiefel {

std::vector<PlanMatrix> PlanMatricesOf(const Layout& layout) {
  std::vector<PlanMatrix> matrices;
  for (const LayoutMatrix& matrix : layout.matrices()) {
    const ParameterSpec& parameter = layout.parameters()[matrix.parameter];
    matrices.push_back({matrix.name, matrix.rows, matrix.cols, matrix.rule, parameter.push_dtype,
                        parameter.pull_dtype.value_or(parameter.push_dtype)});
  }
  return matrices;
}

MemoryOptions PlanMemoryOf(const Layout& layout, const std::vector<v1::ServerInfo>& infos) {
  MemoryOptions memory;
  memory.weights_mode = layout.options().mode == UpdateMode::kWeights;
  memory.ranks = layout.options().world_size;
  for (const v1::ServerInfo& info : infos) {
    const absl::StatusOr<Staging> staging = ParseStaging(info.staging());
    if (staging.ok() && *staging == Staging::kLazy) memory.staging = Staging::kLazy;
    memory.window_bytes = std::max(memory.window_bytes, info.credit_window_bytes());
  }
  return memory;
}

ServerSpec PlanServerOf(const v1::ServerInfo& info) {
  ServerSpec server;
  if (info.speed() > 0) server.speed = info.speed();
  if (info.memory_limit_bytes() > 0) server.memory_bytes = info.memory_limit_bytes();
  return server;
}

int64_t PushCopies(const Layout& layout) {
  double pushed = 0;
  double model = 0;
  for (const LayoutBlock& block : layout.push()) pushed += static_cast<double>(block.elements());
  for (const LayoutMatrix& matrix : layout.matrices())
    model += static_cast<double>(matrix.rows) * static_cast<double>(matrix.cols);
  const auto copies = static_cast<int64_t>(layout.options().world_size * pushed / model + 0.5);
  return std::clamp<int64_t>(copies, 1, layout.options().world_size);
}

}  // namespace stiefel
