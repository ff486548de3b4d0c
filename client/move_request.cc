#include "client/move_request.h"

#include "absl/strings/str_cat.h"
#include "client/plan_inputs.h"
#include "common/status.h"
#include "plan/pairs.h"

namespace stiefel {
namespace {

absl::StatusOr<std::vector<MoveShard>> ShardsOf(const Layout& layout,
                                                const v1::OpenRunRequest& opened) {
  std::vector<PlanMatrix> matrices = PlanMatricesOf(layout);
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
  request.memory = PlanMemoryOf(layout, infos);
  request.max_bytes = layout.options().move_bytes;
  for (size_t s = 0; s < addresses.size(); ++s) {
    const v1::ServerInfo& info = infos[s];
    MoveServer server;
    server.address = addresses[s];
    const ServerSpec spec = PlanServerOf(info);
    server.speed = spec.speed;
    server.memory_bytes = spec.memory_bytes;
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
