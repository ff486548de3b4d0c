// What PeerOperation answers to peers.
#include <algorithm>
#include <cmath>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/checksum.h"
#include "server/peer_operation.h"

namespace stiefel {
namespace {

// Longer waits are not needed: who asks comes again.
constexpr double kMaxWaitSeconds = 60;
// Questions that wait here, of all peers together.
constexpr int64_t kMaxWaiting = 4096;

absl::Status BeyondEnd(const v1::FetchPartRequest& request, int64_t begin, int64_t end) {
  return absl::OutOfRangeError(absl::StrCat("bytes [", request.begin(), ", ", request.end(),
                                            ") asked for, [", begin, ", ", end, ") are here"));
}

}  // namespace

void PeerOperation::Ask(const v1::FetchPartRequest& request, std::unique_ptr<PeerReply> reply) {
  if (TryAnswer(request, reply.get())) return;
  if (context_->waiting->load() >= kMaxWaiting) {
    return reply->Finish(absl::UnavailableError(absl::StrCat(
        "server ", self(), " has ", kMaxWaiting, " questions waiting already; ask again")));
  }
  const double seconds = std::isfinite(request.wait_seconds())
                             ? std::clamp(request.wait_seconds(), 0.0, kMaxWaitSeconds)
                             : 0.0;
  waiting_.push_back({request, std::move(reply),
                      context_->clock->NowMicros() + static_cast<int64_t>(seconds * 1e6)});
  context_->waiting->fetch_add(1);
  unused_ = false;
}

bool PeerOperation::TryAnswer(const v1::FetchPartRequest& request, PeerReply* reply) {
  if (state_ == State::kFailed) {
    reply->Finish(absl::FailedPreconditionError(absl::StrCat(
        DescribeKey(key_), " ended on server ", self(), ": ", std::string(status_.message()))));
    return true;
  }
  if (state_ == State::kWaits) return false;
  if (!request.has_shard()) return AnswerSum(request, reply);
  if (request.end() > bytes_) {
    reply->Finish(BeyondEnd(request, 0, bytes_));
    return true;
  }
  const bool gathers = kind_ == CollectivePart::Kind::kGather;
  const std::optional<LocalPart>& local = parts_[request.shard()];
  if (!local && state_ == State::kRuns) return false;
  if (!gathers && !local) {
    // Whoever has completed a sum knows that every contribution to it was fetched.
    reply->Finish(absl::FailedPreconditionError(
        absl::StrCat(DescribeKey(key_), " is finished on server ", self())));
    return true;
  }
  const char* const contribution =
      gathers ? kept_.get() + request.shard() * bytes_ : static_cast<const char*>(local->part.in);
  Send(contribution + request.begin(), request, reply);
  return true;
}

bool PeerOperation::AnswerSum(const v1::FetchPartRequest& request, PeerReply* reply) {
  if (kind_ == CollectivePart::Kind::kGather) {
    reply->Finish(absl::InvalidArgumentError(
        absl::StrCat(DescribeKey(key_), " is a gather: it has no sum to ask for")));
    return true;
  }
  if (request.begin() < segment_begin_ || request.end() > segment_end_) {
    reply->Finish(BeyondEnd(request, segment_begin_, segment_end_));
    return true;
  }
  for (int64_t at = (request.begin() - segment_begin_) / add_piece_bytes_;
       at * add_piece_bytes_ + segment_begin_ < request.end(); ++at) {
    if (!pieces_[add_pieces_at_ + static_cast<size_t>(at)].landed) return false;
  }
  Send(kept_.get() + (request.begin() - segment_begin_), request, reply);
  return true;
}

void PeerOperation::Send(const char* from, const v1::FetchPartRequest& request, PeerReply* reply) {
  std::atomic<int64_t>* const sent = kind_ == CollectivePart::Kind::kGather
                                         ? context_->gather_bytes_sent
                                         : context_->sum_bytes_sent;
  for (int64_t at = request.begin(); at < request.end(); at += kPeerChunkBytes) {
    const auto size = static_cast<size_t>(std::min(kPeerChunkBytes, request.end() - at));
    v1::PeerChunk chunk;
    chunk.set_offset(at);
    chunk.set_payload(from + (at - request.begin()), size);
    chunk.set_crc32c(Crc32c(chunk.payload().data(), size));
    chunk.set_last(at + kPeerChunkBytes >= request.end());
    sent->fetch_add(static_cast<int64_t>(size));
    reply->Write(std::move(chunk));
  }
  reply->Finish(absl::OkStatus());
}

void PeerOperation::AnswerWaiting() {
  std::vector<Waiting> keep;
  for (Waiting& waiting : waiting_) {
    if (waiting.reply->caller_gone()) continue;
    if (!TryAnswer(waiting.request, waiting.reply.get())) keep.push_back(std::move(waiting));
  }
  SetWaiting(std::move(keep));
}

void PeerOperation::RefuseWaiting() {
  for (const Waiting& waiting : waiting_) TryAnswer(waiting.request, waiting.reply.get());
  SetWaiting({});
}

void PeerOperation::SetWaiting(std::vector<Waiting> waiting) {
  context_->waiting->fetch_add(static_cast<int64_t>(waiting.size()) -
                               static_cast<int64_t>(waiting_.size()));
  waiting_ = std::move(waiting);
  unused_ = state_ == State::kWaits && waiting_.empty();
}

}  // namespace stiefel
