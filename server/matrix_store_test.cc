#include "server/matrix_store.h"

#include <cstring>

#include "gtest/gtest.h"
#include "kernels/cpu/cpu_backend.h"

namespace stiefel {
namespace {

MatrixSpec Spec(int64_t rows, int64_t cols, const std::string& preset, DType wire) {
  MatrixSpec spec;
  spec.name = "w";
  spec.rows = rows;
  spec.cols = cols;
  spec.rule = *PresetRule(preset);
  spec.push_dtype = spec.pull_dtype = wire;
  return spec;
}

// One store, with everything allocated for one rank that pushes all of it.
class Store {
 public:
  Store(MatrixSpec spec, Staging staging, bool weights_mode = false)
      : backend_(*CreateCpuBackend(1)),
        spec_(std::move(spec)),
        store_(*MatrixStore::Create(0, &spec_, weights_mode, backend_)),
        stream_(*backend_->CreateStream()) {
    RankState rank;
    rank.push.push_back({0, WholeRect(spec_.rows, spec_.cols), -1, 1});
    EXPECT_TRUE(MatrixStore::AllocateState({store_.get()}, backend_).ok());
    EXPECT_TRUE(MatrixStore::AllocateSteps({store_.get()}, staging, {rank}, backend_).ok());
    attempt_.ranks.resize(1);
  }

  MatrixStore& operator*() { return *store_; }
  MatrixStore* operator->() { return store_.get(); }
  const Backend& backend() const { return *backend_; }

  // Computes a step from a gradient of `value` everywhere, and finishes it.
  void Compute(int64_t step, float value) {
    auto* gradient = reinterpret_cast<float*>(store_->PieceTarget(0, 0, 0));
    for (int64_t i = 0; i < spec_.elements(); ++i) gradient[i] = value;
    auto job = store_->BeginJob({step, 0, 0}, attempt_, 1);
    ASSERT_TRUE(job.ok()) << job.status();
    auto workspace = *backend_->Allocate(store_->WorkspaceBytes());
    StepResult result;
    std::string explanation;
    ASSERT_TRUE(RunStepJob(*job, stream_.get(), &workspace, &result, &explanation).ok());
    store_->FinishJob(*job, result, explanation, 5);
  }
  void Commit(int64_t step) {
    if (auto absorb = store_->Commit(step)) {
      EXPECT_TRUE(RunAbsorbJob(*absorb, stream_.get()).ok());
    }
  }
  float Sent() { return store_->update()->buffer->floats()[0]; }
  uint64_t Hash() { return HashMatrix(store_->PinForHash()); }

 private:
  std::shared_ptr<Backend> backend_;
  MatrixSpec spec_;
  std::unique_ptr<MatrixStore> store_;
  std::unique_ptr<Stream> stream_;
  Attempt attempt_;
};

TEST(MatrixStoreTest, BytesPerParameterAreThoseOfTheDesign) {
  // DELTA, bf16 on the wire: M 4, G 2, delta 2, and M' 4 where it is staged.
  const int64_t n = 1000 * 1000;
  EXPECT_LE(
      Store(Spec(1000, 1000, "muon", DType::kBf16), Staging::kLazy).backend().AllocatedBytes(),
      9 * n);
  EXPECT_LE(
      Store(Spec(1000, 1000, "muon", DType::kBf16), Staging::kDouble).backend().AllocatedBytes(),
      13 * n);
}

TEST(MatrixStoreTest, NothingIsVisibleBeforeTheDecision) {
  for (const Staging staging : {Staging::kDouble, Staging::kLazy}) {
    Store store(Spec(4, 4, "lion", DType::kFp32), staging);
    const uint64_t empty = store.Hash();
    store.Compute(1, 1);
    EXPECT_EQ(store.Hash(), empty);
    store->Discard();
    EXPECT_FALSE(store->update().has_value());
    store.Compute(1, 1);
    store.Commit(1);
    EXPECT_NE(store.Hash(), empty);
    EXPECT_EQ(store->figures().commits, 1);
    EXPECT_EQ(store->figures().compute_micros, 10);
    const uint64_t one = store.Hash();
    store.Compute(2, 5);
    store->Skip("why");
    EXPECT_EQ(store.Hash(), one);
    EXPECT_EQ(store->figures().last_skip_reason, "why");
    store->SetAbsent({3, 0, 0});
    store->Skip("absent has nothing to skip");
    EXPECT_EQ(store->figures().skips, 1);
  }
}

TEST(MatrixStoreTest, PinnedBuffersAreLeftAloneAndUsedAgainLater) {
  for (const bool weights : {false, true}) {
    Store store(Spec(4, 4, "sgd", DType::kFp32), Staging::kDouble, weights);
    if (weights) std::memset(store->weights()->data(), 0, 64);
    store.Compute(1, 1);
    const float first = store.Sent();
    const auto* data = store->update()->buffer->floats();
    auto pin = SharedBuffer::Pin(store->update()->buffer);
    store.Commit(1);
    const int64_t before = store.backend().AllocatedBytes();
    for (int64_t step = 2; step <= 6; ++step) {
      store.Compute(step, static_cast<float>(step));
      store.Commit(step);
    }
    EXPECT_EQ(data[0], first);
    // One more buffer, and no more however long the reader takes.
    EXPECT_EQ(store.backend().AllocatedBytes(), before + 64);
    pin.reset();
    for (int64_t step = 7; step <= 9; ++step) {
      store.Compute(step, static_cast<float>(step));
      store.Commit(step);
    }
    EXPECT_EQ(store.backend().AllocatedBytes(), before + 64);
  }
}

TEST(MatrixStoreTest, NonFiniteUpdatesAreNotSent) {
  Store store(Spec(4, 4, "sgd", DType::kFp32), Staging::kDouble);
  store.Compute(1, std::numeric_limits<float>::infinity());
  ASSERT_TRUE(store->update().has_value());
  EXPECT_EQ(store->update()->buffer, nullptr);
  store->Skip("the step was skipped");
  EXPECT_EQ(store->figures().last_skip_reason,
            "16 non-finite gradient elements in w, pushed by rank 0");
}

}  // namespace
}  // namespace stiefel
