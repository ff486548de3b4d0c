// Servers of one run in one process whose collectives reach each other in memory, and shards that
// go through a list of collectives, checking every outcome against a plain loop.
#ifndef STIEFEL_SERVER_PEER_COLLECTIVE_TESTING_H_
#define STIEFEL_SERVER_PEER_COLLECTIVE_TESTING_H_

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/clock.h"
#include "common/mutex.h"
#include "gtest/gtest.h"
#include "server/peer_collective.h"
#include "server/peer_sum.h"
#include "tests/inmemory/memory_peers.h"

namespace stiefel::testing {

inline constexpr uint64_t kRunUid = 7;
inline constexpr int64_t kEpoch = 3;

inline PeerGroup Group(int servers, const std::vector<std::vector<int32_t>>& owners, int self) {
  PeerGroup group{kRunUid, kEpoch, self, {}, owners};
  for (int i = 0; i < servers; ++i) group.servers.push_back(absl::StrCat("host-", i, ":1"));
  return group;
}

// A collective as the peers of the run reach it.
class CollectiveServer final : public PeerHandler {
 public:
  CollectiveServer(PeerGroup group, MemoryPeers* peers, PeerExecutor* executor, const Clock* clock,
                   int64_t timeout_micros)
      : address_(group.servers[group.self]), transport_(peers->Transport(address_)) {
    collective_ = *PeerCollective::Create(std::move(group),
                                          {transport_.get(), executor, clock, timeout_micros});
    peers->Add(address_, this);
  }
  PeerCollective& collective() { return *collective_; }
  const std::string& address() const { return address_; }
  // Its memory is gone, as after SIGKILL; peers must have been told (MemoryPeers::Kill).
  void Destroy() { collective_.reset(); }
  bool alive() const { return collective_ != nullptr; }

  void OnFetchPart(const v1::FetchPartRequest& request, std::unique_ptr<PeerReply> reply) override {
    collective_->OnFetchPart(request, std::move(reply));
  }
  void OnFetchState(const v1::FetchStateRequest&, std::unique_ptr<PeerReply> reply) override {
    reply->Finish(absl::UnimplementedError("no state here"));
  }

 private:
  const std::string address_;
  const std::unique_ptr<PeerTransport> transport_;
  std::unique_ptr<PeerCollective> collective_;
};

// One collective of a matrix, the same for all its shards.
struct PlannedCollective {
  CollectivePart::Kind kind = CollectivePart::Kind::kGather;
  int64_t count = 0;
  bool in_place = false;  // sums
};

// What every shard brings to it, and what comes of it by a plain loop.
struct CollectiveCase {
  PlannedCollective planned;
  std::vector<std::vector<char>> contributions;
  std::vector<char> expected;
};

// Bits of a number of a size between 2^-20 and 2^20, so that another order of adding shows.
template <typename T, typename Bits>
void Fill(std::vector<char>* bytes, int mantissa_bits, Bits bias, uint64_t seed) {
  std::mt19937_64 random(seed);
  for (size_t at = 0; at < bytes->size(); at += sizeof(T)) {
    const auto drawn = static_cast<Bits>(random());
    const Bits exponent = bias - 20 + drawn % 41;
    const Bits sign_and_mantissa = ~(~Bits{0} << mantissa_bits) | Bits{1} << (8 * sizeof(T) - 1);
    const Bits value = (drawn & sign_and_mantissa) | exponent << mantissa_bits;
    std::memcpy(bytes->data() + at, &value, sizeof(T));
  }
}

template <typename T>
void AddPlainly(std::vector<char>* sum, const std::vector<char>& in) {
  for (size_t at = 0; at < in.size(); at += sizeof(T)) {
    T a, b;
    std::memcpy(&a, sum->data() + at, sizeof(T));
    std::memcpy(&b, in.data() + at, sizeof(T));
    a = a + b;
    std::memcpy(sum->data() + at, &a, sizeof(T));
  }
}

inline CollectiveCase MakeCase(const PlannedCollective& planned, size_t shards, uint64_t seed) {
  CollectiveCase made{planned, {}, {}};
  for (size_t shard = 0; shard < shards; ++shard) {
    std::vector<char> bytes(planned.count * ElementBytes(planned.kind));
    uint64_t own = seed * 1000 + shard;
    if (planned.kind == CollectivePart::Kind::kSumFp64) {
      Fill<double, uint64_t>(&bytes, 52, 1023, own);
    } else if (planned.kind == CollectivePart::Kind::kSumFp32) {
      Fill<float, uint32_t>(&bytes, 23, 127, own);
    } else {
      for (char& byte : bytes) byte = static_cast<char>(own += 0x9e3779b97f4a7c15);
    }
    if (shard == 0 || planned.kind == CollectivePart::Kind::kGather) {
      made.expected.insert(made.expected.end(), bytes.begin(), bytes.end());
    } else if (planned.kind == CollectivePart::Kind::kSumFp32) {
      AddPlainly<float>(&made.expected, bytes);
    } else {
      AddPlainly<double>(&made.expected, bytes);
    }
    made.contributions.push_back(std::move(bytes));
  }
  return made;
}

using CollectiveCases = std::shared_ptr<const std::vector<CollectiveCase>>;

inline CollectiveCases MakeCases(const std::vector<PlannedCollective>& planned, size_t shards,
                                 uint64_t seed) {
  auto cases = std::make_shared<std::vector<CollectiveCase>>();
  for (const PlannedCollective& one : planned) cases->push_back(MakeCase(one, shards, seed++));
  return cases;
}

// A shard's computation: collective after collective, in memory that it uses again as soon as one
// is done. Stops at the first error. Thread-safe.
class ShardChain {
 public:
  ShardChain(Collective* collective, CollectiveKey key, size_t shard, CollectiveCases cases)
      : collective_(collective), key_(key), shard_(shard), cases_(std::move(cases)) {
    size_t in = 1, out = 1;
    for (const CollectiveCase& one : *cases_) {
      in = std::max(in, one.contributions[shard].size());
      out = std::max(out, one.expected.size());
    }
    in_.resize(in);
    out_.resize(out);
  }

  void Next() {
    const CollectiveCase& now = (*cases_)[index_];
    const std::vector<char>& bytes = now.contributions[shard_];
    std::copy(bytes.begin(), bytes.end(), in_.begin());
    const CollectivePart part{now.planned.kind, static_cast<int32_t>(shard_), now.planned.count,
                              in_.data(), now.planned.in_place ? in_.data() : out_.data()};
    key_.index = static_cast<int32_t>(index_);
    collective_->Start(key_, part, [this](const absl::Status& status) { OnDone(status); });
  }

  // Its memory is its own again and is used for something else.
  void Scribble() {
    std::fill(in_.begin(), in_.end(), 0x5a);
    std::fill(out_.begin(), out_.end(), 0x5a);
  }
  bool StillScribbled() const {
    const auto same = [](char c) { return c == 0x5a; };
    return std::all_of(in_.begin(), in_.end(), same) && std::all_of(out_.begin(), out_.end(), same);
  }

  bool ended() const {
    MutexLock lock(&mutex_);
    return ended_;
  }
  absl::Status status() const {
    MutexLock lock(&mutex_);
    return status_;
  }

 private:
  void OnDone(const absl::Status& status) {
    {
      MutexLock lock(&mutex_);
      ASSERT_FALSE(ended_) << "done twice";
    }
    if (status.ok()) {
      const CollectiveCase& now = (*cases_)[index_];
      const char* got = now.planned.in_place ? in_.data() : out_.data();
      EXPECT_TRUE(std::equal(now.expected.begin(), now.expected.end(), got))
          << "shard " << shard_ << ", collective " << index_ << " of " << now.planned.count
          << ", kind " << static_cast<int>(now.planned.kind);
      if (++index_ < cases_->size()) return Next();
    }
    MutexLock lock(&mutex_);
    status_ = status;
    ended_ = true;
  }

  Collective* const collective_;
  CollectiveKey key_;
  const size_t shard_;
  const CollectiveCases cases_;
  std::vector<char> in_, out_;
  size_t index_ = 0;
  mutable Mutex mutex_;
  bool ended_ ABSL_GUARDED_BY(mutex_) = false;
  absl::Status status_ ABSL_GUARDED_BY(mutex_);
};

// Time, threads and network as one seed draws them.
class Simulation {
 public:
  Simulation(uint64_t seed, int servers, const std::vector<std::vector<int32_t>>& owners,
             int64_t timeout_micros)
      : owners_(owners), random_(seed), peers_(seed + 1, &clock_) {
    for (int i = 0; i < servers; ++i) {
      servers_.push_back(std::make_unique<CollectiveServer>(Group(servers, owners, i), &peers_,
                                                            &executor_, &clock_, timeout_micros));
    }
  }
  ~Simulation() {
    for (const auto& server : servers_) server->Destroy();
    Settle();  // `done` comes even now
  }

  MemoryPeers& peers() { return peers_; }
  FakeClock& clock() { return clock_; }
  CollectiveServer& operator[](int server) { return *servers_[server]; }
  int servers() const { return static_cast<int>(servers_.size()); }

  // Every shard of the matrix begins its chain, in a random order.
  std::vector<std::unique_ptr<ShardChain>> Chains(CollectiveKey key,
                                                  const std::vector<PlannedCollective>& planned,
                                                  uint64_t seed) {
    std::vector<std::unique_ptr<ShardChain>> chains;
    const std::vector<int32_t>& owners = owners_[key.matrix];
    const CollectiveCases cases = MakeCases(planned, owners.size(), seed);
    for (size_t shard = 0; shard < owners.size(); ++shard) {
      chains.push_back(
          std::make_unique<ShardChain>(&servers_[owners[shard]]->collective(), key, shard, cases));
      executor_.Post([chain = chains.back().get()] { chain->Next(); });
    }
    return chains;
  }

  // One thing happens; false where nothing is left to happen.
  bool Step() {
    if (executor_.size() > 0 && random_() % 2 == 0) return RunTask();
    if (peers_.Deliver()) return true;
    return executor_.size() > 0 && RunTask();
  }
  void Settle() {
    while (Step()) {
    }
  }
  // As the hosts do about four times a second.
  void Tick(int64_t micros = 250000) {
    clock_.Advance(micros);
    peers_.Expire();
    for (const auto& server : servers_) {
      if (server->alive()) server->collective().Tick();
    }
  }
  // Time passes whenever nothing happens. False: not within `seconds`.
  bool RunUntil(const std::function<bool()>& reached, double seconds) {
    const int64_t end = clock_.NowMicros() + static_cast<int64_t>(seconds * 1e6);
    while (!reached()) {
      if (Step()) continue;
      if (clock_.NowMicros() > end) return false;
      Tick();
    }
    return true;
  }

 private:
  bool RunTask() {
    executor_.Run(random_() % executor_.size());
    return true;
  }

  const std::vector<std::vector<int32_t>> owners_;
  std::mt19937_64 random_;
  FakeClock clock_{1000000};
  ManualExecutor executor_;
  MemoryPeers peers_;
  std::vector<std::unique_ptr<CollectiveServer>> servers_;
};

inline bool AllEnded(const std::vector<std::unique_ptr<ShardChain>>& chains) {
  return std::all_of(chains.begin(), chains.end(), [](const auto& c) { return c->ended(); });
}

}  // namespace stiefel::testing

#endif  // STIEFEL_SERVER_PEER_COLLECTIVE_TESTING_H_
