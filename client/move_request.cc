#include "client/move_request.h"

#include <algorithm>
#include <limits>

#include "absl/strings/str_cat.h"
#include "common/status.h"
#include "plan/pairs.h"

namespace stiefel {
namespace {

MemoryOptions MemoryOf(const Layout& layout, const std::vector<v1::ServerInfo>& infos) {
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

// How many ranks push an element, on average: every rank is taken to push as much as this one.
int64_t PushCopies(const Layout& layout) {
  double pushed = 0;
  double model = 0;
  for (const LayoutBlock& block : layout.push()) pushed += static_cast<double>(block.elements());
  for (const LayoutMatrix& matrix : layout.matrices())
    model += static_cast<double>(matrix.rows) * static_cast<double>(matrix.cols);
  const auto copies = static_cast<int64_t>(layout.options().world_size * pushed / model + 0.5);
  return std::clamp<int64_t>(copies, 1, layout.options().world_size);
}

absl::StatusOr<std::vector<MoveShard>> ShardsOf(const Layout& layout,
                                                const v1::OpenRunRequest& opened) {
  std::vector<PlanMatrix> matrices;
  for (const LayoutMatrix& matrix : layout.matrices()) {
    const ParameterSpec& parameter = layout.parameters()[matrix.parameter];
    matrices.push_back({matrix.name, matrix.rows, matrix.cols, matrix.rule, parameter.push_dtype,
                        parameter.pull_dtype.value_or(parameter.push_dtype)});
  }
  STIEFEL_RETURN_IF_ERROR(ResolvePairs(&matrices));
  STIEFEL_ASSIGN_OR_RETURN(const std::vector<int32_t> partners, FindPairs(matrices));
  const int64_t copies = PushCopies(layout);
  std::vector<int32_t> first_shard(matrices.size(), -1);
  std::vector<int64_t> parts(matrices.size(), 0);
  std::vector<MoveShard> shards;
  for (const LayoutShard& part : layout.shards()) {
    MoveShard shard;
    shard.shard = matrices[part.matrix];
    shard.shard.rows = part.place.rows();
    shard.shard.cols = part.place.cols();
    shard.shard.whole_rows = layout.matrices()[part.matrix].rows;
    shard.shard.whole_cols = layout.matrices()[part.matrix].cols;
    shard.phase = opened.phases(part.matrix);
    shard.pushed_elements = part.place.Area() * copies;
    if (first_shard[part.matrix] < 0)
      first_shard[part.matrix] = static_cast<int32_t>(shards.size());
    shards.push_back(std::move(shard));
  }
  for (const LayoutShard& part : layout.shards()) ++parts[part.matrix];
  for (size_t s = 0; s < shards.size(); ++s)
    shards[s].shard.shards = parts[layout.shards()[s].matrix];
  for (size_t s = 0; s < shards.size(); ++s) {  // pairs are never cut
    const int32_t partner = partners[layout.shards()[s].matrix];
    if (partner >= 0) shards[s].with = first_shard[partner];
  }
  return shards;
}

}  // namespace

absl::StatusOr<MoveRequest> MakeMoveRequest(const Layout& layout, const v1::OpenRunRequest& opened,
                                            const std::vector<std::string>& addresses,
                                            const std::vector<v1::ServerInfo>& infos,
                                            const MoveWish& wish) {
  MoveRequest request;
  STIEFEL_ASSIGN_OR_RETURN(request.shards, ShardsOf(layout, opened));
  request.owners.assign(opened.owners().begin(), opened.owners().end());
  request.memory = MemoryOf(layout, infos);
  request.max_bytes = layout.options().move_bytes;
  for (size_t s = 0; s < addresses.size(); ++s) {
    const v1::ServerInfo& info = infos[s];
    MoveServer server;
    server.address = addresses[s];
    server.speed = info.speed() > 0 ? info.speed() : 1;
    server.memory_bytes = info.memory_limit_bytes() > 0 ? info.memory_limit_bytes()
                                                        : std::numeric_limits<int64_t>::max();
    server.drain = wish.drain.count(server.address) > 0;
    server.fill = wish.add.count(server.address) > 0 && !server.drain;
    const bool comes_in = s >= static_cast<size_t>(opened.servers_size());
    if (comes_in && info.draining())
      return absl::InvalidArgumentError(
          absl::StrCat("server ", server.address, " was told to stop"));
    for (const v1::ServerInfo::HeldRun& run : info.runs()) {
      if (!comes_in || run.run_uid() == opened.run_uid()) continue;
      return absl::InvalidArgumentError(absl::StrCat("server ", server.address, " holds run \"",
                                                     run.name(), "\" (uid ", run.run_uid(), ")"));
    }
    request.servers.push_back(std::move(server));
  }
  return request;
}

v1::Placement PlacementOf(const MoveRequest& request, const MovePlan& plan, int64_t epoch) {
  v1::Placement placement;
  placement.set_epoch(epoch);
  const std::set<int32_t> owning(plan.owners.begin(), plan.owners.end());
  std::vector<int32_t> index(request.servers.size(), -1);
  for (int32_t s = 0; s < static_cast<int32_t>(request.servers.size()); ++s) {
    if (request.servers[s].drain && owning.count(s) == 0) continue;
    index[s] = placement.servers_size();
    placement.add_servers(request.servers[s].address);
  }
  for (const int32_t owner : plan.owners) placement.add_owners(index[owner]);
  return placement;
}

void SetPlacement(const v1::Placement& placement, v1::OpenRunRequest* opened) {
  opened->set_placement_epoch(placement.epoch());
  *opened->mutable_servers() = placement.servers();
  *opened->mutable_owners() = placement.owners();
  *opened->mutable_replicas() = placement.replicas();
}

v1::Placement PlacementOf(const v1::OpenRunRequest& opened) {
  v1::Placement placement;
  placement.set_epoch(opened.placement_epoch());
  *placement.mutable_servers() = opened.servers();
  *placement.mutable_owners() = opened.owners();
  *placement.mutable_replicas() = opened.replicas();
  return placement;
}

}  // namespace stiefel
