#include "server/peer_collective.h"

#include <algorithm>
#include <string>

#include "absl/strings/str_cat.h"
#include "common/errors.h"
#include "common/status.h"
#include "proto/protocol.h"

namespace stiefel {
namespace {

constexpr int64_t kLateTickMicros = 2000000;
constexpr int64_t kMinTimeoutMicros = 1000;
// One answer: so that no call makes a server queue more.
constexpr int64_t kMaxAnswerBytes = kMaxMessageBytes;
// Elements of one part: far beyond memory, and no size computed from it overflows.
constexpr int64_t kMaxCount = int64_t{1} << 44;

CollectiveKey FromWire(const v1::CollectiveKey& wire) {
  return {wire.step(), wire.attempt(), wire.round(), wire.matrix(), wire.index()};
}

absl::Status CheckGroup(const PeerGroup& group) {
  const auto servers = static_cast<int64_t>(group.servers.size());
  if (group.self < 0 || group.self >= servers)
    return IndexOutOfRange("this server", group.self, servers);
  for (size_t matrix = 0; matrix < group.owners.size(); ++matrix) {
    if (group.owners[matrix].empty())
      return absl::InvalidArgumentError(absl::StrCat("matrix ", matrix, " has no shards"));
    for (const int32_t owner : group.owners[matrix]) {
      if (owner < 0 || owner >= servers)
        return IndexOutOfRange(absl::StrCat("an owner of matrix ", matrix), owner, servers);
    }
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::unique_ptr<PeerCollective>> PeerCollective::Create(
    PeerGroup group, const Environment& environment) {
  STIEFEL_RETURN_IF_ERROR(CheckGroup(group));
  if (environment.timeout_micros < kMinTimeoutMicros)
    return absl::InvalidArgumentError(absl::StrCat("a timeout of ", environment.timeout_micros,
                                                   " us is below ", kMinTimeoutMicros));
  return std::unique_ptr<PeerCollective>(new PeerCollective(std::move(group), environment));
}

PeerCollective::PeerCollective(PeerGroup group, const Environment& environment)
    : group_(std::move(group)), environment_(environment) {
  context_ = {&group_,
              environment_.transport,
              environment_.executor,
              environment_.clock,
              environment_.timeout_micros,
              &sum_bytes_sent_,
              &gather_bytes_sent_,
              &waiting_,
              [this](const CollectiveKey& key) { OnCompleted(key); }};
}

PeerCollective::~PeerCollective() {
  std::vector<Entry> entries;
  {
    MutexLock lock(&mutex_);
    for (auto& [key, entry] : entries_) entries.push_back(std::move(entry));
    entries_.clear();
  }
  End(entries, absl::CancelledError("the collective's placement is over"));
}

// ---------------------------------------------------------------- the computing side

absl::Status PeerCollective::CheckPart(const CollectiveKey& key, const CollectivePart& part) const {
  const auto matrices = static_cast<int64_t>(group_.owners.size());
  if (key.matrix < 0 || key.matrix >= matrices)
    return IndexOutOfRange("a collective's matrix", key.matrix, matrices);
  const std::vector<int32_t>& owners = group_.owners[key.matrix];
  if (part.shard < 0 || part.shard >= static_cast<int64_t>(owners.size()))
    return IndexOutOfRange(absl::StrCat("a shard of matrix ", key.matrix), part.shard,
                           static_cast<int64_t>(owners.size()));
  if (owners[part.shard] != group_.self)
    return absl::InvalidArgumentError(absl::StrCat("shard ", part.shard, " of matrix ", key.matrix,
                                                   " is server ", owners[part.shard],
                                                   "'s, not server ", group_.self, "'s"));
  if (part.count < 0 || part.count > kMaxCount)
    return absl::InvalidArgumentError(
        absl::StrCat(DescribeKey(key), ": a count of ", part.count, " is not in [0, 2^44]"));
  if (part.count > 0 && (part.in == nullptr || part.out == nullptr))
    return absl::InvalidArgumentError(absl::StrCat(DescribeKey(key), ": no memory"));
  return absl::OkStatus();
}

void PeerCollective::Start(const CollectiveKey& key, const CollectivePart& part, Done done) {
  absl::Status refused = CheckPart(key, part);
  if (refused.ok()) {
    MutexLock lock(&mutex_);
    if (CheckLive(key).ok()) {
      const Entry& entry = Find(key);
      // Moved on, so that the strand never is the last to hold what `done` holds: that may be this
      // collective.
      auto held = std::make_shared<Done>(std::move(done));
      entry.strand->Post(
          [operation = entry.operation, part, held] { operation->Start(part, std::move(*held)); });
      return;
    }
    refused = absl::CancelledError(absl::StrCat(DescribeKey(key), " is over"));
  }
  environment_.executor->Post([done = std::move(done), refused] { done(refused); });
}

void PeerCollective::Cancel(int64_t step, int32_t attempt) {
  std::vector<Entry> entries;
  {
    MutexLock lock(&mutex_);
    const Attempt over(step, attempt);
    if (!over_ || *over_ < over) over_ = over;
    for (auto at = entries_.begin(); at != entries_.end();) {
      if (Attempt(at->first.step, at->first.attempt) <= over) {
        entries.push_back(std::move(at->second));
        at = entries_.erase(at);
      } else {
        ++at;
      }
    }
  }
  End(entries,
      absl::CancelledError(absl::StrCat("step ", step, ", attempt ", attempt, " is over")));
}

void PeerCollective::End(const std::vector<Entry>& entries, const absl::Status& status) {
  for (const Entry& entry : entries) entry.strand->Close([&] { entry.operation->End(status); });
}

PeerCollective::Entry& PeerCollective::Find(const CollectiveKey& key) {
  Entry& entry = entries_[key];
  if (entry.strand == nullptr) {
    entry.strand = std::make_shared<PeerStrand>(environment_.executor);
    entry.operation = std::make_shared<PeerOperation>(&context_, key, entry.strand);
  }
  return entry;
}

absl::Status PeerCollective::CheckLive(const CollectiveKey& key) const {
  if (over_ && Attempt(key.step, key.attempt) <= *over_) {
    return absl::FailedPreconditionError(absl::StrCat(DescribeKey(key), ": server ", group_.self,
                                                      " is past step ", over_->first, ", attempt ",
                                                      over_->second));
  }
  const auto completed = completed_.find(key.matrix);
  if (completed != completed_.end() && key < completed->second && entries_.count(key) == 0) {
    return absl::FailedPreconditionError(absl::StrCat(DescribeKey(key), ": server ", group_.self,
                                                      " has completed ",
                                                      DescribeKey(completed->second)));
  }
  return absl::OkStatus();
}

// On the strand of `key`. Earlier strands never wait for later ones.
void PeerCollective::OnCompleted(const CollectiveKey& key) {
  std::vector<Entry> entries;
  {
    MutexLock lock(&mutex_);
    CollectiveKey& completed = completed_[key.matrix];
    completed.matrix = key.matrix;
    if (completed < key) completed = key;
    CollectiveKey first;
    first.matrix = key.matrix;
    first.step = INT64_MIN;
    auto at = entries_.lower_bound(first);
    while (at != entries_.end() && at->first < key) {
      entries.push_back(std::move(at->second));
      at = entries_.erase(at);
    }
  }
  End(entries, absl::CancelledError(absl::StrCat(DescribeKey(key), " is completed")));
}

int64_t PeerCollective::operations() const {
  MutexLock lock(&mutex_);
  return static_cast<int64_t>(entries_.size());
}

void PeerCollective::Tick() {
  const int64_t now = environment_.clock->NowMicros();
  MutexLock lock(&mutex_);
  const int64_t gap = last_tick_ == 0 ? 0 : now - last_tick_;
  last_tick_ = now;
  for (auto at = entries_.begin(); at != entries_.end();) {
    const Entry& entry = at->second;
    if (entry.operation->unused() && entry.strand->Idle()) {
      at = entries_.erase(at);
      continue;
    }
    entry.strand->Post([operation = entry.operation, now, gap] {
      if (gap > kLateTickMicros) operation->Extend(gap);
      operation->Tick(now);
    });
    ++at;
  }
}

// ---------------------------------------------------------------- the answering side

bool PeerCollective::Owns(int32_t server, int32_t matrix) const {
  const std::vector<int32_t>& owners = group_.owners[matrix];
  return std::count(owners.begin(), owners.end(), server) > 0;
}

absl::Status PeerCollective::CheckSender(const v1::PeerSender& sender,
                                         const CollectiveKey& key) const {
  const std::string what =
      absl::StrCat("FetchPart from server ", sender.server_index(), " for ", DescribeKey(key));
  if (sender.run_uid() != group_.run_uid)
    return RunMismatch(what, absl::StrCat("uid ", sender.run_uid()),
                       absl::StrCat("uid ", group_.run_uid));
  if (sender.placement_epoch() < group_.placement_epoch)
    return PlacementEpochMismatch(what, sender.placement_epoch(), group_.placement_epoch);
  if (sender.placement_epoch() > group_.placement_epoch)
    return absl::UnavailableError(absl::StrCat(what, ": placement ", sender.placement_epoch(),
                                               " is not in force on server ", group_.self,
                                               " yet, which has ", group_.placement_epoch));
  const auto matrices = static_cast<int64_t>(group_.owners.size());
  if (key.matrix < 0 || key.matrix >= matrices) return IndexOutOfRange(what, key.matrix, matrices);
  if (sender.server_index() == group_.self || !Owns(sender.server_index(), key.matrix))
    return absl::InvalidArgumentError(absl::StrCat(what, ": not another owner of the matrix"));
  if (!Owns(group_.self, key.matrix))
    return absl::InvalidArgumentError(
        absl::StrCat(what, ": server ", group_.self, " owns nothing of the matrix"));
  return absl::OkStatus();
}

absl::Status PeerCollective::CheckRequest(const v1::FetchPartRequest& request,
                                          const CollectiveKey& key) const {
  STIEFEL_RETURN_IF_ERROR(CheckSender(request.sender(), key));
  const std::vector<int32_t>& owners = group_.owners[key.matrix];
  if (request.has_shard()) {
    if (request.shard() < 0 || request.shard() >= static_cast<int64_t>(owners.size()))
      return IndexOutOfRange(absl::StrCat("a shard asked for in ", DescribeKey(key)),
                             request.shard(), static_cast<int64_t>(owners.size()));
    if (owners[request.shard()] != group_.self)
      return absl::InvalidArgumentError(
          absl::StrCat("shard ", request.shard(), " asked for in ", DescribeKey(key), " is server ",
                       owners[request.shard()], "'s, not server ", group_.self, "'s"));
  }
  if (request.begin() < 0 || request.end() <= request.begin() ||
      request.end() - request.begin() > kMaxAnswerBytes)
    return absl::InvalidArgumentError(absl::StrCat("bytes [", request.begin(), ", ", request.end(),
                                                   ") are not a range of 1 to ", kMaxAnswerBytes));
  if (key.step < 0 || key.attempt < 0 || key.round < 0 || key.index < 0)
    return absl::InvalidArgumentError(absl::StrCat(DescribeKey(key), ": below 0"));
  return absl::OkStatus();
}

void PeerCollective::OnFetchPart(const v1::FetchPartRequest& request,
                                 std::unique_ptr<PeerReply> reply) {
  const CollectiveKey key = FromWire(request.key());
  absl::Status refused = CheckRequest(request, key);
  if (refused.ok()) {
    MutexLock lock(&mutex_);
    refused = CheckLive(key);
    if (refused.ok()) {
      const Entry& entry = Find(key);
      // A task must be copyable.
      auto held = std::make_shared<std::unique_ptr<PeerReply>>(std::move(reply));
      entry.strand->Post([operation = entry.operation, request, held] {
        operation->Ask(request, std::move(*held));
      });
      return;
    }
  }
  reply->Finish(refused);
}

}  // namespace stiefel
