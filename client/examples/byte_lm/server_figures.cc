#include "client/examples/byte_lm/server_figures.h"

#include <grpcpp/grpcpp.h>

#include <algorithm>
#include <map>
#include <memory>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "common/checksum.h"
#include "common/status.h"
#include "stiefel/v1/status.grpc.pb.h"

namespace stiefel::byte_lm {
namespace {

const v1::RunStatus* FindRun(const v1::ServerStatus& status, const std::string& run) {
  for (const v1::RunStatus& candidate : status.runs()) {
    if (candidate.name() == run) return &candidate;
  }
  return nullptr;
}

absl::StatusOr<v1::ServerStatus> StatusAtStep(const std::string& server, const std::string& run,
                                              int64_t step, absl::Time deadline) {
  const auto stub = v1::Status::NewStub(
      grpc::CreateChannel(absl::StrCat("dns:///", server), grpc::InsecureChannelCredentials()));
  v1::GetStatusRequest request;
  request.set_state_hash(true);
  for (;;) {
    grpc::ClientContext context;
    context.set_deadline(absl::ToChronoTime(deadline));
    v1::ServerStatus status;
    const grpc::Status rpc = stub->GetStatus(&context, request, &status);
    if (!rpc.ok()) {
      return absl::UnavailableError(
          absl::StrCat("status of server ", server, ": ", rpc.error_message()));
    }
    const v1::RunStatus* held = FindRun(status, run);
    if (held == nullptr || held->consumed_step() >= step) return status;
    if (absl::Now() >= deadline) {
      return absl::DeadlineExceededError(
          absl::StrCat("server ", server, " is at step ", held->consumed_step(), ", not ", step));
    }
    absl::SleepFor(absl::Milliseconds(10));
  }
}

}  // namespace

absl::StatusOr<ServerFigures> AddFigures(const std::vector<v1::ServerStatus>& statuses,
                                         const std::string& run) {
  ServerFigures sum;
  std::map<std::string, uint64_t> hashes;
  for (const v1::ServerStatus& status : statuses) {
    const v1::RunStatus* held = FindRun(status, run);
    if (held == nullptr) {
      return absl::NotFoundError(
          absl::StrCat("server ", status.address(), " does not hold run ", run));
    }
    sum.compute_seconds += held->compute_seconds();
    sum.skipped_steps = std::max(sum.skipped_steps, held->skipped_steps());
    sum.dropped_attempts = std::max(sum.dropped_attempts, held->dropped_attempts());
    sum.resident_bytes += status.resident_bytes();
    for (const v1::MatrixStatus& matrix : held->matrices()) {
      if (matrix.owner() != held->server_index()) continue;
      if (!matrix.has_state_hash()) {
        return absl::InternalError(absl::StrCat("server ", status.address(),
                                                " gave no state hash of matrix ", matrix.name()));
      }
      hashes[matrix.name()] = matrix.state_hash();
    }
  }
  Hash64 combined;
  for (const auto& [name, hash] : hashes) {
    combined.Update(name.c_str(), name.size() + 1);
    combined.Update(&hash, sizeof(hash));
  }
  sum.state_hash = combined.Digest();
  return sum;
}

absl::StatusOr<ServerFigures> CollectFigures(const std::vector<std::string>& servers,
                                             const std::string& run, int64_t step,
                                             absl::Duration timeout) {
  const absl::Time deadline = absl::Now() + timeout;
  std::vector<v1::ServerStatus> statuses;
  for (const std::string& server : servers) {
    STIEFEL_ASSIGN_OR_RETURN(v1::ServerStatus status, StatusAtStep(server, run, step, deadline));
    statuses.push_back(std::move(status));
  }
  return AddFigures(statuses, run);
}

}  // namespace stiefel::byte_lm
