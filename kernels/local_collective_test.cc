#include "kernels/local_collective.h"

#include <string>
#include <thread>

#include "common/mutex.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace stiefel {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using Kind = CollectivePart::Kind;

CollectiveKey Key(int64_t step, int32_t attempt, int32_t index = 0, int32_t matrix = 0) {
  CollectiveKey key;
  key.step = step;
  key.attempt = attempt;
  key.index = index;
  key.matrix = matrix;
  return key;
}

// What came to the `done` of some parts.
class Dones {
 public:
  Collective::Done Next() {
    return [this, thread = std::this_thread::get_id()](const absl::Status& status) {
      EXPECT_NE(std::this_thread::get_id(), thread) << "done on the calling thread";
      MutexLock lock(&mutex_);
      came_.push_back(status);
      changed_.NotifyAll();
    };
  }
  std::vector<absl::Status> Wait(size_t count) {
    MutexLock lock(&mutex_);
    while (came_.size() < count) changed_.Wait(&mutex_);
    return came_;
  }

 private:
  Mutex mutex_;
  CondVar changed_;
  std::vector<absl::Status> came_ ABSL_GUARDED_BY(mutex_);
};

TEST(LocalCollectiveTest, SumsInShardOrderWhateverTheOrderOfArrival) {
  // In fp32 (1e8 + 1) - 1e8 is 0, and 1e8 - 1e8 + 1 is 1. More elements than are added at a time.
  constexpr int64_t kCount = 5000;
  std::vector<std::vector<float>> in = {std::vector<float>(kCount, 1e8f),
                                        std::vector<float>(kCount, 1.0f),
                                        std::vector<float>(kCount, -1e8f)};
  in[2][kCount - 1] = 7;
  LocalCollective collective({3});
  int32_t index = 0;
  for (const std::vector<int>& order :
       std::vector<std::vector<int>>{{0, 1, 2}, {2, 1, 0}, {1, 2, 0}}) {
    std::vector<std::vector<float>> work = in;
    std::vector<float> out(kCount);
    Dones dones;
    for (int shard : order) {
      // Two of them in place.
      void* to = shard == 1 ? out.data() : work[shard].data();
      collective.Start(Key(1, 0, index), {Kind::kSumFp32, shard, kCount, work[shard].data(), to},
                       dones.Next());
    }
    ++index;
    for (const absl::Status& status : dones.Wait(3)) EXPECT_TRUE(status.ok()) << status;
    EXPECT_EQ(out[0], 0);
    EXPECT_EQ(out[kCount - 1], 1e8f + 7);
    EXPECT_EQ(work[0], out);
    EXPECT_EQ(work[2], out);
  }
}

TEST(LocalCollectiveTest, SumsInFp64AndGathersInShardOrder) {
  LocalCollective collective({1, 2});
  const double in[2] = {1e16, 1};
  double out[2], one = 3, same = 0;
  char names[2][4] = {{'a', 'b'}, {'c', 'd'}}, gathered[2][4] = {};
  Dones dones;
  collective.Start(Key(1, 0), {Kind::kSumFp64, 0, 1, &one, &same}, dones.Next());
  for (int shard : {1, 0}) {
    collective.Start(Key(1, 0, 0, 1), {Kind::kSumFp64, shard, 1, &in[shard], &out[shard]},
                     dones.Next());
    collective.Start(Key(1, 0, 1, 1), {Kind::kGather, shard, 2, names[shard], gathered[shard]},
                     dones.Next());
  }
  for (const absl::Status& status : dones.Wait(5)) EXPECT_TRUE(status.ok()) << status;
  EXPECT_EQ(same, 3);
  EXPECT_EQ(out[0], 1e16 + 1);
  EXPECT_EQ(out[1], out[0]);
  EXPECT_THAT(gathered[0], ElementsAre('a', 'b', 'c', 'd'));
  EXPECT_THAT(gathered[1], ElementsAre('a', 'b', 'c', 'd'));
}

TEST(LocalCollectiveTest, CancelEndsAnAttemptAndAllBefore) {
  LocalCollective collective({2});
  float value = 1;
  const CollectivePart part = {Kind::kSumFp32, 0, 1, &value, &value};
  Dones over, others;
  collective.Start(Key(3, 0), part, over.Next());
  collective.Start(Key(4, 1), part, over.Next());
  collective.Start(Key(4, 2), part, others.Next());
  collective.Cancel(4, 1);
  collective.Start(Key(4, 1, 1), part, over.Next());  // a part that still comes
  for (const absl::Status& status : over.Wait(3))
    EXPECT_EQ(status.code(), absl::StatusCode::kCancelled) << status;
  // The attempt after it goes on.
  float second = 2;
  collective.Start(Key(4, 2), {Kind::kSumFp32, 1, 1, &second, &second}, others.Next());
  for (const absl::Status& status : others.Wait(2)) EXPECT_TRUE(status.ok()) << status;
  EXPECT_EQ(value, 3);
}

TEST(LocalCollectiveTest, DestructionEndsWhatIsUnderWay) {
  Dones dones;
  float value = 1;
  {
    LocalCollective collective({2});
    collective.Start(Key(1, 0), {Kind::kSumFp32, 0, 1, &value, &value}, dones.Next());
  }
  EXPECT_EQ(dones.Wait(1)[0].code(), absl::StatusCode::kCancelled);
  EXPECT_EQ(value, 1);
}

// Memory named in a part may be freed when Cancel has returned, also where it is being added up.
TEST(LocalCollectiveTest, AfterCancelNoMemoryIsUsed) {
  constexpr int64_t kCount = 1 << 21;  // some milliseconds
  LocalCollective collective({2, 2});
  for (int32_t attempt = 0; attempt < 5; ++attempt) {
    std::vector<float> large(2 * kCount, 1.0f);
    float small[2] = {1, 1};
    Dones of_large, of_small;
    for (int shard : {0, 1}) {
      collective.Start(Key(1, attempt), {Kind::kSumFp32, shard, 1, &small[shard], &small[shard]},
                       of_small.Next());
      float* part = large.data() + shard * kCount;
      collective.Start(Key(1, attempt, 0, 1), {Kind::kSumFp32, shard, kCount, part, part},
                       of_large.Next());
    }
    of_small.Wait(2);  // the large sum is next
    collective.Cancel(1, attempt);
    const float last = large.back(), first = large[0];  // added up last and first
    for (const absl::Status& status : of_large.Wait(2)) {
      EXPECT_TRUE(status.ok() || status.code() == absl::StatusCode::kCancelled) << status;
      EXPECT_EQ(last, status.ok() ? 2 : 1);
      EXPECT_EQ(first, last);
    }
  }
}

TEST(LocalCollectiveTest, RefusesWhatDoesNotFit) {
  LocalCollective collective({2});
  float value = 0;
  const auto why = [&](int32_t index, int32_t matrix, std::vector<CollectivePart> parts) {
    Dones dones;
    for (const CollectivePart& part : parts)
      collective.Start(Key(1, 0, index, matrix), part, dones.Next());
    std::string text;
    for (const absl::Status& status : dones.Wait(parts.size())) {
      EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
      text = std::string(status.message());
    }
    return text;
  };
  const CollectivePart one = {Kind::kSumFp32, 0, 1, &value, &value};
  CollectivePart more = one, other = one, outside = one;
  more.shard = other.shard = 1;
  more.count = 2;
  other.kind = Kind::kSumFp64;
  outside.shard = 2;
  EXPECT_THAT(why(0, 0, {one, more}), HasSubstr("shard 1 brings 2"));
  EXPECT_THAT(why(1, 0, {one, other}), HasSubstr("kind"));
  EXPECT_THAT(why(2, 0, {one, one}), HasSubstr("shard 0 takes part twice"));
  EXPECT_THAT(why(3, 0, {outside}), HasSubstr("shard 2 of 2"));
  EXPECT_THAT(why(4, 1, {one}), HasSubstr("there are 1 matrices"));
}

}  // namespace
}  // namespace stiefel
