// The calls of a step, but for waiting.
#include <algorithm>
#include <cmath>
#include <set>

#include "absl/strings/str_cat.h"
#include "client/session.h"
#include "common/clock.h"
#include "common/errors.h"
#include "common/status.h"

namespace stiefel {
namespace {

// How often Done looks whether the trainer was cancelled.
constexpr int64_t kLookMicros = 50000;

int64_t Now() { return RealClock().NowMicros(); }

absl::StatusOr<v1::BeginStep> ToBeginStep(const Layout& layout, const StepOptions& options) {
  v1::BeginStep begin;
  if (!(options.weight >= 0) || !std::isfinite(options.weight)) {
    return absl::InvalidArgumentError(
        absl::StrCat("weight ", options.weight, " is not finite and >= 0"));
  }
  begin.set_weight(options.weight);
  v1::CommonFields& common = *begin.mutable_common();
  for (const auto& [group, fields] : options.groups) {
    const auto& parameters = layout.parameters();
    if (std::none_of(parameters.begin(), parameters.end(),
                     [g = group](const ParameterSpec& p) { return p.group == g; })) {
      return absl::InvalidArgumentError(absl::StrCat("no parameter is in group ", group));
    }
    v1::CommonFields::Group& wire = (*common.mutable_groups())[group];
    if (fields.lr) wire.set_lr(*fields.lr);
    if (fields.weight_decay) wire.set_weight_decay(*fields.weight_decay);
    if (fields.beta) wire.set_beta(*fields.beta);
    if (fields.kind) {
      wire.set_kind(*fields.kind == StepKind::kRefresh ? v1::REFRESH : v1::OFF_REFRESH);
    }
  }
  if (options.max_grad_norm) common.set_max_grad_norm(*options.max_grad_norm);
  if (options.grad_scale) common.set_grad_scale(*options.grad_scale);
  if (options.commit == CommitMode::kPerMatrix) common.set_commit(v1::PER_MATRIX);
  return begin;
}

// Rows shorter than this are copied together: a span of a message for each would cost more.
constexpr int64_t kMinSpanBytes = 4096;

// Whether the block may be sent from where it lies although its parts are not contiguous there.
bool MayLieScattered(const Layout& layout, const LayoutBlock& block) {
  if (!block.scattered) return true;
  for (int32_t w = block.first_wire; w < block.first_wire + block.wires; ++w) {
    if (layout.wire_push()[w].rect.cols() * DTypeSize(block.dtype) < kMinSpanBytes) return false;
  }
  return true;
}

}  // namespace

bool Session::weights_needed() const {
  Caller caller(this);
  MutexLock lock(&mutex_);
  return std::any_of(servers_.begin(), servers_.end(),
                     [](const ServerState& server) { return server.weights_needed; });
}

int64_t Session::next_step() const {
  Caller caller(this);
  MutexLock lock(&mutex_);
  return trainer_->target();
}

absl::Status Session::Begin(int64_t step, const StepOptions& options) {
  Caller caller(this);
  STIEFEL_ASSIGN_OR_RETURN(v1::BeginStep begin, ToBeginStep(layout_, options));
  {
    MutexLock lock(&mutex_);
    STIEFEL_RETURN_IF_ERROR(FinalError());
    MaybeLead();
    TrainerSends sends;
    STIEFEL_RETURN_IF_ERROR(trainer_->Begin(step, std::move(begin), &sends));
    step_options_ = options;
    for (Source& source : sources_) source.data = nullptr;
    StepTimings timings;
    timings.moves = timings_.moves;
    timings.move_s = timings_.move_s;
    timings_ = timings;
    begun_at_ = Now();
    if (trace_) trace_->Begun(step, begun_at_);
    awaiting_since_ = 0;
    push_ended_ = false;
    Perform(std::move(sends));
  }
  PumpAll();
  return absl::OkStatus();
}

absl::StatusOr<const char*> Session::Stage(const LayoutBlock& spec, size_t source,
                                           const std::string& part, const TensorView& gradient,
                                           std::unique_ptr<char[]>* staging) {
  STIEFEL_ASSIGN_OR_RETURN(const Walk walk, CheckView(gradient, spec.rect.rows(), spec.rect.cols(),
                                                      "gradient of " + layout_.Describe(spec)));
  if (walk.contiguous && walk.type == ToElementType(spec.dtype) && MayLieScattered(layout_, spec)) {
    return walk.data;
  }
  {
    // Taken out, so that a second Push of the same part cannot write under the first one.
    MutexLock lock(&mutex_);
    if (sources_[source].data != nullptr) {
      return absl::FailedPreconditionError(
          absl::StrCat(layout_.Describe(spec), part, " was pushed before"));
    }
    *staging = std::move(sources_[source].staging);
  }
  if (*staging == nullptr) staging->reset(new char[static_cast<size_t>(spec.bytes())]);
  if (!spec.scattered) {
    CopyAs(walk, spec.dtype, staging->get());
    return staging->get();
  }
  for (int32_t w = spec.first_wire; w < spec.first_wire + spec.wires; ++w) {
    const WireBlock& wire = layout_.wire_push()[w];
    CopyAs(walk.Part(wire.in_block), spec.dtype,
           staging->get() + wire.first * DTypeSize(spec.dtype));
  }
  return staging->get();
}

absl::Status Session::Push(int32_t block, int32_t part, const TensorView* gradient) {
  Caller caller(this);
  if (block < 0 || block >= static_cast<int32_t>(layout_.push().size())) {
    return IndexOutOfRange("push block", block, layout_.push().size());
  }
  const LayoutBlock& spec = layout_.push()[block];
  if (part < 0 || part >= spec.parts) {
    return IndexOutOfRange("part of " + layout_.Describe(spec), part, spec.parts);
  }
  const size_t index = first_source_[block] + static_cast<size_t>(part);
  const char* data = nullptr;
  std::unique_ptr<char[]> staging;
  if (gradient != nullptr) {
    STIEFEL_ASSIGN_OR_RETURN(data,
                             Stage(spec, index, absl::StrCat(" part ", part), *gradient, &staging));
  }
  std::set<int32_t> servers;
  {
    MutexLock lock(&mutex_);
    STIEFEL_RETURN_IF_ERROR(FinalError());
    // The parts of a block are always pushed together: only the first can fail.
    for (int32_t wire = spec.first_wire; wire < spec.first_wire + spec.wires; ++wire) {
      const absl::Status pushed = trainer_->Push(wire, part, gradient == nullptr);
      if (!pushed.ok()) {
        return absl::Status(pushed.code(),
                            absl::StrCat(layout_.Describe(spec), ": ", pushed.message()));
      }
      servers.insert(owners_[layout_.wire_push()[wire].shard]);
      if (trace_ && gradient != nullptr) trace_->Pushed(wire, part, Now());
    }
    sources_[index].strided = spec.scattered && staging == nullptr;
    if (staging != nullptr) {
      sources_[index].staging = std::move(staging);
      timings_.bytes_staged += spec.bytes();
    }
    sources_[index].data = data;
  }
  for (const int32_t server : servers) Pump(server);
  return absl::OkStatus();
}

absl::Status Session::EndPush(double local_sum_squares, bool local_finite) {
  Caller caller(this);
  if (!(local_sum_squares >= 0) || !std::isfinite(local_sum_squares)) {
    return absl::InvalidArgumentError(absl::StrCat(
        "local_sum_squares ", local_sum_squares,
        " is not finite and >= 0; say local_finite = false of a gradient that is not"));
  }
  MutexLock lock(&mutex_);
  STIEFEL_RETURN_IF_ERROR(FinalError());
  v1::EndPush fields;
  fields.set_local_sum_squares(local_sum_squares);
  if (!local_finite) fields.set_local_finite(false);
  TrainerSends sends;
  const absl::Status ended = trainer_->EndPush(std::move(fields), &sends);
  if (const auto missing = trainer_->FirstUnpushed(); !ended.ok() && missing) {
    const int32_t block = layout_.wire_push()[missing->first].block;
    return absl::Status(
        ended.code(), absl::StrCat("EndPush of step ", trainer_->target(), ": block ", block, " (",
                                   layout_.Describe(layout_.push()[block]), ") part ",
                                   missing->second, " was neither pushed nor declared absent"));
  }
  STIEFEL_RETURN_IF_ERROR(ended);
  push_ended_ = true;
  if (trace_) trace_->EndedPush(Now());
  NotePushed();
  Perform(std::move(sends));
  return absl::OkStatus();
}

absl::Status Session::Done() {
  Caller caller(this);
  int64_t deadline = 0;
  {
    MutexLock lock(&mutex_);
    STIEFEL_RETURN_IF_ERROR(FinalError());
    if (!trainer_->End()) {
      return absl::FailedPreconditionError(
          absl::StrCat("step ", trainer_->target(), " has not ended; Wait for it first"));
    }
    deadline = Now() + step_timeout_;
  }
  // The step is decided, so no more chunks are made of its gradients.
  while (!borrowed_->WaitReturned(std::min(deadline, Now() + kLookMicros))) {
    MutexLock lock(&mutex_);
    STIEFEL_RETURN_IF_ERROR(FinalError());
    if (Now() < deadline) continue;
    return absl::DeadlineExceededError(absl::StrCat(borrowed_->loans(), " chunks of step ",
                                                    trainer_->target(),
                                                    " are still being sent from gradient memory"));
  }
  MutexLock lock(&mutex_);
  TrainerSends sends;
  STIEFEL_RETURN_IF_ERROR(trainer_->Applied(&sends));
  for (Source& source : sources_) source.data = nullptr;
  for (Pulled& pulled : pulled_) {
    pulled.step = 0;
    pulled.absent = pulled.applied = false;
  }
  for (std::unique_ptr<char[]>& joined : joined_) joined.reset();
  if (decided_ && decided_->step() <= trainer_->applied()) decided_.reset();
  awaiting_since_ = 0;
  if (trace_) trace_->Done(Now());
  Perform(std::move(sends));
  MaybeLead();
  return absl::OkStatus();
}

StepTimings Session::timings() const {
  Caller caller(this);
  MutexLock lock(&mutex_);
  return timings_;
}

}  // namespace stiefel
