#include "server/peer_state.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/checksum.h"
#include "common/errors.h"
#include "common/status.h"
#include "server/peer_part_fetch.h"

namespace stiefel {
namespace {

constexpr int kTransfersAtOnce = 4;
constexpr double kWaitSeconds = 5;
constexpr int64_t kCallMicros = 20000000;

}  // namespace

void SendState(const StateImage& image, int64_t offset, PeerReply* reply) {
  const int64_t total = image.bytes();
  if (offset < 0 || offset > total) {
    return reply->Finish(
        absl::OutOfRangeError(absl::StrCat("state from byte ", offset, " on, but it has ", total)));
  }
  const int64_t end = std::min(total, offset + kStateCallBytes);
  int64_t span_begin = 0;
  auto span = image.spans.begin();
  bool first = true;
  do {
    while (span != image.spans.end() && offset >= span_begin + span->bytes)
      span_begin += (span++)->bytes;
    v1::PeerChunk chunk;
    chunk.set_offset(offset);
    if (first) *chunk.mutable_state() = image.state;
    first = false;
    if (span != image.spans.end()) {
      const int64_t bytes =
          std::min({kStateChunkBytes, end - offset, span_begin + span->bytes - offset});
      const char* data = span->data + (offset - span_begin);
      chunk.set_payload(data, static_cast<size_t>(bytes));
      chunk.set_crc32c(Crc32c(data, static_cast<size_t>(bytes)));
      offset += bytes;
    } else {
      chunk.set_crc32c(Crc32c(nullptr, 0));
    }
    chunk.set_last(offset == total);
    reply->Write(std::move(chunk));
  } while (offset < end);
  reply->Finish(absl::OkStatus());
}

StateFetcher::~StateFetcher() {
  std::vector<std::unique_ptr<PeerCall>> calls;
  {
    MutexLock lock(&mutex_);
    stopped_ = true;
    calls = std::move(over_);
    for (const std::unique_ptr<Transfer>& transfer : transfers_)
      calls.push_back(std::move(transfer->call));
  }
  calls.clear();  // waits for callbacks, which take the lock
}

void StateFetcher::Start(Request request, Done done) {
  MutexLock lock(&mutex_);
  *request_.mutable_sender() = request.sender;
  request_.set_after_step(request.after_step);
  request_.set_wait_seconds(kWaitSeconds);
  done_ = std::move(done);
  for (Shard& shard : request.shards) {
    transfers_.push_back(std::make_unique<Transfer>());
    transfers_.back()->shard = std::move(shard);
  }
  StartMore();
}

void StateFetcher::StartMore() {
  int under_way = 0;
  for (const std::unique_ptr<Transfer>& transfer : transfers_)
    under_way += transfer->begun && !transfer->complete;
  for (const std::unique_ptr<Transfer>& transfer : transfers_) {
    if (under_way >= kTransfersAtOnce) return;
    if (transfer->begun) continue;
    transfer->begun = true;
    ++under_way;
    Call(transfer.get());
  }
}

void StateFetcher::Call(Transfer* transfer) {
  if (transfer->call != nullptr) over_.push_back(std::move(transfer->call));
  transfer->retry_at = 0;
  transfer->described = false;
  transfer->wrong = absl::OkStatus();
  v1::FetchStateRequest request = request_;
  request.set_shard(transfer->shard.shard);
  request.set_offset(transfer->received);
  transfer->call = transport_->FetchState(
      transfer->shard.address, request, kCallMicros,
      [transfer](const v1::PeerChunk& chunk) {
        if (transfer->wrong.ok()) transfer->wrong = Take(chunk, transfer);
      },
      [this, transfer](const absl::Status& status) { OnCallDone(transfer, status); });
}

// Every call describes the state anew: it may have been answered by another life of the owner, but
// what was received must still be of the same state.
absl::Status StateFetcher::Take(const v1::PeerChunk& chunk, Transfer* transfer) {
  if (!transfer->described) {
    if (!chunk.has_state())
      return absl::DataLossError("the first chunk does not say what it is of");
    if (transfer->received > 0 &&
        chunk.state().SerializeAsString() != transfer->state.SerializeAsString()) {
      return absl::FailedPreconditionError("the state changed while it was fetched");
    }
    STIEFEL_ASSIGN_OR_RETURN(transfer->targets, transfer->shard.store->TargetsOf(chunk.state()));
    transfer->state = chunk.state();
    transfer->described = true;
  }
  const auto bytes = static_cast<int64_t>(chunk.payload().size());
  if (chunk.offset() != transfer->received)
    return absl::DataLossError(absl::StrCat("a chunk at byte ", chunk.offset(), " where ",
                                            transfer->received, " comes next"));
  const uint32_t crc = Crc32c(chunk.payload().data(), chunk.payload().size());
  if (crc != chunk.crc32c()) {
    return ChecksumMismatch(absl::StrCat("state bytes from ", chunk.offset(), " on"), crc,
                            chunk.crc32c());
  }
  int64_t begin = 0;
  for (const MatrixStore::StateTarget& target : transfer->targets) {
    const int64_t at = chunk.offset() - begin;
    begin += target.bytes;
    if (at < 0 || at >= target.bytes) continue;
    if (bytes > target.bytes - at) break;
    chunk.payload().copy(target.data + at, static_cast<size_t>(bytes));
    transfer->received += bytes;
    transfer->last = chunk.last();
    return absl::OkStatus();
  }
  if (bytes > 0) return absl::DataLossError(absl::StrCat(bytes, " bytes beyond the state"));
  transfer->last = chunk.last();
  return absl::OkStatus();
}

void StateFetcher::OnCallDone(Transfer* transfer, const absl::Status& status) {
  Done done;
  absl::Status outcome;
  {
    MutexLock lock(&mutex_);
    if (stopped_ || done_ == nullptr) return;
    const absl::Status ended = transfer->wrong.ok() ? status : transfer->wrong;
    if (ended.ok() && transfer->last) {
      int64_t expected = 0;
      for (const MatrixStore::StateTarget& target : transfer->targets) expected += target.bytes;
      if (transfer->received == expected) {
        transfer->shard.store->TakeState(transfer->state);
        transfer->complete = true;
        StartMore();
      } else {
        outcome = absl::DataLossError(
            absl::StrCat("its state ended at byte ", transfer->received, " of ", expected));
      }
    } else if (ended.ok()) {
      transfer->failures = 0;
      Call(transfer);
    } else if (PeerMayRetry(ended)) {
      transfer->retry_at = clock_->NowMicros() + PeerBackoffMicros(ended, transfer->failures++);
    } else {
      outcome = ended;
    }
    const bool all = std::all_of(transfers_.begin(), transfers_.end(),
                                 [](const auto& each) { return each->complete; });
    if (outcome.ok() && !all) return;
    if (!outcome.ok()) {
      outcome = absl::Status(outcome.code(),
                             absl::StrCat("state of shard ", transfer->shard.shard, " from ",
                                          transfer->shard.address, ": ", outcome.message()));
    }
    done = std::exchange(done_, nullptr);
  }
  done(outcome);
}

void StateFetcher::Tick() {
  std::vector<std::unique_ptr<PeerCall>> over;
  MutexLock lock(&mutex_);
  over.swap(over_);
  if (stopped_ || done_ == nullptr) return;
  const int64_t now = clock_->NowMicros();
  for (const std::unique_ptr<Transfer>& transfer : transfers_) {
    if (transfer->retry_at != 0 && now >= transfer->retry_at) Call(transfer.get());
  }
}

}  // namespace stiefel
