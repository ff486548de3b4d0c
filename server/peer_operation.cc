#include "server/peer_operation.h"

#include <algorithm>
#include <cstring>
#include <tuple>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/peer_sum.h"

namespace stiefel {
namespace {

// Contributions under way to pieces of one sum: at most kAddPieces pieces, together about
// kAddWindowBytes.
constexpr int kAddPieces = 4;
constexpr int64_t kAddWindowBytes = 16 << 20;
constexpr int64_t kMinPieceBytes = 64 << 10;
// Finished pieces, or parts of a gather, under way from one peer.
constexpr int kPullPieces = 2;

// So that all foreign contributions to kAddPieces pieces fit the window.
int64_t AddPieceBytes(size_t foreign_shards) {
  const int64_t share =
      kAddWindowBytes / kAddPieces / std::max<int64_t>(1, static_cast<int64_t>(foreign_shards));
  return std::clamp(share / kMinPieceBytes * kMinPieceBytes, kMinPieceBytes, kPeerChunkBytes);
}

}  // namespace

std::string DescribeKey(const CollectiveKey& key) {
  return absl::StrCat("collective ", key.index, " of matrix ", key.matrix, ", step ", key.step,
                      ", attempt ", key.attempt, ", round ", key.round);
}

bool operator<(const CollectiveKey& a, const CollectiveKey& b) {
  return std::tie(a.matrix, a.step, a.attempt, a.round, a.index) <
         std::tie(b.matrix, b.step, b.attempt, b.round, b.index);
}

PeerOperation::PeerOperation(const Context* context, const CollectiveKey& key,
                             const std::shared_ptr<PeerStrand>& strand)
    : context_(context), key_(key), strand_(strand), parts_(owners().size()) {
  servers_ = owners();
  local_shards_ = static_cast<size_t>(std::count(servers_.begin(), servers_.end(), self()));
  std::sort(servers_.begin(), servers_.end());
  servers_.erase(std::unique(servers_.begin(), servers_.end()), servers_.end());
}

PeerOperation::~PeerOperation() { SetWaiting({}); }

// ---------------------------------------------------------------- the computing side

void PeerOperation::Start(const CollectivePart& part, Collective::Done done) {
  if (state_ == State::kFailed) return Deliver(std::move(done), status_);
  if (parts_[part.shard] || state_ == State::kDone) {
    return Deliver(std::move(done),
                   absl::InvalidArgumentError(absl::StrCat("shard ", part.shard, " has started ",
                                                           DescribeKey(key_), " before")));
  }
  const bool first = state_ == State::kWaits;
  if (!first && (part.kind != kind_ || part.count != count_)) {
    const absl::Status unequal = absl::InvalidArgumentError(
        absl::StrCat(DescribeKey(key_), ": shard ", part.shard, " brings ", part.count, " of kind ",
                     static_cast<int>(part.kind), ", another shard ", count_, " of kind ",
                     static_cast<int>(kind_)));
    Deliver(std::move(done), unequal);
    return Fail(unequal);
  }
  if (first) Begin(part);
  parts_[part.shard] = LocalPart{part, std::move(done)};
  ++started_;
  if (kind_ == CollectivePart::Kind::kGather && bytes_ > 0)
    std::memcpy(kept_.get() + part.shard * bytes_, part.in, bytes_);
  if (first) LaunchMore();
  Progress();
}

void PeerOperation::Begin(const CollectivePart& part) {
  state_ = State::kRuns;
  unused_ = false;
  kind_ = part.kind;
  count_ = part.count;
  bytes_ = count_ * ElementBytes(kind_);
  deadline_ = context_->clock->NowMicros() + context_->timeout_micros;
  if (kind_ == CollectivePart::Kind::kGather) {
    PlanGather();
  } else {
    PlanSum();
  }
  left_ = pieces_.size();
}

void PeerOperation::PlanSum() {
  const int64_t element = ElementBytes(kind_);
  const auto servers = static_cast<int32_t>(servers_.size());
  std::vector<PartSource> foreign;
  for (size_t shard = 0; shard < owners().size(); ++shard) {
    if (owners()[shard] != self())
      foreign.push_back({owners()[shard], static_cast<int32_t>(shard)});
  }
  add_piece_bytes_ = AddPieceBytes(foreign.size());
  for (int32_t j = 0; j < servers; ++j) {
    const int64_t begin = SegmentBegin(count_, servers, j) * element;
    const int64_t end = SegmentBegin(count_, servers, j + 1) * element;
    if (servers_[j] != self()) {
      PlanPieces(Role::kPull, kPullPieces, begin, end, kPeerChunkBytes,
                 {{servers_[j], std::nullopt}});
      continue;
    }
    segment_begin_ = begin;
    segment_end_ = end;
    add_pieces_at_ = pieces_.size();
    if (servers > 1) kept_.reset(new char[end - begin]);
    PlanPieces(Role::kAdd, kAddPieces, begin, end, add_piece_bytes_, foreign);
  }
}

void PeerOperation::PlanGather() {
  kept_.reset(new char[bytes_ * static_cast<int64_t>(owners().size())]);
  for (size_t shard = 0; shard < owners().size(); ++shard) {
    if (owners()[shard] == self()) continue;
    PlanPieces(Role::kGather, kPullPieces, 0, bytes_, kPeerChunkBytes,
               {{owners()[shard], static_cast<int32_t>(shard)}});
  }
}

void PeerOperation::PlanPieces(Role role, int limit, int64_t begin, int64_t end,
                               int64_t piece_bytes, const std::vector<PartSource>& from) {
  Lane lane{role, limit, {}};
  for (int64_t at = begin; at < end; at += piece_bytes) {
    Piece piece{lanes_.size(), at, std::min(end, at + piece_bytes), {}, from.size()};
    for (const PartSource& source : from)
      piece.fetches.emplace_back(source, piece.begin, piece.end);
    lane.pieces.push_back(pieces_.size());
    pieces_.push_back(std::move(piece));
  }
  lanes_.push_back(std::move(lane));
}

void PeerOperation::LaunchMore() {
  for (Lane& lane : lanes_) {
    while (lane.flying < lane.limit && lane.next < lane.pieces.size()) {
      const size_t index = lane.pieces[lane.next++];
      ++lane.flying;
      if (pieces_[index].missing == 0) ready_.push_back(index);
      for (size_t i = 0; i < pieces_[index].fetches.size(); ++i) Launch(index, i);
    }
  }
}

void PeerOperation::Launch(size_t piece, size_t fetch) {
  v1::FetchPartRequest request;
  v1::PeerSender* sender = request.mutable_sender();
  sender->set_run_uid(context_->group->run_uid);
  sender->set_placement_epoch(context_->group->placement_epoch);
  sender->set_server_index(self());
  v1::CollectiveKey* key = request.mutable_key();
  key->set_step(key_.step);
  key->set_attempt(key_.attempt);
  key->set_round(key_.round);
  key->set_matrix(key_.matrix);
  key->set_index(key_.index);
  PartFetch& wanted = pieces_[piece].fetches[fetch];
  const int64_t left = deadline_ - context_->clock->NowMicros();
  wanted.Start(
      context_->transport, context_->group->servers[wanted.source().server], std::move(request),
      std::clamp<int64_t>(std::min(left, context_->timeout_micros / 4), 1000, kPeerPollMicros),
      [weak_strand = strand_, weak = weak_from_this(), piece, fetch](absl::Status status,
                                                                     std::string bytes) {
        const std::shared_ptr<PeerStrand> strand = weak_strand.lock();
        if (strand == nullptr) return;
        auto held = std::make_shared<std::string>(std::move(bytes));
        strand->Post([weak, piece, fetch, status = std::move(status), held] {
          if (const auto self = weak.lock()) self->OnLanded(piece, fetch, status, std::move(*held));
        });
      });
}

void PeerOperation::OnLanded(size_t piece, size_t fetch, const absl::Status& status,
                             std::string bytes) {
  if (state_ != State::kRuns) return;
  PartFetch& wanted = pieces_[piece].fetches[fetch];
  if (wanted.Take(status, std::move(bytes), context_->clock->NowMicros())) {
    if (--pieces_[piece].missing == 0) ready_.push_back(piece);
    return Progress();
  }
  if (!PeerMayRetry(wanted.last_error()))
    Fail(absl::Status(status.code(),
                      absl::StrCat(NameOf(wanted.source().server), " refused ", DescribeKey(key_),
                                   ": ", std::string(status.message()))));
}

// At most one piece a call, so that whoever closes the strand does not wait long.
void PeerOperation::Progress() {
  if (state_ != State::kRuns) return;
  const bool gathers = kind_ == CollectivePart::Kind::kGather;
  if (!ready_.empty() && (gathers || AllStarted())) {
    Piece* piece = &pieces_[ready_.front()];
    ready_.pop_front();
    Land(piece);
    if (!ready_.empty()) {
      if (const auto strand = strand_.lock())
        strand->Post([weak = weak_from_this()] {
          if (const auto self = weak.lock()) self->Progress();
        });
    }
  }
  AnswerWaiting();
  if (left_ == 0 && AllStarted()) Complete();
}

void PeerOperation::Land(Piece* piece) {
  Lane& lane = lanes_[piece->lane];
  const int64_t size = piece->end - piece->begin;
  if (lane.role == Role::kAdd) {
    Add(*piece);
  } else if (lane.role == Role::kGather) {
    const PartFetch& from = piece->fetches[0];
    std::memcpy(kept_.get() + *from.source().shard * bytes_ + piece->begin, from.bytes().data(),
                size);
  } else {
    for (const std::optional<LocalPart>& local : parts_) {
      if (local)
        std::memcpy(static_cast<char*>(local->part.out) + piece->begin,
                    piece->fetches[0].bytes().data(), size);
    }
  }
  for (PartFetch& fetch : piece->fetches) fetch.Drop();
  piece->landed = true;
  --left_;
  --lane.flying;
  LaunchMore();
}

void PeerOperation::Add(const Piece& piece) {
  std::vector<const char*> in;
  std::vector<char*> out;
  auto foreign = piece.fetches.begin();
  for (const std::optional<LocalPart>& local : parts_) {
    if (!local) {
      in.push_back((foreign++)->bytes().data());
      continue;
    }
    in.push_back(static_cast<const char*>(local->part.in) + piece.begin);
    out.push_back(static_cast<char*>(local->part.out) + piece.begin);
  }
  if (kept_ != nullptr) out.push_back(kept_.get() + (piece.begin - segment_begin_));
  AddInOrder(kind_, in, out, (piece.end - piece.begin) / ElementBytes(kind_));
}

void PeerOperation::Complete() {
  state_ = State::kDone;
  if (kind_ == CollectivePart::Kind::kGather) {
    for (const std::optional<LocalPart>& local : parts_) {
      if (local && bytes_ > 0)
        std::memcpy(local->part.out, kept_.get(), bytes_ * static_cast<int64_t>(parts_.size()));
    }
  }
  std::vector<Collective::Done> done;
  for (std::optional<LocalPart>& local : parts_) {
    if (local) done.push_back(std::move(local->done));
    local.reset();
  }
  AnswerWaiting();
  // Before the shards go on: the next collective of this matrix comes after these.
  if (count_ > 0) context_->completed(key_);
  for (Collective::Done& report : done) Deliver(std::move(report), absl::OkStatus());
}

void PeerOperation::Fail(const absl::Status& status) {
  if (state_ == State::kFailed) return;
  state_ = State::kFailed;
  status_ = status;
  unused_ = false;
  std::vector<Collective::Done> done;
  for (std::optional<LocalPart>& local : parts_) {
    if (local) done.push_back(std::move(local->done));
    local.reset();
  }
  Release();
  RefuseWaiting();
  for (Collective::Done& report : done) Deliver(std::move(report), status);
}

void PeerOperation::Release() {
  for (Piece& piece : pieces_) {
    for (PartFetch& fetch : piece.fetches) fetch.Drop();
  }
  ready_.clear();
  kept_.reset();
}

void PeerOperation::End(const absl::Status& status) { Fail(status); }

void PeerOperation::Deliver(Collective::Done done, const absl::Status& status) {
  context_->executor->Post([done = std::move(done), status] { done(status); });
}

// ---------------------------------------------------------------- time

void PeerOperation::Tick(int64_t now) {
  if (state_ == State::kRuns) {
    if (now >= deadline_) return Fail(Missing());
    for (size_t piece = 0; piece < pieces_.size(); ++piece) {
      for (size_t fetch = 0; fetch < pieces_[piece].fetches.size(); ++fetch) {
        if (pieces_[piece].fetches[fetch].Due(now)) Launch(piece, fetch);
      }
    }
  }
  std::vector<Waiting> keep;
  for (Waiting& waiting : waiting_) {
    if (waiting.reply->caller_gone()) continue;
    if (now < waiting.expires_at) {
      keep.push_back(std::move(waiting));
      continue;
    }
    const absl::Status missing = state_ == State::kRuns ? Missing() : absl::OkStatus();
    waiting.reply->Finish(absl::DeadlineExceededError(
        absl::StrCat("not yet on server ", self(), ": ",
                     missing.ok() ? absl::StrCat(DescribeKey(key_), " has not begun there")
                                  : std::string(missing.message()))));
  }
  SetWaiting(std::move(keep));
}

std::string PeerOperation::NameOf(int32_t server) const {
  return absl::StrCat("server ", server, " (", context_->group->servers[server], ")");
}

absl::Status PeerOperation::Missing() const {
  std::string here;
  for (size_t shard = 0; shard < parts_.size(); ++shard) {
    if (owners()[shard] == self() && !parts_[shard])
      absl::StrAppend(&here, here.empty() ? "shard " : ", ", shard);
  }
  const std::string what =
      absl::StrCat(DescribeKey(key_), " within ", context_->timeout_micros / 1000, " ms: ");
  // Contributions first: where one is missing, sums are late too.
  for (const bool sums : {false, true}) {
    for (const Piece& piece : pieces_) {
      for (const PartFetch& fetch : piece.fetches) {
        if (fetch.arrived() || fetch.source().shard.has_value() == sums) continue;
        std::string text = absl::StrCat(
            what, "nothing came from ", NameOf(fetch.source().server), " of ",
            sums ? "its part of the sum" : absl::StrCat("shard ", *fetch.source().shard));
        const absl::Status& error = fetch.last_error();
        if (!error.ok()) absl::StrAppend(&text, " (", std::string(error.message()), ")");
        if (!here.empty()) absl::StrAppend(&text, "; not started here: ", here);
        const bool lost = !error.ok() && error.code() != absl::StatusCode::kDeadlineExceeded;
        return lost ? absl::UnavailableError(text) : absl::DeadlineExceededError(text);
      }
    }
  }
  return absl::DeadlineExceededError(
      absl::StrCat(what, "server ", self(), " did not start ", here));
}

}  // namespace stiefel
