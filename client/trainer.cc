#include "client/trainer.h"

#include <unistd.h>

#include <utility>

#include "absl/strings/str_cat.h"
#include "client/grpc_transport.h"
#include "client/session.h"
#include "common/server_address.h"
#include "common/status.h"

namespace stiefel {
absl::StatusOr<std::unique_ptr<Trainer>> Trainer::Connect(
    const TrainerOptions& options, const std::vector<ParameterSpec>& parameters,
    Transport* transport) {
  STIEFEL_ASSIGN_OR_RETURN(Layout layout, Layout::Create(options, parameters));
  if (transport == nullptr) {
    for (const std::string& server : options.servers) {
      STIEFEL_RETURN_IF_ERROR(CheckServerAddress(server));
    }
  }
  STIEFEL_ASSIGN_OR_RETURN(
      std::unique_ptr<Session> session,
      Session::Connect(std::move(layout), transport != nullptr ? transport : GrpcTransport()));
  return std::unique_ptr<Trainer>(new Trainer(std::move(session)));
}

Trainer::Trainer(std::unique_ptr<Session> session)
    : process_(getpid()), session_(std::move(session)) {}

Trainer::~Trainer() {
  // The threads of a forked session are in the parent: there is nobody to wait for, and nothing may
  // be touched.
  if (getpid() != process_) session_.release();
}

// Before any lock: after a fork another thread's lock would never be released.
absl::Status Trainer::CheckProcess() const {
  if (getpid() == process_) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrCat("this trainer was made in process ", process_,
                                                    " and cannot be used in ", getpid(),
                                                    " after fork(); call Trainer::Connect there"));
}

bool Trainer::weights_needed() const { return CheckProcess().ok() && session_->weights_needed(); }

absl::Status Trainer::InitWeights(std::string_view parameter, const TensorView& weights) {
  STIEFEL_RETURN_IF_ERROR(CheckProcess());
  STIEFEL_ASSIGN_OR_RETURN(const int32_t index, session_->layout().ParameterOf(parameter));
  const ParameterSpec& spec = session_->layout().parameters()[index];
  return session_->InitWeights(index, WholeRect(spec.rows(), spec.cols()), weights);
}

absl::Status Trainer::InitWeights(std::string_view parameter, const Rect& rect,
                                  const TensorView& weights) {
  STIEFEL_RETURN_IF_ERROR(CheckProcess());
  STIEFEL_ASSIGN_OR_RETURN(const int32_t index, session_->layout().ParameterOf(parameter));
  return session_->InitWeights(index, rect, weights);
}

absl::StatusOr<StepOutcome> Trainer::PullWeights(absl::Duration timeout) {
  STIEFEL_RETURN_IF_ERROR(CheckProcess());
  return session_->PullWeights(timeout);
}

int64_t Trainer::next_step() const { return CheckProcess().ok() ? session_->next_step() : 0; }

absl::Status Trainer::Begin(int64_t step, const StepOptions& options) {
  STIEFEL_RETURN_IF_ERROR(CheckProcess());
  return session_->Begin(step, options);
}

absl::Status Trainer::Push(int32_t block, const TensorView& gradient, int32_t part) {
  STIEFEL_RETURN_IF_ERROR(CheckProcess());
  return session_->Push(block, part, &gradient);
}

absl::Status Trainer::Push(std::string_view parameter, const TensorView& gradient) {
  STIEFEL_RETURN_IF_ERROR(CheckProcess());
  STIEFEL_ASSIGN_OR_RETURN(const int32_t block, session_->layout().PushBlockOf(parameter));
  return session_->Push(block, 0, &gradient);
}

absl::Status Trainer::PushAbsent(int32_t block, int32_t part) {
  STIEFEL_RETURN_IF_ERROR(CheckProcess());
  return session_->Push(block, part, nullptr);
}

absl::Status Trainer::PushAbsent(std::string_view parameter) {
  STIEFEL_RETURN_IF_ERROR(CheckProcess());
  STIEFEL_ASSIGN_OR_RETURN(const int32_t block, session_->layout().PushBlockOf(parameter));
  return session_->Push(block, 0, nullptr);
}

absl::Status Trainer::EndPush(double local_sum_squares, bool local_finite) {
  STIEFEL_RETURN_IF_ERROR(CheckProcess());
  return session_->EndPush(local_sum_squares, local_finite);
}

absl::StatusOr<StepOutcome> Trainer::Wait(absl::Duration timeout) {
  STIEFEL_RETURN_IF_ERROR(CheckProcess());
  return session_->Wait(-1, timeout);
}

absl::StatusOr<StepOutcome> Trainer::WaitParameter(std::string_view parameter,
                                                   absl::Duration timeout) {
  STIEFEL_RETURN_IF_ERROR(CheckProcess());
  STIEFEL_ASSIGN_OR_RETURN(const int32_t index, session_->layout().ParameterOf(parameter));
  return session_->Wait(index, timeout);
}

absl::StatusOr<TensorView> Trainer::Delta(int32_t pull_block) const {
  STIEFEL_RETURN_IF_ERROR(CheckProcess());
  return session_->Delta(pull_block);
}

absl::StatusOr<TensorView> Trainer::Delta(std::string_view parameter) const {
  STIEFEL_RETURN_IF_ERROR(CheckProcess());
  STIEFEL_ASSIGN_OR_RETURN(const int32_t block, session_->layout().PullBlockOf(parameter));
  return session_->Delta(block);
}

absl::Status Trainer::Apply(int32_t pull_block, const MutableTensorView& weights,
                            const ApplyOptions& options) {
  STIEFEL_RETURN_IF_ERROR(CheckProcess());
  return session_->Apply(pull_block, weights, options);
}

absl::Status Trainer::Apply(std::string_view parameter, const MutableTensorView& weights,
                            const ApplyOptions& options) {
  STIEFEL_RETURN_IF_ERROR(CheckProcess());
  STIEFEL_ASSIGN_OR_RETURN(const int32_t block, session_->layout().PullBlockOf(parameter));
  return session_->Apply(block, weights, options);
}

absl::Status Trainer::ApplyAll(const std::vector<MutableTensorView>& weights,
                               const ApplyOptions& options) {
  STIEFEL_RETURN_IF_ERROR(CheckProcess());
  const size_t blocks = session_->layout().pull().size();
  if (weights.size() != blocks) {
    return absl::InvalidArgumentError(
        absl::StrCat(weights.size(), " views for ", blocks, " pull blocks"));
  }
  for (size_t b = 0; b < blocks; ++b) {
    STIEFEL_RETURN_IF_ERROR(session_->Apply(static_cast<int32_t>(b), weights[b], options));
  }
  return absl::OkStatus();
}

absl::Status Trainer::Done() {
  STIEFEL_RETURN_IF_ERROR(CheckProcess());
  return session_->Done();
}

StepTimings Trainer::timings() const {
  return CheckProcess().ok() ? session_->timings() : StepTimings();
}

void Trainer::Cancel() {
  if (CheckProcess().ok()) session_->Cancel();
}

absl::Status Trainer::Close() {
  STIEFEL_RETURN_IF_ERROR(CheckProcess());
  return session_->Close();
}

}  // namespace stiefel
