#include "server/matrix_store.h"

#include <algorithm>
#include <map>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "common/checksum.h"
#include "common/status.h"

namespace stiefel {
namespace {

// "3 non-finite gradient elements in h.3.mlp.w, pushed by rank 1"
std::string ExplainGradient(const MatrixJob& job, int64_t count) {
  std::vector<int32_t> ranks;
  for (const GradientPiece& piece : job.gradient.pieces) {
    if ((ranks.empty() || ranks.back() != piece.rank) && CountNonfinite(piece) > 0)
      ranks.push_back(piece.rank);
  }
  const std::string what =
      absl::StrCat(count, " non-finite gradient elements in ", job.spec->Label());
  if (ranks.empty()) return absl::StrCat(what, ", from sums of finite contributions");
  const bool more = ranks.size() > 16;
  if (more) ranks.resize(16);
  return absl::StrCat(what, ", pushed by ", ranks.size() == 1 ? "rank " : "ranks ",
                      absl::StrJoin(ranks, ", "), more ? " and others" : "");
}

void Explain(const MatrixJob& job, JobEnd* end) {
  if (end->result.nonfinite_gradient > 0) {
    end->explanation = ExplainGradient(job, end->result.nonfinite_gradient);
  } else if (end->result.nonfinite_update > 0) {
    end->explanation = absl::StrCat(end->result.nonfinite_update, " non-finite update elements in ",
                                    job.spec->Label());
  }
}

}  // namespace

absl::Status RunStepJob(const MatrixJob& job, Stream* stream, DeviceBuffer* workspace,
                        JobEnd* end) {
  if (job.zero_elements != nullptr) stream->Zero(job.zero_elements, job.elementwise_bytes);
  const absl::Status enqueued =
      job.rule->Compute(stream, job.gradient, job.args, job.buffers, workspace, &end->result);
  const absl::Status computed = stream->Synchronize();
  STIEFEL_RETURN_IF_ERROR(enqueued);
  STIEFEL_RETURN_IF_ERROR(computed);
  Explain(job, end);
  return absl::OkStatus();
}

absl::Status RunStageJob(const MatrixJob& job, Stream* stream, std::unique_ptr<ShardedStep>* step,
                         JobEnd* end) {
  if (*step == nullptr) {
    if (job.zero_elements != nullptr) stream->Zero(job.zero_elements, job.elementwise_bytes);
    STIEFEL_ASSIGN_OR_RETURN(
        *step, job.sharded->Begin(job.gradient, job.args, job.buffers, job.held, &end->result));
  }
  const absl::Status enqueued = (*step)->RunStage(stream);
  const absl::Status computed = stream->Synchronize();
  STIEFEL_RETURN_IF_ERROR(enqueued);
  STIEFEL_RETURN_IF_ERROR(computed);
  if ((*step)->next()) return absl::OkStatus();
  end->written = (*step)->outcome() == ShardedStep::Outcome::kComputed;
  end->absent = (*step)->outcome() == ShardedStep::Outcome::kAbsent;
  Explain(job, end);
  return absl::OkStatus();
}

absl::Status RunAbsorbJob(const MatrixJob& job, Stream* stream) {
  const absl::Status enqueued =
      job.sharded == nullptr ? job.rule->Absorb(stream, job.gradient, job.args, job.state)
                             : job.sharded->Absorb(stream, job.gradient, job.args, job.state);
  const absl::Status computed = stream->Synchronize();
  return enqueued.ok() ? computed : enqueued;
}

uint64_t HashMatrix(const HashInput& input) {
  Hash64 hash;
  hash.Update(input.name.data(), input.name.size());
  if (input.state != nullptr) {
    hash.Update(input.state, static_cast<size_t>(input.state_bytes));
  } else {
    const std::vector<char> zeros(1 << 16);
    for (int64_t left = input.state_bytes; left > 0;) {
      const int64_t now = std::min<int64_t>(left, static_cast<int64_t>(zeros.size()));
      hash.Update(zeros.data(), static_cast<size_t>(now));
      left -= now;
    }
  }
  if (input.small_state != nullptr)
    hash.Update(input.small_state, static_cast<size_t>(input.small_state_bytes));
  if (input.weights != nullptr)
    hash.Update(input.weights, static_cast<size_t>(input.weights_bytes));
  return hash.Digest();
}

absl::StatusOr<std::unique_ptr<MatrixStore>> MatrixStore::Create(int32_t index,
                                                                 const MatrixSpec* spec,
                                                                 bool weights_mode,
                                                                 std::shared_ptr<Backend> backend) {
  std::unique_ptr<MatrixStore> store(new MatrixStore(index, spec, weights_mode, backend));
  const auto named = [spec](const absl::Status& status) {
    return absl::Status(status.code(),
                        absl::StrCat("parameter \"", spec->Label(), "\": ", status.message()));
  };
  if (spec->computed_together()) {
    const ShardOf shard{spec->whole_rows, spec->whole_cols, spec->shard, spec->cuts};
    absl::StatusOr<std::unique_ptr<ShardedRule>> rule =
        ShardedRule::Create(spec->rule, shard, backend.get());
    if (!rule.ok()) return named(rule.status());
    store->sharded_ = *std::move(rule);
    return store;
  }
  absl::StatusOr<std::unique_ptr<MatrixRule>> rule =
      MatrixRule::Create(spec->rule, spec->rows, spec->cols, backend.get(), spec->partner_shape);
  if (!rule.ok()) return named(rule.status());
  store->rule_ = *std::move(rule);
  return store;
}

int64_t MatrixStore::StateBytes(bool elementwise) const {
  int64_t bytes = 0;
  for (const StateBuffer& buffer : State()) {
    if (buffer.elementwise == elementwise)
      bytes += static_cast<int64_t>(sizeof(float)) * buffer.rows * buffer.cols;
  }
  return bytes;
}

int64_t MatrixStore::WeightBytes() const {
  return weights_mode_ ? static_cast<int64_t>(sizeof(float)) * spec_->elements() : 0;
}

int64_t MatrixStore::PayloadBytes() const {
  return sends_staged_weights() ? 0 : DTypeSize(spec_->pull_dtype) * spec_->elements();
}

absl::Status MatrixStore::AllocateState(const std::vector<MatrixStore*>& stores,
                                        const std::shared_ptr<Backend>& backend) {
  std::vector<int64_t> sizes;
  for (const MatrixStore* store : stores) {
    sizes.push_back(store->StateBytes(/*elementwise=*/true));
    sizes.push_back(store->StateBytes(/*elementwise=*/false));
    sizes.push_back(store->WeightBytes());
  }
  STIEFEL_ASSIGN_OR_RETURN(std::unique_ptr<Stream> stream, backend->CreateStream());
  STIEFEL_ASSIGN_OR_RETURN(auto buffers, AllocateTogether(backend, sizes));
  std::vector<DeviceBuffer> held(stores.size());
  for (size_t i = 0; i < stores.size(); ++i) {
    if (stores[i]->sharded_ == nullptr) continue;
    STIEFEL_ASSIGN_OR_RETURN(held[i], backend->Allocate(stores[i]->sharded_->WorkspaceBytes()));
  }
  auto next = buffers.begin();
  auto next_held = held.begin();
  for (MatrixStore* store : stores) {
    store->held_ = std::move(*next_held++);
    store->state_ = *next++;
    store->small_state_ = *next++;
    store->weights_ = *next++;
    // At once, not in the first job: that of the partner may run beside it.
    stream->Zero(store->small_state_->data(), store->small_state_->bytes());
  }
  return stream->Synchronize();
}

absl::Status MatrixStore::AllocateSteps(const std::vector<MatrixStore*>& stores, Staging staging,
                                        const std::vector<RankState>& ranks,
                                        const std::shared_ptr<Backend>& backend) {
  const bool twice = staging == Staging::kDouble;
  std::map<int32_t, std::vector<PushRegion>> regions;
  for (int32_t rank = 0; rank < static_cast<int32_t>(ranks.size()); ++rank) {
    for (int32_t b = 0; b < static_cast<int32_t>(ranks[rank].push.size()); ++b) {
      const BlockSpec& block = ranks[rank].push[b];
      regions[block.matrix].push_back({rank, b, block, nullptr});
    }
  }
  std::vector<int64_t> sizes;
  std::vector<MatrixStore*> bare;
  for (MatrixStore* store : stores) {
    int64_t gradient = 0;
    for (const PushRegion& region : regions[store->index_])
      gradient +=
          region.block.elements() * region.block.parts * DTypeSize(store->spec_->push_dtype);
    if (store->HasSteps(twice, gradient)) continue;
    bare.push_back(store);
    sizes.push_back(twice ? store->StateBytes(/*elementwise=*/true) : 0);
    sizes.push_back(store->StateBytes(/*elementwise=*/false));
    sizes.push_back(store->WeightBytes());
    sizes.push_back(store->PayloadBytes());
    sizes.push_back(gradient);
  }
  STIEFEL_ASSIGN_OR_RETURN(auto buffers, AllocateTogether(backend, sizes));
  auto next = buffers.begin();
  for (MatrixStore* store : bare) {
    const std::shared_ptr<SharedBuffer> staged = *next++;
    store->staged_ = twice ? staged : nullptr;
    store->staged_small_ = *next++;
    store->staged_weights_ = *next++;
    store->payload_ = *next++;
    store->gradient_ = *next++;
  }
  for (MatrixStore* store : stores) store->SetRegions(std::move(regions[store->index_]));
  return absl::OkStatus();
}

void MatrixStore::SetRegions(std::vector<PushRegion> regions) {
  regions_ = std::move(regions);
  char* data = gradient_->data();
  for (PushRegion& region : regions_) {
    region.data = data;
    data += region.block.elements() * region.block.parts * DTypeSize(spec_->push_dtype);
  }
}

char* MatrixStore::PieceTarget(int32_t region, int32_t part, int64_t offset) const {
  const PushRegion& r = regions_[region];
  return r.data + (part * r.block.elements() + offset) * DTypeSize(spec_->push_dtype);
}

std::vector<float*> MatrixStore::StatePointers(const SharedBuffer* elementwise,
                                               const SharedBuffer* small) const {
  float* next[2] = {small == nullptr ? nullptr : small->floats(),
                    elementwise == nullptr ? nullptr : elementwise->floats()};
  std::vector<float*> pointers;
  for (const StateBuffer& buffer : State()) {
    float*& here = next[buffer.elementwise];
    pointers.push_back(here);
    if (here != nullptr) here += buffer.rows * buffer.cols;
  }
  return pointers;
}

// The pieces of the attempt in rank order. Absent parts are left out: they weigh nothing. Blocks
// without a reduce group form one group per rank.
GradientView MatrixStore::View(const Attempt& attempt) const {
  GradientView view;
  view.mean = spec_->mean;
  const v1::CommonFields& common = attempt.ranks[0].begin.common();
  if (common.has_grad_scale()) view.grad_scale = common.grad_scale();
  const auto world = static_cast<int32_t>(attempt.ranks.size());
  std::map<int32_t, int32_t> groups;  // reduce group -> number, in order of appearance
  for (const PushRegion& region : regions_) {
    const AttemptRank& rank = attempt.ranks[region.rank];
    int32_t group = region.rank;
    if (region.block.reduce_group >= 0) {
      const auto number = world + static_cast<int32_t>(groups.size());
      group = groups.emplace(region.block.reduce_group, number).first->second;
    }
    for (int32_t part = 0; part < region.block.parts; ++part) {
      if (rank.arrivals.Absent(region.block_index, part)) continue;
      GradientPiece piece;
      piece.rect = region.block.rect;
      piece.data = region.data + part * region.block.elements() * DTypeSize(spec_->push_dtype);
      piece.dtype = spec_->push_dtype;
      piece.weight = rank.begin.has_weight() ? rank.begin.weight() : 1;
      piece.group = group;
      piece.rank = region.rank;
      view.pieces.push_back(piece);
    }
  }
  return view;
}

// The common fields of the group laid over the registered rule and the schedule.
StepArgs MatrixStore::Args(const StepKey& key, const Attempt& attempt, double scale) const {
  const Rule& rule = spec_->rule;
  StepArgs args;
  args.step = key.step;
  args.commits = figures_.commits;
  args.kind = KindAtStep(rule, spec_->phase, key.step);
  args.clip_scale = scale;
  args.lr = rule.lr;
  args.weight_decay = rule.weight_decay;
  const auto& groups = attempt.ranks[0].begin.common().groups();
  const auto group = groups.find(spec_->group);
  if (group == groups.end()) return args;
  if (group->second.has_lr()) args.lr = group->second.lr();
  if (group->second.has_weight_decay()) args.weight_decay = group->second.weight_decay();
  if (group->second.has_beta()) args.beta = group->second.beta();
  if (group->second.kind() == v1::REFRESH) args.kind = StepKind::kRefresh;
  // A rule without a row-wise step always refreshes.
  if (group->second.kind() == v1::OFF_REFRESH && rule.family == RuleFamily::kSpectral)
    args.kind = StepKind::kOffRefresh;
  return args;
}

absl::Status MatrixStore::MakeIdle(std::shared_ptr<SharedBuffer>* slot) {
  if ((*slot)->idle()) return absl::OkStatus();
  for (std::shared_ptr<SharedBuffer>& spare : spares_) {
    if (spare->bytes() != (*slot)->bytes() || !spare->idle()) continue;
    spare.swap(*slot);
    return absl::OkStatus();
  }
  STIEFEL_ASSIGN_OR_RETURN(auto fresh, AllocateTogether(backend_, {(*slot)->bytes()}));
  spares_.push_back(std::move(*slot));
  *slot = std::move(fresh[0]);
  return absl::OkStatus();
}

absl::StatusOr<MatrixJob> MatrixStore::BeginJob(const StepKey& key, const Attempt& attempt,
                                                double scale, const MatrixStore* partner) {
  update_.reset();
  staged_step_.reset();
  MatrixJob job;
  job.key = key;
  job.spec = spec_;
  job.rule = rule_.get();
  job.sharded = sharded_.get();
  if (sharded_ != nullptr) job.held = &held_;
  job.gradient = View(attempt);
  job.args = Args(key, attempt, scale);
  job.state = StatePointers(state_.get(), small_state_.get());
  job.zero_elements = zeroed_ ? nullptr : state_->floats();
  job.elementwise_bytes = state_->bytes();
  job.buffers.state.assign(job.state.begin(), job.state.end());
  STIEFEL_RETURN_IF_ERROR(MakeIdle(&staged_small_));
  if (staged_ != nullptr) STIEFEL_RETURN_IF_ERROR(MakeIdle(&staged_));
  job.buffers.staged_state = StatePointers(staged_.get(), staged_small_.get());
  if (partner != nullptr) {
    const std::vector<float*> state = partner->StatePointers(nullptr, partner->small_state_.get());
    job.buffers.partner_state.assign(state.begin(), state.end());
    job.buffers.partner_weights = partner->weights_->floats();
    job.pins = {SharedBuffer::Pin(partner->small_state_), SharedBuffer::Pin(partner->weights_)};
  }
  if (weights_mode_) {
    STIEFEL_RETURN_IF_ERROR(MakeIdle(&staged_weights_));
    job.buffers.weights = weights_->floats();
    job.buffers.staged_weights = staged_weights_->floats();
  }
  if (!sends_staged_weights()) {
    STIEFEL_RETURN_IF_ERROR(MakeIdle(&payload_));
    if (weights_mode_) {
      job.buffers.weights_payload = payload_->data();
      job.buffers.payload_dtype = spec_->pull_dtype;
    } else {
      job.buffers.delta = payload_->data();
      job.buffers.delta_dtype = spec_->pull_dtype;
    }
  }
  return job;
}

void MatrixStore::FinishJob(const MatrixJob& job, const JobEnd& end) {
  zeroed_ = true;
  figures_.compute_micros += end.micros;
  staged_step_ = Staged{job, end};
  staged_step_->job.pins.clear();
  const bool finite =
      end.written && end.result.nonfinite_gradient == 0 && end.result.nonfinite_update == 0;
  update_ = MatrixUpdate{job.key, false, nullptr};
  if (finite) update_->buffer = sends_staged_weights() ? staged_weights_ : payload_;
}

void MatrixStore::SetAbsent(const StepKey& key) {
  staged_step_.reset();
  update_ = MatrixUpdate{key, true, nullptr};
}

const char* KindName(const Rule& rule, StepKind kind) {
  if (rule.family != RuleFamily::kSpectral && rule.family != RuleFamily::kPolora)
    return "element_wise";
  if (kind == StepKind::kRefresh) return "refresh";
  return rule.off_refresh == OffRefresh::kTiled ? "tiled" : "row_wise";
}

std::optional<MatrixJob> MatrixStore::Commit(int64_t step) {
  std::optional<MatrixJob> absorb;
  if (!staged_step_ || staged_step_->job.key.step != step) return absorb;  // absent
  const Staged staged = *std::move(staged_step_);
  staged_step_.reset();
  small_state_.swap(staged_small_);
  if (staged_ != nullptr) {
    state_.swap(staged_);
  } else if (state_->bytes() > 0) {
    absorb = staged.job;
    absorb->state = StatePointers(state_.get(), small_state_.get());
  }
  if (weights_mode_) weights_.swap(staged_weights_);

  ++figures_.commits;
  figures_.last_kind = KindName(spec_->rule, staged.job.args.kind);
  const StepResult& result = staged.end.result;
  figures_.update_rms = result.update_rms;
  if (result.newton_schulz) {
    ++figures_.refreshes;
    figures_.last_refresh_step = step;
    if (result.residual != StepResult::kNotMeasured) figures_.residual = result.residual;
  }
  if (result.row_wise_spectral != StepResult::kNotMeasured)
    figures_.row_wise_spectral = result.row_wise_spectral;
  return absorb;
}

void MatrixStore::Discard() {
  staged_step_.reset();
  update_.reset();
}

void MatrixStore::Skip(const std::string& reason) {
  if (staged_step_) {  // an absent matrix has nothing to skip
    ++figures_.skips;
    figures_.last_skip_reason =
        staged_step_->end.explanation.empty() ? reason : staged_step_->end.explanation;
  }
  Discard();
}

HashInput MatrixStore::PinForHash() const {
  HashInput input;
  input.name = spec_->Label();
  input.state_bytes = state_->bytes();
  if (zeroed_ && input.state_bytes > 0) {
    input.state = state_->data();
    input.pins.push_back(SharedBuffer::Pin(state_));
  }
  if (small_state_->bytes() > 0) {
    input.small_state = small_state_->data();
    input.small_state_bytes = small_state_->bytes();
    input.pins.push_back(SharedBuffer::Pin(small_state_));
  }
  if (weights_mode_) {
    input.weights = weights_->data();
    input.weights_bytes = WeightBytes();
    input.pins.push_back(SharedBuffer::Pin(weights_));
  }
  return input;
}

// State that is still as it was allocated is all zero, and not sent: its bytes count 0.
StateImage MatrixStore::PinState() const {
  StateImage image;
  const auto add = [&image](const std::shared_ptr<SharedBuffer>& buffer, int64_t bytes) {
    if (bytes == 0) return bytes;
    image.spans.push_back({buffer->data(), bytes});
    image.pins.push_back(SharedBuffer::Pin(buffer));
    return bytes;
  };
  image.state.set_elementwise_bytes(zeroed_ ? add(state_, state_->bytes()) : 0);
  image.state.set_small_bytes(add(small_state_, small_state_->bytes()));
  image.state.set_weight_bytes(add(weights_, WeightBytes()));
  image.state.set_commits(figures_.commits);
  image.state.set_refreshes(figures_.refreshes);
  image.state.set_last_refresh_step(figures_.last_refresh_step);
  image.state.set_skips(figures_.skips);
  return image;
}

absl::StatusOr<std::vector<MatrixStore::StateTarget>> MatrixStore::TargetsOf(
    const v1::ShardState& state) {
  const bool zero = state.elementwise_bytes() == 0;
  if ((!zero && state.elementwise_bytes() != state_->bytes()) ||
      state.small_bytes() != small_state_->bytes() || state.weight_bytes() != WeightBytes()) {
    return absl::InvalidArgumentError(absl::StrCat(
        "the state of \"", spec_->name, "\" is ", state_->bytes(), " bytes, ",
        small_state_->bytes(), " small and ", WeightBytes(), " of weights; what was sent has ",
        state.elementwise_bytes(), ", ", state.small_bytes(), " and ", state.weight_bytes()));
  }
  std::vector<StateTarget> targets;
  const auto add = [&targets](const std::shared_ptr<SharedBuffer>& buffer, int64_t bytes) {
    if (bytes > 0) targets.push_back({buffer->data(), bytes});
  };
  add(state_, state.elementwise_bytes());
  add(small_state_, state.small_bytes());
  add(weights_, state.weight_bytes());
  return targets;
}

void MatrixStore::TakeState(const v1::ShardState& state) {
  zeroed_ = state.elementwise_bytes() > 0;
  figures_.commits = state.commits();
  figures_.refreshes = state.refreshes();
  figures_.last_refresh_step = state.last_refresh_step();
  figures_.skips = state.skips();
}

}  // namespace stiefel
