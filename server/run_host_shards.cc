// Shards that are computed together with others, on this server or on its peers. The engine never
// waits for a collective: each stage is a job of its own, submitted when what it needs is here.
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/status.h"
#include "server/run_host.h"

namespace stiefel {

absl::Status RunHost::OpenCollective() {
  PeerGroup group;
  group.run_uid = spec_->opened().run_uid();
  group.placement_epoch = spec_->opened().placement_epoch();
  group.self = spec_->opened().server_index();
  group.servers.assign(spec_->opened().servers().begin(), spec_->opened().servers().end());
  group.owners.resize(spec_->opened().parameters_size());
  bool any = false;
  for (const MatrixSpec& shard : spec_->matrices()) {
    group.owners[shard.parameter].push_back(shard.owner);
    any = any || (shard.computed_together() && shard.owner == group.self);
  }
  if (!any) return absl::OkStatus();
  if (environment_.peers == nullptr && group.servers.size() > 1) {
    return absl::FailedPreconditionError(
        "this server was started without peers: it computes no matrix together with others");
  }
  PeerCollective::Environment environment;
  environment.transport = environment_.peers;
  environment.executor = environment_.executor;
  environment.clock = environment_.clock;
  environment.timeout_micros = spec_->step_timeout();
  STIEFEL_ASSIGN_OR_RETURN(std::unique_ptr<PeerCollective> collective,
                           PeerCollective::Create(std::move(group), environment));
  collective_ = std::move(collective);
  return absl::OkStatus();
}

void RunHost::StartChain(MatrixJob job, int32_t matrix) {
  auto chain = std::make_shared<Chain>();
  chain->job = std::move(job);
  chain->matrix = matrix;
  chain->collective = collective_;
  SubmitStage(std::move(chain));
}

void RunHost::SubmitStage(std::shared_ptr<Chain> chain) {
  const int64_t order = need_order_[chain->matrix];
  environment_.engine->Submit(
      0,
      [self = shared_from_this(), chain = std::move(chain)](const absl::Status& ready,
                                                            Stream* stream, DeviceBuffer*) {
        self->RunStage(chain, ready, stream);
      },
      order);
}

void RunHost::RunStage(const std::shared_ptr<Chain>& chain, const absl::Status& ready,
                       Stream* stream) {
  const StepKey& key = chain->job.key;
  bool wanted;
  {
    MutexLock lock(&mutex_);
    wanted = Current(key);
  }
  const int64_t begin = Now();
  absl::Status status = wanted ? ready : absl::CancelledError("the attempt is over");
  if (status.ok()) status = RunStageJob(chain->job, stream, &chain->step, &chain->end);
  const int64_t end = Now();
  chain->end.micros += end - begin;
  if (wanted) TraceStage(chain->job, chain->matrix, begin, end);
  if (!status.ok() || !chain->step->next()) return EndChain(chain, status);
  CollectiveKey collective;
  collective.step = key.step;
  collective.attempt = key.attempt;
  collective.round = key.round;
  collective.matrix = chain->job.spec->parameter;
  collective.index = chain->step->index();
  chain->waits_since = end;
  chain->collective->Start(
      collective, *chain->step->next(),
      [self = shared_from_this(), chain](const absl::Status& s) { self->OnCollected(chain, s); });
}

void RunHost::OnCollected(const std::shared_ptr<Chain>& chain, const absl::Status& status) {
  if (!status.ok()) return EndChain(chain, status);
  {
    MutexLock lock(&mutex_);
    if (trace_) {
      trace_->Collective(chain->matrix, chain->job.key.step,
                         absl::StrCat("collective ", chain->step->index()), chain->waits_since,
                         Now());
    }
    if (Current(chain->job.key)) return SubmitStage(chain);
  }
  EndChain(chain, absl::CancelledError("the attempt is over"));
}

void RunHost::EndChain(const std::shared_ptr<Chain>& chain, const absl::Status& status) {
  chain->step.reset();  // it uses memory of the store, which lives while this counts as computing
  EndCompute(chain->job, chain->matrix, status, chain->end);
}

void RunHost::Stop() {
  std::shared_ptr<PeerCollective> collective;
  {
    MutexLock lock(&mutex_);
    stopped_ = true;
    collective = std::move(collective_);
  }
  if (collective != nullptr) collective->Cancel(kAllAttempts.first, kAllAttempts.second);
}

void RunHost::OnFetchPart(const v1::FetchPartRequest& request, std::unique_ptr<PeerReply> reply) {
  std::shared_ptr<PeerCollective> collective;
  {
    MutexLock lock(&mutex_);
    collective = collective_;
  }
  if (collective != nullptr) return collective->OnFetchPart(request, std::move(reply));
  reply->Finish(absl::InvalidArgumentError("this server computes nothing together with others"));
}

}  // namespace stiefel
