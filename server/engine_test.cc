#include "server/engine.h"

#include <memory>
#include <set>
#include <utility>

#include "gtest/gtest.h"
#include "kernels/cpu/cpu_backend.h"

namespace stiefel {
namespace {

// Jobs that hold a worker until they are let go, and note the order of their beginnings.
class EngineTest : public ::testing::Test {
 protected:
  void Make(int workers, std::vector<int64_t> workspaces) {
    backend_ = std::shared_ptr<Backend>(*CreateCpuBackend(1));
    engine_ = *Engine::Create(backend_, workers, &RealClock());
    engine_->SetWorkspaces(std::move(workspaces));
  }
  void Hold(const std::string& name, int64_t workspace, int64_t order = Engine::kFirst) {
    const auto work = [this, name, workspace](const absl::Status& ready, Stream* stream,
                                              DeviceBuffer* memory) {
      MutexLock lock(&mutex_);
      statuses_.push_back(ready);
      if (ready.ok()) {
        EXPECT_NE(stream, nullptr);
        EXPECT_EQ(memory == nullptr, workspace == 0);
        if (memory != nullptr) {
          EXPECT_GE(memory->bytes(), workspace);
        }
      }
      begun_.push_back(name);
      changed_.NotifyAll();
      while (released_.count(name) == 0) changed_.Wait(&mutex_);
      ended_.insert(name);
      changed_.NotifyAll();
    };
    engine_->Submit(workspace, work, order);
  }
  void Release(const std::string& name) {
    MutexLock lock(&mutex_);
    released_.insert(name);
    changed_.NotifyAll();
  }
  void AwaitBegun(size_t count) {
    MutexLock lock(&mutex_);
    while (begun_.size() < count) changed_.Wait(&mutex_);
  }
  void AwaitEnded(const std::string& name) {
    MutexLock lock(&mutex_);
    while (ended_.count(name) == 0) changed_.Wait(&mutex_);
  }
  std::vector<std::string> Begun() {
    MutexLock lock(&mutex_);
    return begun_;
  }
  std::set<std::string> Ended() {
    MutexLock lock(&mutex_);
    return ended_;
  }

  std::shared_ptr<Backend> backend_;
  std::unique_ptr<Engine> engine_;
  Mutex mutex_;
  CondVar changed_;
  std::vector<std::string> begun_ ABSL_GUARDED_BY(mutex_);
  std::set<std::string> released_ ABSL_GUARDED_BY(mutex_);
  std::set<std::string> ended_ ABSL_GUARDED_BY(mutex_);
  std::vector<absl::Status> statuses_ ABSL_GUARDED_BY(mutex_);
};

TEST_F(EngineTest, WorkspacesAreBoundedByTheLargestInFlight) {
  // Two workers, three matrices: the bound of plan/memory.h is 1000 + 800 bytes, although either
  // worker may have run the largest.
  Make(2, {800, 100, 1000});
  for (int i = 0; i < 6; ++i) {
    const std::string large = "large" + std::to_string(i), small = "small" + std::to_string(i);
    Hold(large, 1000);
    Hold(small, 100);
    AwaitBegun(2 * i + 2);
    Release(large);
    Release(small);
    AwaitEnded(large);
    AwaitEnded(small);
  }
  EXPECT_EQ(backend_->AllocatedBytes(), 1800);
  while (engine_->pending() > 0) std::this_thread::yield();
  engine_->SetWorkspaces({});
  while (engine_->pending() > 0) std::this_thread::yield();
  EXPECT_EQ(backend_->AllocatedBytes(), 0);
}

TEST_F(EngineTest, AJobWhoseWorkspaceIsInUseDoesNotHoldUpLaterOnes) {
  Make(2, {1000, 10});
  Hold("first", 1000);
  AwaitBegun(1);
  Hold("second", 1000);  // must wait for the only large workspace
  Hold("third", 10);
  AwaitBegun(2);
  EXPECT_EQ(Begun(), (std::vector<std::string>{"first", "third"}));
  EXPECT_EQ(engine_->pending(), 3);
  Release("first");
  AwaitBegun(3);
  EXPECT_EQ(Begun().back(), "second");
  Release("second");
  Release("third");
  AwaitEnded("second");
  AwaitEnded("third");
}

TEST_F(EngineTest, WhatIsNeededFirstBeginsFirstAndEqualOnesAsTheyCame) {
  Make(1, {});
  Hold("running", 0);
  AwaitBegun(1);
  Hold("third layer", 0, 3);
  Hold("first layer", 0, 1);
  Hold("second layer", 0, 2);
  Hold("first layer too", 0, 1);
  Hold("for a peer", 0);
  const std::vector<std::string> order = {"running",         "for a peer",   "first layer",
                                          "first layer too", "second layer", "third layer"};
  for (size_t i = 0; i < order.size(); ++i) {
    AwaitBegun(i + 1);
    Release(order[i]);
  }
  AwaitEnded("third layer");
  EXPECT_EQ(Begun(), order);
}

TEST_F(EngineTest, NobodyIsOvertakenForEver) {
  Make(1, {});
  Hold("running", 0);
  AwaitBegun(1);
  Hold("last", 0, 9);
  // "running" and "last" belong to the first group; so do the first of those that come after.
  std::atomic<int> done{0};
  int done_before_last = -1;
  engine_->Submit(
      0, [&](const absl::Status&, Stream*, DeviceBuffer*) { done_before_last = done; }, 9);
  for (uint64_t i = 0; i < 2 * Engine::kMaxOvertaking; ++i) {
    engine_->Submit(
        0, [&done](const absl::Status&, Stream*, DeviceBuffer*) { ++done; }, 1);
  }
  Release("last");
  Release("running");
  while (engine_->pending() > 0) std::this_thread::yield();
  EXPECT_EQ(done_before_last, static_cast<int>(Engine::kMaxOvertaking) - 3);
  EXPECT_EQ(done, static_cast<int>(2 * Engine::kMaxOvertaking));
}

TEST_F(EngineTest, AWorkspaceThatWasNotSetAsideIsAnErrorAndNoHang) {
  Make(1, {10});
  Hold("large", 11);
  Release("large");
  AwaitEnded("large");
  MutexLock lock(&mutex_);
  EXPECT_EQ(statuses_[0].code(), absl::StatusCode::kResourceExhausted);
}

TEST_F(EngineTest, JobsWithoutWorkspaceNeedNone) {
  Make(1, {});
  Hold("hash", 0);
  Release("hash");
  AwaitEnded("hash");
  MutexLock lock(&mutex_);
  EXPECT_TRUE(statuses_[0].ok());
}

// Whether the second job still begins depends on who is faster; that the engine waits for whatever
// has begun, and keeps nothing of the rest, does not.
TEST_F(EngineTest, DestructionWaitsForWhatRunsAndForgetsTheRest) {
  Make(1, {10});
  Hold("runs", 10);
  AwaitBegun(1);
  Hold("second", 10);
  const auto held_by_job = std::make_shared<int>(0);
  engine_->Submit(0, [held_by_job](const absl::Status&, Stream*, DeviceBuffer*) {});
  std::thread release([this] {
    Release("runs");
    Release("second");
  });
  engine_.reset();
  release.join();
  const std::vector<std::string> begun = Begun();
  EXPECT_EQ(begun[0], "runs");
  EXPECT_EQ(Ended(), std::set<std::string>(begun.begin(), begun.end()));
  EXPECT_EQ(held_by_job.use_count(), 1);
  EXPECT_FALSE(Engine::Create(backend_, 0, &RealClock()).ok());
}

}  // namespace
}  // namespace stiefel
