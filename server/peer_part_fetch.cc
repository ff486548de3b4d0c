#include "server/peer_part_fetch.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/checksum.h"
#include "common/errors.h"

namespace stiefel {
namespace {

constexpr int64_t kFirstBackoffMicros = 50000;
constexpr int64_t kMaxBackoffMicros = 2000000;

}  // namespace

bool PeerMayRetry(const absl::Status& status) {
  switch (status.code()) {
    case absl::StatusCode::kInvalidArgument:
    case absl::StatusCode::kOutOfRange:
    case absl::StatusCode::kFailedPrecondition:
    case absl::StatusCode::kUnimplemented:
    case absl::StatusCode::kPermissionDenied:
    case absl::StatusCode::kUnauthenticated:
      return false;
    default:
      return true;
  }
}

int64_t PeerBackoffMicros(const absl::Status& status, int failures) {
  if (status.code() == absl::StatusCode::kDeadlineExceeded) return 0;
  return std::min(kMaxBackoffMicros, kFirstBackoffMicros << std::min(failures, 10));
}

void PeerBytes::Take(v1::PeerChunk chunk) {
  if (!wrong_.ok()) return;
  const int64_t size = static_cast<int64_t>(chunk.payload().size());
  if (chunk.offset() != next_ || size > end_ - next_) {
    wrong_ = absl::DataLossError(absl::StrCat("a chunk of bytes ", chunk.offset(), " + ", size,
                                              " where ", next_, " of ", end_, " come next"));
    return;
  }
  const uint32_t crc = Crc32c(chunk.payload().data(), chunk.payload().size());
  if (crc != chunk.crc32c()) {
    wrong_ = ChecksumMismatch(absl::StrCat("bytes ", next_, " + ", size, " from a peer"), crc,
                              chunk.crc32c());
    return;
  }
  next_ += size;
  if (bytes_.empty()) {
    bytes_ = std::move(*chunk.mutable_payload());
  } else {
    bytes_ += chunk.payload();
  }
}

absl::Status PeerBytes::Ended(const absl::Status& status) const {
  if (!wrong_.ok()) return wrong_;
  if (!status.ok()) return status;
  if (next_ == end_) return absl::OkStatus();
  return absl::DataLossError(
      absl::StrCat("the peer ended its answer at byte ", next_, " of ", end_));
}

void PartFetch::Start(PeerTransport* transport, const std::string& address,
                      v1::FetchPartRequest request, int64_t wait_micros, Landed landed) {
  retry_at_ = 0;
  if (source_.shard) request.set_shard(*source_.shard);
  request.set_begin(begin_);
  request.set_end(end_);
  request.set_wait_seconds(static_cast<double>(wait_micros) * 1e-6);
  auto bytes = std::make_shared<PeerBytes>(begin_, end_);
  call_ = transport->FetchPart(
      address, request, wait_micros + kPeerSlackMicros,
      [bytes](v1::PeerChunk chunk) { bytes->Take(std::move(chunk)); },
      [bytes, landed = std::move(landed)](const absl::Status& status) {
        landed(bytes->Ended(status), std::move(bytes->bytes()));
      });
}

bool PartFetch::Take(const absl::Status& status, std::string bytes, int64_t now_micros) {
  call_.reset();
  if (status.ok()) {
    arrived_ = true;
    bytes_ = std::move(bytes);
    return true;
  }
  last_error_ = status;
  // Never 0, which says that there is nothing to ask.
  retry_at_ = std::max<int64_t>(1, now_micros + PeerBackoffMicros(status, failures_++));
  return false;
}

void PartFetch::Drop() {
  call_.reset();
  retry_at_ = 0;
  bytes_ = std::string();
}

}  // namespace stiefel
