// RunSpec under another placement.
#include <algorithm>

#include "absl/strings/str_cat.h"
#include "common/errors.h"
#include "server/run_spec.h"

namespace stiefel {

v1::Placement RunSpec::placement() const {
  v1::Placement placement;
  placement.set_epoch(opened_.placement_epoch());
  *placement.mutable_servers() = opened_.servers();
  *placement.mutable_owners() = opened_.owners();
  *placement.mutable_replicas() = opened_.replicas();
  return placement;
}

// The placement that a server comes into the run from, if it does.
absl::Status RunSpec::CheckMovesIn(const v1::OpenRunRequest& opened) {
  if (!opened.has_moves_in()) return absl::OkStatus();
  const v1::Placement& in_force = opened.moves_in().placement();
  if (in_force.epoch() >= opened.placement_epoch() ||
      in_force.owners_size() != opened.owners_size()) {
    return absl::InvalidArgumentError(absl::StrCat(
        "moves_in from placement ", in_force.epoch(), " with ", in_force.owners_size(),
        " owners into placement ", opened.placement_epoch(), " with ", opened.owners_size()));
  }
  for (const int32_t owner : in_force.owners()) {
    if (owner < 0 || owner >= in_force.servers_size())
      return IndexOutOfRange("owner in moves_in", owner, in_force.servers_size());
  }
  if (opened.moves_in().after_step() < opened.start_step() - 1) {
    return absl::InvalidArgumentError(
        absl::StrCat("moves_in after step ", opened.moves_in().after_step(),
                     ", but the run starts with step ", opened.start_step()));
  }
  return absl::OkStatus();
}

absl::StatusOr<std::shared_ptr<const RunSpec>> RunSpec::Moved(
    const v1::Placement& placement) const {
  if (placement.epoch() <= opened_.placement_epoch()) {
    return absl::InvalidArgumentError(
        absl::StrCat("placement ", placement.epoch(), " is not above placement ",
                     opened_.placement_epoch(), ", which is in force"));
  }
  v1::OpenRunRequest next = opened_;
  next.clear_moves_in();
  next.set_placement_epoch(placement.epoch());
  *next.mutable_servers() = placement.servers();
  *next.mutable_owners() = placement.owners();
  *next.mutable_replicas() = placement.replicas();
  const auto here = std::find(placement.servers().begin(), placement.servers().end(),
                              opened_.servers(opened_.server_index()));
  const bool stays = here != placement.servers().end();
  next.set_server_index(stays ? static_cast<int32_t>(here - placement.servers().begin()) : 0);
  auto spec = Create(next);
  if (!spec.ok() || stays) return spec;
  return std::shared_ptr<const RunSpec>();
}

}  // namespace stiefel
