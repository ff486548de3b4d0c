// What a person may know of a run.
#include <algorithm>
#include <utility>

#include "server/run_host.h"

namespace stiefel {

void RunHost::FillHeldRun(v1::ServerInfo::HeldRun* held) const {
  MutexLock lock(&mutex_);
  const int64_t now = Now();
  held->set_name(spec_->opened().name());
  held->set_run_uid(spec_->opened().run_uid());
  held->set_start_step(spec_->opened().start_step());
  held->set_last_consumed_step(machine_.consumed_step());
  held->set_placement_epoch(machine_.placement_epoch());
  held->set_world_size(spec_->world_size());
  *held->mutable_servers() = PlacementNow().placement().servers();
  held->set_server_index(machine_.away() ? -1 : spec_->opened().server_index());
  for (const RankState& rank : machine_.ranks())
    held->add_largest_generation(rank.incarnation.generation);
  held->set_live(machine_.AnyLive(now));
  held->set_release_seconds(machine_.ReleaseSeconds(now));
}

double RunHost::ReleaseSeconds() const {
  MutexLock lock(&mutex_);
  return machine_.ReleaseSeconds(Now());
}

int64_t RunHost::declared_bytes() const {
  MutexLock lock(&mutex_);
  return admitted_.bytes;
}

int64_t RunHost::open_streams() const {
  MutexLock lock(&mutex_);
  return static_cast<int64_t>(controls_.size() + data_.size());
}

void RunHost::FillStatus(v1::RunStatus* status) const {
  MutexLock lock(&mutex_);
  const int64_t now = Now();
  const v1::OpenRunRequest& opened = spec_->opened();
  const Attempt& attempt = machine_.attempt();
  const RunCounters& counters = machine_.counters();
  status->set_name(opened.name());
  status->set_run_uid(opened.run_uid());
  status->set_placement_epoch(machine_.placement_epoch());
  status->set_server_index(opened.server_index());
  status->set_world_size(opened.world_size());
  status->set_update_mode(v1::UpdateMode_Name(opened.update_mode()));
  status->set_staging(std::string(StagingName(admitted_.staging)));
  status->set_consumed_step(machine_.consumed_step());
  status->set_open_step(attempt.step);
  status->set_open_attempt(attempt.attempt);
  status->set_phase(machine_.PhaseName());
  status->set_awaited(machine_.Awaited());
  status->set_committed_steps(counters.committed_steps);
  status->set_skipped_steps(counters.skipped_steps);
  status->set_dropped_attempts(counters.dropped_attempts);
  status->set_last_skip_reason(counters.last_skip_reason);
  status->set_last_drop_reason(counters.last_drop_reason);
  status->set_last_grad_norm(last_grad_norm_);
  if (step_ends_.size() >= 2 && step_ends_.back() > step_ends_.front()) {
    status->set_steps_per_second(static_cast<double>(step_ends_.size() - 1) * 1e6 /
                                 static_cast<double>(step_ends_.back() - step_ends_.front()));
  }
  status->set_bytes_pushed(bytes_pushed_);
  status->set_bytes_pulled(bytes_pulled_);
  if (collective_ != nullptr) {
    status->set_peer_sum_bytes(collective_->sent().sums);
    status->set_peer_gather_bytes(collective_->sent().gathers);
  }
  status->set_chunks_duplicate(counters.duplicate_pieces);
  status->set_chunks_stale(counters.stale_pieces);
  for (int32_t r = 0; r < spec_->world_size(); ++r) {
    const RankState& rank = machine_.ranks()[r];
    v1::RankStatus* out = status->add_ranks();
    out->set_rank(r);
    out->set_joined(rank.joined);
    out->set_live(machine_.Live(r, now));
    out->set_generation(rank.incarnation.generation);
    out->set_applied_step(rank.applied);
    out->set_begun_step(rank.begun_step);
    out->set_ended_push(attempt.ranks[r].ended);
    out->set_lease_seconds_left(
        rank.joined ? static_cast<double>(std::max<int64_t>(0, rank.lease_end - now)) / 1e6 : 0);
  }
  double compute_seconds = 0;
  for (const auto& [index, store] : stores_) {
    const MatrixSpec& spec = store->spec();
    const MatrixFigures& figures = store->figures();
    v1::MatrixStatus* out = status->add_matrices();
    out->set_index(index);
    out->set_name(spec.name);
    out->set_rows(spec.rows);
    out->set_cols(spec.cols);
    if (spec.cut()) {
      out->set_shard(spec.shard);
      out->set_shards(spec.shards);
      out->set_first_row(spec.place.row_begin);
      out->set_first_col(spec.place.col_begin);
    }
    out->set_rule(spec.rule.preset);
    out->set_last_kind(figures.last_kind);
    out->set_last_refresh_step(figures.last_refresh_step);
    if (figures.residual) out->set_residual(*figures.residual);
    if (figures.row_wise_spectral) out->set_row_wise_spectral(*figures.row_wise_spectral);
    if (figures.update_rms) out->set_update_rms(*figures.update_rms);
    out->set_commits(figures.commits);
    out->set_refreshes(figures.refreshes);
    out->set_skips(figures.skips);
    out->set_last_skip_reason(figures.last_skip_reason);
    out->set_owner(spec.owner);
    out->set_compute_seconds(static_cast<double>(figures.compute_micros) / 1e6);
    out->set_phase(static_cast<int32_t>(spec.phase));
    compute_seconds += out->compute_seconds();
  }
  status->set_compute_seconds(compute_seconds);
}

// ---------------------------------------------------------------- hashes of the state

void RunHost::HashState(HashDone done) {
  {
    MutexLock lock(&mutex_);
    hash_waiters_.push_back(std::move(done));
    StartHashes();
  }
  calls_.Run();
}

// Committed state is whole while nothing is being absorbed.
void RunHost::StartHashes() {
  if (settling_) return;
  for (HashDone& done : hash_waiters_) {
    auto run = std::make_shared<HashRun>();
    run->done = std::move(done);
    run->missing = stores_.size();
    if (stores_.empty()) {
      calls_.Add([run] { run->done(run->hashes); });
      continue;
    }
    for (const auto& [index, store] : stores_) {
      ++hashing_;
      environment_.engine->Submit(
          0, [self = shared_from_this(), run, index = index, input = store->PinForHash()](
                 const absl::Status&, Stream*, DeviceBuffer*) mutable {
            self->RunHash(run, index, std::move(input));
          });
    }
  }
  hash_waiters_.clear();
}

void RunHost::RunHash(const std::shared_ptr<HashRun>& run, int32_t matrix, HashInput input) {
  const uint64_t hash = HashMatrix(input);
  input.pins.clear();
  {
    MutexLock lock(&mutex_);
    --hashing_;
    run->hashes[matrix] = hash;
    if (--run->missing == 0) calls_.Add([run] { run->done(run->hashes); });
    StartAbsorbs();
    ReleaseIfQuiet();
  }
  calls_.Run();
}

}  // namespace stiefel
