#include "kernels/local_collective.h"

#include <algorithm>
#include <cstring>
#include <tuple>

#include "absl/strings/str_cat.h"

namespace stiefel {
namespace {

using Parts = std::vector<std::optional<CollectivePart>>;

// Elements that are added at a time, in the first-level cache.
constexpr int64_t kBlock = 2048;

void Gather(const Parts& parts) {
  for (const auto& to : parts) {
    char* out = static_cast<char*>(to->out);
    for (const auto& from : parts) {
      std::memcpy(out, from->in, from->count);
      out += from->count;
    }
  }
}

// A block is read from every shard before it is written to any, so that out may be in.
template <typename T>
void Sum(const Parts& parts) {
  const int64_t count = parts[0]->count;
  for (int64_t begin = 0; begin < count; begin += kBlock) {
    const int64_t n = std::min(kBlock, count - begin);
    T sum[kBlock];
    std::memcpy(sum, static_cast<const T*>(parts[0]->in) + begin, n * sizeof(T));
    for (size_t shard = 1; shard < parts.size(); ++shard) {
      const T* in = static_cast<const T*>(parts[shard]->in) + begin;
      for (int64_t i = 0; i < n; ++i) sum[i] += in[i];
    }
    for (const auto& part : parts)
      std::memcpy(static_cast<T*>(part->out) + begin, sum, n * sizeof(T));
  }
}

void Compute(const Parts& parts) {
  switch (parts[0]->kind) {
    case CollectivePart::Kind::kGather:
      return Gather(parts);
    case CollectivePart::Kind::kSumFp32:
      return Sum<float>(parts);
    case CollectivePart::Kind::kSumFp64:
      return Sum<double>(parts);
  }
}

std::string Name(const CollectiveKey& key) {
  return absl::StrCat("collective ", key.index, " of matrix ", key.matrix, ", step ", key.step,
                      ", attempt ", key.attempt, ", round ", key.round);
}

absl::Status CancelledError(int64_t step, int32_t attempt) {
  return absl::CancelledError(absl::StrCat("attempt ", attempt, " of step ", step, " is over"));
}

}  // namespace

bool LocalCollective::KeyOrder::operator()(const CollectiveKey& a, const CollectiveKey& b) const {
  return std::tie(a.step, a.attempt, a.round, a.matrix, a.index) <
         std::tie(b.step, b.attempt, b.round, b.matrix, b.index);
}

LocalCollective::LocalCollective(std::vector<int32_t> shards)
    : shards_(std::move(shards)), thread_([this] { Work(); }) {}

LocalCollective::~LocalCollective() {
  {
    MutexLock lock(&mutex_);
    ends_ = true;
    wake_.NotifyAll();
  }
  thread_.join();
}

absl::Status LocalCollective::Enter(const CollectiveKey& key, const CollectivePart& part,
                                    Meeting* meeting) const {
  const auto matrices = static_cast<int32_t>(shards_.size());
  if (key.matrix < 0 || key.matrix >= matrices) {
    return absl::InvalidArgumentError(
        absl::StrCat(Name(key), ": there are ", matrices, " matrices"));
  }
  const int32_t shards = shards_[key.matrix];
  meeting->parts.resize(shards);
  if (part.shard < 0 || part.shard >= shards) {
    return absl::InvalidArgumentError(
        absl::StrCat(Name(key), ": shard ", part.shard, " of ", shards));
  }
  if (meeting->parts[part.shard].has_value()) {
    return absl::InvalidArgumentError(
        absl::StrCat(Name(key), ": shard ", part.shard, " takes part twice"));
  }
  for (const auto& other : meeting->parts) {
    if (!other.has_value() || (other->kind == part.kind && other->count == part.count)) continue;
    return absl::InvalidArgumentError(
        absl::StrCat(Name(key), ": shard ", part.shard, " brings ", part.count, " of kind ",
                     static_cast<int>(part.kind), ", shard ", other->shard, " ", other->count,
                     " of kind ", static_cast<int>(other->kind)));
  }
  meeting->parts[part.shard] = part;
  return absl::OkStatus();
}

void LocalCollective::Start(const CollectiveKey& key, const CollectivePart& part, Done done) {
  const Attempt attempt(key.step, key.attempt);
  MutexLock lock(&mutex_);
  if (cancelled_.has_value() && attempt <= *cancelled_) {
    Task task{attempt, {}, CancelledError(key.step, key.attempt)};
    task.meeting.done.push_back(std::move(done));
    tasks_.push_back(std::move(task));
    return wake_.NotifyAll();
  }
  Meeting& meeting = meetings_[key];
  const absl::Status entered = Enter(key, part, &meeting);
  meeting.done.push_back(std::move(done));
  const bool waits = std::any_of(meeting.parts.begin(), meeting.parts.end(),
                                 [](const auto& p) { return !p.has_value(); });
  if (entered.ok() && waits) return;
  tasks_.push_back({attempt, std::move(meeting), entered});
  meetings_.erase(key);
  wake_.NotifyAll();
}

void LocalCollective::Cancel(int64_t step, int32_t attempt) {
  const Attempt last(step, attempt);
  MutexLock lock(&mutex_);
  cancelled_ = std::max(cancelled_.value_or(last), last);
  const absl::Status status = CancelledError(step, attempt);
  for (Task& task : tasks_) {
    if (task.attempt <= last && task.status.ok()) task.status = status;
  }
  while (!meetings_.empty()) {
    const auto first = meetings_.begin();  // in ascending order of attempts
    const Attempt of_first(first->first.step, first->first.attempt);
    if (of_first > last) break;
    tasks_.push_back({of_first, std::move(first->second), status});
    meetings_.erase(first);
  }
  wake_.NotifyAll();
  while (computing_.has_value() && *computing_ <= last) computed_.Wait(&mutex_);
}

void LocalCollective::Work() {
  mutex_.Lock();
  for (;;) {
    while (tasks_.empty() && !ends_) wake_.Wait(&mutex_);
    if (tasks_.empty() && meetings_.empty()) break;
    if (tasks_.empty()) {  // the end
      const auto first = meetings_.begin();
      tasks_.push_back({{first->first.step, first->first.attempt},
                        std::move(first->second),
                        CancelledError(first->first.step, first->first.attempt)});
      meetings_.erase(first);
    }
    Task task = std::move(tasks_.front());
    tasks_.pop_front();
    if (task.status.ok()) computing_ = task.attempt;
    mutex_.Unlock();
    if (task.status.ok()) Compute(task.meeting.parts);
    mutex_.Lock();
    computing_.reset();
    computed_.NotifyAll();
    mutex_.Unlock();
    for (Done& done : task.meeting.done) done(task.status);
    mutex_.Lock();
  }
  mutex_.Unlock();
}

}  // namespace stiefel
